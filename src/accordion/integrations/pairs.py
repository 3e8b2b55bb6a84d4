"""Checkpoints of ours among a library's files: which optimizer is of which model, and whether a checkpoint is complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import nn

from accordion.checkpoint.reading import opened
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.engine.engine import Engine
from accordion.engine.hooks import engine_of
from accordion.errors import CheckpointError, UsageError
from accordion.optim import inner_of

Pair = tuple[nn.Module, list[Any]]


def paired(models: Sequence[nn.Module], optimizers: Iterable[Any]) -> list[Pair]:
    """Each sharded model with the optimizers of its parameters. Raises `UsageError` for one of several models."""
    owner = {id(param): i for i, model in enumerate(models) for param in model.parameters()}
    pairs: list[Pair] = [(model, []) for model in models]
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        of = {owner.get(id(param), -1) for param in params}
        if len(of) > 1:
            raise UsageError(
                f"an {type(inner_of(optimizer)).__name__} holds parameters of several models, and its states are saved with "
                "one; make an optimizer for each model."
            )
        if of and min(of) >= 0:
            pairs[min(of)][1].append(optimizer)
    return pairs


def parts(pairs: list[Pair]) -> Iterator[tuple[str, nn.Module, Any]]:
    """The checkpoints of which a saved state is made: one for a model, and one more for each further optimizer of it."""
    for i, (model, optimizers) in enumerate(pairs):
        for j, optimizer in enumerate(optimizers or [None]):
            yield f"sharded_{i}" + (f"_optimizer_{j}" if j else ""), model, optimizer


def engines_of(models: Iterable[nn.Module]) -> list[Engine]:
    engines = [engine for model in models if (engine := engine_of(model)) is not None]
    return list({id(engine): engine for engine in engines}.values())


def why_incomplete(folder: Path) -> str:
    """Return what a folder of `accordion.save` lacks by its manifest and the sizes of its files; empty if it is complete."""
    try:
        with closing(opened(checkpoint_at(folder))) as files:
            files.check_sizes()
    except CheckpointError as error:
        return str(error)
    return ""
