"""A model of the meta device that knows the folder of its weights, so that whoever shards it can fill it."""

from __future__ import annotations

import os

from torch import nn

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
