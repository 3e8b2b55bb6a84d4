"""A library's own checkpoint files: our checkpoints among them, and state dicts of full tensors, from shards and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from accordion import _torch
from accordion.checkpoint.reading import opened
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.engine.engine import Engine
from accordion.engine.hooks import engine_of
from accordion.engine.tree import map_tensors
from accordion.errors import CheckpointError, UsageError
from accordion.optim import inner_of

Tree = TypeVar("Tree")
Pair = tuple[nn.Module, list[Any]]
PLACED = "_accordion_placements"  # the attribute of a full tensor that was sharded and is no parameter of the model


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


def whole(value: Any, keep: bool, *, mark: bool = False) -> Any:
    """Return `value` with each sharded tensor in it, at any depth, gathered to the host. Collective; of trees alike.

    Args:
        keep: whether this rank wants the tensors; otherwise they are None.
        mark: let the tensors remember that they were sharded, for `placed`.
    """

    def gathered(tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        with torch.no_grad():
            detached: Any = tensor.detach()
            full = detached.full_tensor()
        if not keep:
            return None
        full = full.cpu()
        if mark:
            setattr(full, PLACED, str(tensor.placements))
        return full

    return map_tensors(gathered, value)


def placed(value: Tree, models: Iterable[nn.Module]) -> Tree:
    """Return `value` with each tensor that `whole` has marked in it sharded again, like the parameter of its shape."""
    params = [param for model in models for param in model.parameters() if isinstance(param, DTensor)]

    def sharded(tensor: Tensor) -> Any:
        if not hasattr(tensor, PLACED) or not params:
            return tensor
        placements = getattr(tensor, PLACED)
        like = min(params, key=lambda p: (p.shape != tensor.shape, str(p.placements) != placements))
        return _cut_like(tensor.detach(), like)

    return map_tensors(sharded, value)  # type: ignore[no-any-return]


class Beside:
    """Stands for an object beside the models: a library saves its sharded tensors whole, and loads them sharded again."""

    def __init__(self, inner: Any, models: Iterable[nn.Module], keep: bool) -> None:
        self._inner, self._models, self._keep = inner, models, keep

    def state_dict(self) -> Any:
        return whole(self._inner.state_dict(), self._keep, mark=True)

    def load_state_dict(self, state: Any) -> None:
        self._inner.load_state_dict(placed(state, self._models))


def state_for_all(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state dict, of sharded tensors; raises `UsageError` for states that are one rank's alone."""
    state: dict[str, Any] = optimizer.state_dict()
    for index, param in _numbered(optimizer, state):
        if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
            continue
        for name, one in state["state"].get(index, {}).items():
            if isinstance(one, Tensor) and not isinstance(one, DTensor) and one.ndim:
                raise UsageError(
                    f"{type(inner_of(optimizer)).__name__} keeps {name!r} of shape {tuple(one.shape)} for the rows of each rank "
                    'by itself, which no full checkpoint can hold; pass state_dict_type="sharded".'
                )
    return state


def load_whole(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict` of full states: each rank keeps its rows. Called by all ranks together."""
    mine = {index: dict(one) for index, one in state["state"].items()}
    for index, param in _numbered(optimizer, state):
        if isinstance(param, DTensor) and index in mine:
            for name, one in mine[index].items():
                if isinstance(one, Tensor) and not isinstance(one, DTensor) and one.ndim:
                    mine[index][name] = _cut_like(one, param)
    optimizer.load_state_dict({**state, "state": mine})


def _numbered(optimizer: Optimizer, state: Mapping[str, Any]) -> list[tuple[Any, Tensor]]:
    indices = chain.from_iterable(group["params"] for group in state["param_groups"])
    return list(zip(indices, chain.from_iterable(group["params"] for group in optimizer.param_groups), strict=False))


def _cut_like(one: Tensor, param: DTensor) -> DTensor:
    """Return a full tensor as the parameter's rows are placed if it has the parameter's shape, else on every rank."""
    alike = one.shape == param.shape
    placements = param.placements if alike else [Replicate()] * param.device_mesh.ndim
    cut = distribute_tensor(one.to(param.device), param.device_mesh, placements, src_data_rank=None)
    assert not alike or _torch.local_of(cut).shape == _torch.local_of(param).shape, (
        "rows lie as distribute_tensor cuts them"
    )
    return cut
