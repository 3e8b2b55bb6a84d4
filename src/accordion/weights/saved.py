"""The weights of a checkpoint in a model that was sharded on the meta device, and has no value yet."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch
from torch import Tensor, nn

from accordion.checkpoint.collective import Team
from accordion.checkpoint.load import load
from accordion.errors import UsageError
from accordion.state import sharded_engine
from accordion.weights.initialise import materialised_buffers


def load_saved(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Fill a model that `shard` returned from a checkpoint, as `load` does; called by all ranks together.

    Nothing need have initialised it: buffers of the meta device that no checkpoint holds are computed by the modules' own code.
    Raises `CheckpointError` as `load` does, `UsageError` where a buffer has no such code.
    """
    engine = sharded_engine(model, "load")
    saved = held_by(model)
    with materialised_buffers(model, engine) as buffers:
        left = Team.of(model.parameters()).agree(lambda: buffers.compute_left(but=saved))
        if left:
            raise UsageError(
                f"{len(left)} buffers of the meta device are in no checkpoint and no module computes them: {', '.join(left)}; "
                "compute them in the `reset_parameters` of their modules."
            )
        load(path, model)


def held_by(model: nn.Module) -> Collection[int]:
    """Ids of the tensors in a model's state dict."""
    with torch.no_grad():
        values = model.state_dict(keep_vars=True).values()
    return {id(value) for value in values if isinstance(value, Tensor)}
