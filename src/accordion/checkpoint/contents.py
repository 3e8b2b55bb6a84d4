"""What of a model and an optimizer belongs into a checkpoint, under which name, and which part of it a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from accordion._torch import StridedShard, local_of
from accordion.checkpoint.boxes import Box, DimCut, box_of
from accordion.checkpoint.json_values import Json, encode
from accordion.errors import CheckpointError, UsageError
from accordion.optim import inner_of
from accordion.state import Only, chosen

OF_RANKS = "rank/"  # begins the names of tensors that a rank keeps for itself
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and activation checkpointing


class Stateful(Protocol):
    """A scheduler, a scaler, a data loader: what keeps its state in `state_dict`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The tensors by name, further names of tied ones, and the optimizer's values as JSON that refers to tensors."""

    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    params: Mapping[str, Tensor]  # of the model, by name, whichever of them a checkpoint holds
    optimizer: Json = None

    def of_model(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if name.startswith("model/")}


def check_stateful(state: Mapping[str, Stateful], method: str) -> None:
    """Raise `UsageError` for what lacks the method that a save or a load calls."""
    for key, thing in state.items():
        if not hasattr(thing, method):
            raise UsageError(
                f"state[{key!r}] is a {type(thing).__name__}, which has no {method}; plain values belong into `extra`."
            )


def only_one(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """The optimizer that steps, of one around another. Raises `UsageError` for what is none, several in a list say."""
    if optimizer is None:
        return None
    inner = inner_of(optimizer)
    if not all(hasattr(inner, name) for name in ("param_groups", "state_dict", "load_state_dict")):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}; a checkpoint holds the states of one torch.optim.Optimizer: put its "
            "parameters into one optimizer, or save each under a path of its own."
        )
    return inner


def contents(model: nn.Module, optimizer: torch.optim.Optimizer | None, only: Only = None) -> Contents:
    """Name what is to be saved, or to be filled. Raises `CheckpointError` for what a checkpoint cannot hold.

    `only`: which tensors of the model; the optimizer's states are those of its own parameters.
    """
    tensors, aliases = model_tensors(model)
    params = {name.removeprefix("model/"): tensor for name, tensor in tensors.items()}
    names = {id(tensor): name for name, tensor in params.items()}
    if only is not None:
        wanted = chosen(params, only)
        tensors = {f"model/{name}": tensor for name, tensor in wanted.items()}
        aliases = {name: source for name, source in aliases.items() if source in tensors}
    if optimizer is None:
        return Contents(tensors=tensors, aliases=aliases, params=params)
    words, state = optimizer_state(optimizer, names)
    return Contents(tensors={**tensors, **state}, aliases=aliases, params=params, optimizer=words)


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers by name, each once, and the other names of those with several."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for key, tensor in named_tensors(model).items():
        name = "model/" + key
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)], tensors[name] = name, tensor
    return tensors, aliases


def named_tensors(model: nn.Module, wrappers: Iterable[str] = WRAPPERS) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name without the names of `wrappers`, tied ones under each of their names."""
    tensors: dict[str, Tensor] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{key} is a {type(tensor).__name__} and no tensor; files of tensors cannot hold it.")
        name = without_wrappers(key, wrappers)
        if name in tensors:
            raise CheckpointError(
                f"{key} and another tensor of the model are both {name} without the names of wrappers; rename one of them."
            )
        tensors[name] = tensor
    return tensors


def without_wrappers(name: str, wrappers: Iterable[str] = WRAPPERS) -> str:
    """Return a tensor's name without the names that wrappers put into it."""
    for wrapper in wrappers:
        name = name.replace(wrapper, "")
    return name


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> tuple[Json, dict[str, Tensor]]:
    """The optimizer's groups and state keyed by names of parameters, and the tensors it refers to.

    `names`: id of a parameter -> its name in the model.
    """
    tensors: dict[str, Tensor] = {}
    by_index = dict(enumerate(param_names(optimizer, names)))
    kept = optimizer.state_dict()
    groups = []
    for i, group in enumerate(kept["param_groups"]):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        params = [by_index[index] for index in group["params"]]
        groups.append({"params": params, "options": encode(options, f"optimizer/groups/{i}", tensors)})
    state, shared = {}, {}
    for index, value in kept["state"].items():
        if index in by_index:
            state[by_index[index]] = encode(value, f"optimizer/state/{by_index[index]}", tensors)
        elif isinstance(index, str):
            shared[index] = encode(value, f"optimizer/shared/{index}", tensors)
        else:
            raise CheckpointError(
                f"the optimizer has state for {index!r}, which is neither one of its parameters nor a string."
            )
    for name, tensor in tensors.items():
        kind = type(local_data(tensor))
        if kind is not torch.Tensor:  # its elements are elsewhere, in tensors of its own
            raise CheckpointError(
                f"{name} is a {kind.__name__}, a kind of tensor that a checkpoint cannot hold; keep what it is made of in the "
                "optimizer's state as plain tensors, or save without the optimizer."
            )
    classes = [kind for kind in type(optimizer).__mro__ if issubclass(kind, torch.optim.Optimizer)]
    kinds = list(dict.fromkeys(kind.__name__ for kind in classes[:-1]))  # its own first, without `Optimizer` itself
    words = {"kind": kinds, "groups": groups, "state": state}
    return words | ({"shared": shared} if shared else {}), tensors


def optimizer_name(words: Json) -> str:
    """How a message calls the optimizer that these words describe."""
    return "no optimizer" if words is None else str((words.get("kind") or ["an optimizer"])[0])


def param_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[str]:
    """Names of the optimizer's parameters in the order of its state dict's indices."""
    found = []
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise CheckpointError(
                    f"group {i} of the optimizer holds a parameter of shape {tuple(param.shape)} that is not the "
                    "model's; make the optimizer from model.parameters() after sharding."
                )
            found.append(names[id(param)])
    return found


def own_box(name: str, tensor: Tensor) -> Box:
    """What this rank holds of `tensor`, with its local tensor compared with what the placements say."""
    if not isinstance(tensor, DTensor):
        return box_of(tensor.shape, ())
    box, found = box_of(tensor.shape, cuts(name, tensor, own_coordinate(tensor))), tuple(local_of(tensor).shape)
    if found != box.shape:
        raise CheckpointError(
            f"{name} of shape {tuple(tensor.shape)} is placed {tensor.placements}, which gives this rank {box.shape}, "
            f"but its local tensor is {found}."
        )
    return box


def own_coordinate(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank is on the mesh of `tensor`."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of the mesh has no part in a checkpoint"
    return tuple(coordinate)


def writes(tensor: DTensor, coordinate: tuple[int, ...]) -> bool:
    """Whether the rank at `coordinate` writes its shard: of equal copies the first does."""
    placed = zip(tensor.placements, coordinate, strict=True)
    return not any(isinstance(placement, Replicate) and index for placement, index in placed)


def cuts(name: str, tensor: DTensor, coordinate: tuple[int, ...]) -> list[DimCut]:
    """How the placements of `tensor` cut it for the rank at `coordinate`, first cut first.

    Mesh axes cut from left to right, but a strided one after all to its right: its split factor is the number of their
    chunks. `shard` cuts so too. torch says the same where rows divide; where they do not, its own strided shards may
    be of several boxes, and `own_box` refuses them by their size.
    """
    found: list[DimCut] = []
    axes = zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True)
    for placement, num_chunks, index in reversed(list(axes)):
        if isinstance(placement, StridedShard):  # asked first: with some versions it is a Shard too
            dim, split = placement.dim, int(placement.split_factor)
            if split == math.prod(cut.num_chunks for cut in found if cut.dim == dim):
                found.append(DimCut(dim, num_chunks, index))
                continue
        elif isinstance(placement, Shard):
            found.insert(0, DimCut(placement.dim, num_chunks, index))
            continue
        elif isinstance(placement, Replicate):
            continue
        raise CheckpointError(
            f"{name} is placed {tensor.placements} on a mesh of {tuple(tensor.device_mesh.shape)}; "
            "a checkpoint holds sharded and replicated tensors only."
        )
    return found


def placement_words(tensor: Tensor) -> tuple[str, ...] | None:
    """The placements as the manifest tells them to a reader, a word for each mesh axis."""
    if not isinstance(tensor, DTensor):
        return None
    return tuple(str(placement) for placement in tensor.placements)


def local_data(tensor: Tensor) -> Tensor:
    """The elements that this rank holds, as a plain tensor that shares them and needs no gradient."""
    return (local_of(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def rank_prefix(rank: int) -> str:
    """Begins the names of tensors that a rank keeps for itself."""
    return f"{OF_RANKS}{rank:05d}/"


def state_name(rank: int) -> str:
    """The tensor that holds what a rank keeps of `state`, as JSON."""
    return f"{rank_prefix(rank)}state"
