"""Checkpoints of training libraries: folders of `accordion.save` inside them, and state dicts converted to full tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

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
from accordion.optimizers.wrap import inner_of

Pair = tuple[nn.Module, list[Any]]
PLACED = "_accordion_placements"  # attribute of a full tensor: its placements when it was sharded


def paired(models: Sequence[nn.Module], optimizers: Iterable[Any]) -> list[Pair]:
    """Return (model, its optimizers) for each of `models`. An optimizer without parameters of any model is left out. Raises
    `UsageError` if an optimizer has parameters of several models, or parameters of a model and others that no model has."""
    owner = {id(param): i for i, model in enumerate(models) for param in model.parameters()}
    pairs: list[Pair] = [(model, []) for model in models]
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        model_indices = {owner.get(id(param), -1) for param in params}
        if len(model_indices) > 1 and min(model_indices) < 0:
            raise UsageError(
                f"the optimizer {type(inner_of(optimizer)).__name__} has parameters of a model and others that no prepared model "
                "has, such as those of a loss; create an optimizer for each of them."
            )
        if len(model_indices) > 1:
            raise UsageError(
                f"the optimizer {type(inner_of(optimizer)).__name__} has parameters of several models, but its states are saved "
                "with one model. Create an optimizer for each model."
            )
        if model_indices and min(model_indices) >= 0:
            pairs[min(model_indices)][1].append(optimizer)
    return pairs


def parts(pairs: list[Pair]) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield (folder name, model, optimizer or None) of each checkpoint to save. A model with several optimizers has one
    checkpoint for each of them, and a model without an optimizer has one."""
    for i, (model, optimizers) in enumerate(pairs):
        for j, optimizer in enumerate(optimizers or [None]):
            yield f"sharded_{i}" + (f"_optimizer_{j}" if j else ""), model, optimizer


def engines_of(models: Iterable[nn.Module]) -> list[Engine]:
    engines = [engine for model in models if (engine := engine_of(model)) is not None]
    return list({id(engine): engine for engine in engines}.values())


def why_incomplete(folder: Path) -> str:
    """Return the reason why a folder of `accordion.save` is incomplete; "" if it is complete. Reads manifest and file sizes."""
    try:
        with closing(opened(checkpoint_at(folder))) as files:
            files.check_sizes()
    except CheckpointError as error:
        return str(error)
    return ""


def whole(value: Any, keep: bool, *, mark: bool = False) -> Any:
    """Return `value` with each sharded tensor in it, at any depth, replaced by the full one on the host, detached. Collective.

    Args:
        value: nested containers, with the same sharded tensors in the same order on all ranks.
        keep: False returns None in place of the sharded tensors, on ranks that do not need them.
        mark: store the placements on the full tensors, for `placed`.
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


def placed(value: dict[str, Any], models: Iterable[nn.Module]) -> dict[str, Any]:
    """Return `value`, a nested dict, with each full tensor that `whole(mark=True)` marked replaced by a DTensor. That is
    sharded like a parameter of `models` with the same shape, if possible one with the tensor's former placements; without a
    parameter of the same shape it is replicated. If `models` have no sharded parameter, nothing is replaced."""
    params = [param for model in models for param in model.parameters() if isinstance(param, DTensor)]

    def sharded(tensor: Tensor) -> Any:
        if not hasattr(tensor, PLACED) or not params:
            return tensor
        placements = getattr(tensor, PLACED)
        like = min(params, key=lambda p: (p.shape != tensor.shape, str(p.placements) != placements))
        return _cut_like(tensor.detach(), like)

    return map_tensors(sharded, value)  # type: ignore[no-any-return]


class SavedFull:
    """Wrapper of an object that a library saves: `state_dict`, a collective, returns full tensors; `load_state_dict` shards
    them like parameters of `models`. `keep`: True on ranks that save; elsewhere `state_dict` has None for sharded tensors."""

    def __init__(self, inner: Any, models: Iterable[nn.Module], keep: bool) -> None:
        self._inner, self._models, self._keep = inner, models, keep

    def state_dict(self) -> Any:
        return whole(self._inner.state_dict(), self._keep, mark=True)

    def load_state_dict(self, state: Any) -> None:
        self._inner.load_state_dict(placed(state, self._models))


def state_for_all(optimizer: Optimizer) -> dict[str, Any]:
    """Return `optimizer.state_dict()`, in which sharded states are still DTensors. Raises `UsageError` if a parameter that is
    sharded over several ranks has as state a plain tensor of one or more dims, because its values may differ between ranks."""
    state: dict[str, Any] = optimizer.state_dict()
    for index, param in _numbered(optimizer, state):
        if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
            continue
        for name, one in state["state"].get(index, {}).items():
            if isinstance(one, Tensor) and not isinstance(one, DTensor) and one.ndim:
                raise UsageError(
                    f"{type(inner_of(optimizer)).__name__} has the state {name!r} of shape {tuple(one.shape)} that differs "
                    'between ranks, so a full checkpoint cannot contain it. Pass state_dict_type="sharded".'
                )
    return state


def load_whole(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state dict `state`, with full tensors that are equal on all ranks, into `optimizer`. States of a sharded
    parameter are sharded like it if they have the same shape, else replicated; 0-d states stay plain tensors. Collective."""
    states = {index: dict(one) for index, one in state["state"].items()}
    for index, param in _numbered(optimizer, state):
        if isinstance(param, DTensor) and index in states:
            for name, one in states[index].items():
                if isinstance(one, Tensor) and not isinstance(one, DTensor) and one.ndim:
                    states[index][name] = _cut_like(one, param)
    optimizer.load_state_dict({**state, "state": states})


def _numbered(optimizer: Optimizer, state: Mapping[str, Any]) -> list[tuple[Any, Tensor]]:
    indices = chain.from_iterable(group["params"] for group in state["param_groups"])
    return list(zip(indices, chain.from_iterable(group["params"] for group in optimizer.param_groups), strict=False))


def _cut_like(one: Tensor, param: DTensor) -> DTensor:
    """Return the full tensor `one` as a DTensor on the mesh of `param`: sharded like it if shapes are equal, else replicated."""
    same_shape = one.shape == param.shape
    placements = param.placements if same_shape else [Replicate()] * param.device_mesh.ndim
    cut = distribute_tensor(one.to(param.device), param.device_mesh, placements, src_data_rank=None)
    assert not same_shape or _torch.local_of(cut).shape == _torch.local_of(param).shape, (
        "distribute_tensor shards other rows"
    )
    return cut
