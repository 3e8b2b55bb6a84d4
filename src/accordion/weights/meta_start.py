"""Models that were sharded on the meta device: filled from the folder that they remember, or from a checkpoint."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from accordion.checkpoint.collective import Team
from accordion.checkpoint.load import load
from accordion.errors import UsageError
from accordion.state import sharded_engine
from accordion.weights.initialise import materialised_buffers
from accordion.weights.pretrained import load_pretrained

SOURCE = "_accordion_weights"  # in the instance of the module that was built for that folder


def remember_source(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Let `fill_from_source` find the weights of `model`, also inside of a model that is put around it."""
    vars(model)[SOURCE] = os.fspath(folder)


def source_of(model: nn.Module) -> str | None:
    """The folder of the weights of `model` or of a part of it; None where it has none, or has been filled."""
    return next((vars(module)[SOURCE] for module in model.modules() if SOURCE in vars(module)), None)


def fill_from_source(model: nn.Module) -> None:
    """Load the weights of a sharded model that has a source, once. Called by all ranks together."""
    folder = source_of(model)
    if folder is None:
        return
    load_pretrained(model, folder)
    for module in model.modules():
        vars(module).pop(SOURCE, None)


def load_saved(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Fill a model that `shard` returned from a checkpoint, as `load` does; called by all ranks together.

    Nothing need have initialised it: buffers of the meta device that no checkpoint holds are computed by the modules' own code.
    Raises `CheckpointError` as `load` does, `UsageError` where a buffer has no such code.
    """
    engine = sharded_engine(model, "load")
    with torch.no_grad():
        saved = {id(value) for value in model.state_dict(keep_vars=True).values() if isinstance(value, Tensor)}
    with materialised_buffers(model, engine) as buffers:
        left = Team.of(model.parameters()).agree(lambda: buffers.compute_left(but=saved))
        if left:
            raise UsageError(
                f"{len(left)} buffers of the meta device are in no checkpoint and no module computes them: {', '.join(left)}; "
                "compute them in the `reset_parameters` of their modules."
            )
        load(path, model)
