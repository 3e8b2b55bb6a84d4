"""Fills models that were sharded on the meta device, from the folder of their weights or from a checkpoint."""

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

SOURCE = "_accordion_weights"  # attribute of a module with the folder of its weights


def remember_source(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Store the path of its weights in `model`, for `fill_from_source` of this model or of one that it is a part of."""
    vars(model)[SOURCE] = os.fspath(folder)


def source_of(model: nn.Module) -> str | None:
    """Return the folder that `remember_source` stored in `model` or a module in it; None if there is none any more."""
    return next((vars(module)[SOURCE] for module in model.modules() if SOURCE in vars(module)), None)


def fill_from_source(model: nn.Module) -> None:
    """Load the weights of a sharded model from the folder that `source_of` returns, and forget the folder. Collective."""
    folder = source_of(model)
    if folder is None:
        return
    load_pretrained(model, folder)
    for module in model.modules():
        vars(module).pop(SOURCE, None)


def load_saved(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Fill a model that `shard` returned from the checkpoint at `path`, as `load` does; called by all ranks together.

    The model may be on the meta device: buffers that checkpoints do not contain are computed by the modules' own code.
    Raises `CheckpointError` as `load` does, and `UsageError` if a buffer has no such code.
    """
    engine = sharded_engine(model, "load")
    with torch.no_grad():
        saved = {id(value) for value in model.state_dict(keep_vars=True).values() if isinstance(value, Tensor)}
    with materialised_buffers(model, engine) as buffers:
        left = Team.of(model.parameters()).agree(lambda: buffers.compute_left(ignore=saved))
        if left:
            raise UsageError(
                f"{len(left)} buffers of the meta device are in no checkpoint, and no module computes them: {', '.join(left)}; "
                "compute them in the `reset_parameters` of their modules."
            )
        load(path, model)
