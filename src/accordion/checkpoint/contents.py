"""Name the tensors and values of a model and an optimizer for a checkpoint; compute the box of each tensor on this rank."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from accordion._torch import StridedShard, local_of
from accordion.checkpoint.boxes import Box, DimCut, box_of
from accordion.checkpoint.collective import Team
from accordion.checkpoint.json_values import Json, as_bytes, encode, renamed
from accordion.checkpoint.optimizer_list import parts_of
from accordion.errors import CheckpointError
from accordion.state import Only, chosen

OF_RANKS = "rank/"  # prefix of the names of tensors that are saved for each rank
OF_STATE = "state/"  # prefix of the names of sharded tensors in the states of the objects in `state=`
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # names from torch.compile and activation checkpointing


class Stateful(Protocol):
    """An object with `state_dict` and `load_state_dict` for `state=` of `save` and `load`, such as a scheduler or scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The tensors that a save writes or a load fills, by name in the checkpoint ("model/w"), and the optimizer's values, as
    `contents` returns them. `params`: all tensors of the model, even those that `only` leaves out, by name in it ("w")."""

    tensors: Mapping[str, Tensor]  # a save adds the DTensors of the objects in `state=`
    aliases: Mapping[str, str]  # other name of a tied tensor -> its name in `tensors`
    params: Mapping[str, Tensor]
    optimizer: Json = None  # class names, groups and states, which refer to `tensors` by name

    def of_model(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if name.startswith("model/")}


def contents(model: nn.Module, optimizer: Optimizer | None, only: Only = None) -> Contents:
    """Return the tensors and values that a save writes or a load fills, without copies.

    `only` selects tensors of the model: None all, `()` none. The states of all parameters of the optimizer are always included.
    Raises `CheckpointError` for values that a checkpoint cannot hold, `UsageError` if another `only` than `()` selects nothing.
    """
    tensors, aliases = model_tensors(model)
    params = {name.removeprefix("model/"): tensor for name, tensor in tensors.items()}
    if only is not None:
        wanted = chosen(params, only)
        tensors = {f"model/{name}": tensor for name, tensor in wanted.items()}
        aliases = {name: source for name, source in aliases.items() if source in tensors}
    if optimizer is None:
        return Contents(tensors=tensors, aliases=aliases, params=params)
    words, state = optimizer_state(optimizer, {id(tensor): name for name, tensor in params.items()})
    return Contents(tensors={**tensors, **state}, aliases=aliases, params=params, optimizer=words)


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return ({name: parameter or persistent buffer}, {further name of a tied tensor: its first name}). A name is "model/" and
    the state dict's key without `WRAPPERS`. Raises `CheckpointError` for a value that is no tensor, and for two equal names."""
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
    """Return {name without the texts `wrappers`: parameter or persistent buffer}, tied ones under each of their names. Raises
    `CheckpointError` if the state dict has a value that is no tensor, or if two names are equal without `wrappers`."""
    tensors: dict[str, Tensor] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{key} is a {type(tensor).__name__} and no tensor; a checkpoint cannot hold it.")
        name = without_wrappers(key, wrappers)
        if name in tensors:
            raise CheckpointError(
                f"{key} and another tensor of the model have the same name {name} without the prefixes of wrappers; rename one."
            )
        tensors[name] = tensor
    return tensors


def without_wrappers(name: str, wrappers: Iterable[str] = WRAPPERS) -> str:
    """Return `name` without the texts `wrappers`, which modules such as torch.compile add ("_orig_mod.w" becomes "w")."""
    for wrapper in wrappers:
        name = name.replace(wrapper, "")
    return name


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[Json, dict[str, Tensor]]:
    """Return (JSON of the optimizer, {name: tensor to which the JSON refers}).

    The JSON is {"kind": class names, "groups": [{"params": names of parameters, "options": ...}], "state": {name of a
    parameter: its states}, "shared": {key: state that belongs to no parameter}}, without "shared" if there are none. `names`:
    id of a parameter -> its name in the model. Raises `CheckpointError` for states that a checkpoint cannot hold and for
    parameters that are not in `names`.
    """
    tensors: dict[str, Tensor] = {}
    by_index: dict[int, str] = {}
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise CheckpointError(
                    f"group {i} of the optimizer holds a parameter of shape {tuple(param.shape)} that is not the "
                    "model's; make the optimizer from model.parameters() after sharding."
                )
            by_index[len(by_index)] = names[id(param)]
    saved = optimizer.state_dict()
    groups = []
    for i, group in enumerate(saved["param_groups"]):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        params = [by_index[index] for index in group["params"]]
        groups.append({"params": params, "options": encode(options, f"optimizer/groups/{i}", tensors)})
    state, shared = {}, {}
    for index, value in saved["state"].items():
        if index in by_index:
            state[by_index[index]] = encode(value, f"optimizer/state/{by_index[index]}", tensors)
        elif isinstance(index, str):
            shared[index] = encode(value, f"optimizer/shared/{index}", tensors)
        else:
            raise CheckpointError(
                f"the optimizer has a state under the key {index!r}, which is neither one of its parameters nor a string."
            )
    for name, tensor in tensors.items():
        kind = type(local_data(tensor))
        if kind is not torch.Tensor:  # a subclass keeps its elements in inner tensors
            raise CheckpointError(
                f"{name} is a {kind.__name__}, a tensor subclass that a checkpoint cannot hold; keep its inner tensors in the "
                "optimizer's state as plain tensors, or save without the optimizer."
            )
    # For each optimizer the names of its classes, its own first, without `Optimizer`.
    classes = [
        [k.__name__ for k in type(part).__mro__ if issubclass(k, Optimizer)][:-1] for part in parts_of(optimizer)
    ]
    kinds = list(dict.fromkeys(classes[0])) if len(classes) == 1 else [" + ".join(names[0] for names in classes)]
    words = {"kind": kinds, "groups": groups, "state": state}
    return words | ({"shared": shared} if shared else {}), tensors


def optimizer_name(words: Json) -> str:
    """Return the optimizer's class name from `words`, the JSON that `optimizer_state` returns; "no optimizer" for None."""
    return "no optimizer" if words is None else str((words.get("kind") or ["an optimizer"])[0])


def own_box(name: str, tensor: Tensor) -> Box:
    """Return the box of `tensor` that this rank has: all of a plain tensor. Raises `CheckpointError`, with `name`, if `cuts`
    refuses the placements of a DTensor, or if its local tensor has another shape than they give."""
    if not isinstance(tensor, DTensor):
        return box_of(tensor.shape, ())
    box = box_of(tensor.shape, cuts(name, tensor))
    local_shape = tuple(local_of(tensor).shape)
    if local_shape != box.shape:
        raise CheckpointError(
            f"{name} of shape {tuple(tensor.shape)} is placed {tensor.placements}, which gives this rank {box.shape}, "
            f"but its local tensor is {local_shape}."
        )
    return box


def _own_coordinate(tensor: DTensor) -> tuple[int, ...]:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "only ranks of the mesh save and load"
    return tuple(coordinate)


def writes(tensor: DTensor) -> bool:
    """Return True if this rank writes its shard of `tensor`: if it is the first of the ranks that have this shard."""
    placed = zip(tensor.placements, _own_coordinate(tensor), strict=True)
    return not any(isinstance(placement, Replicate) and index for placement, index in placed)


def cuts(name: str, tensor: DTensor) -> list[DimCut]:
    """Return the splits, in order, that turn the whole `tensor` into the shard of this rank.

    The mesh axes split a dim from left to right, but an axis with a strided shard splits after all axes to its right. Raises
    `CheckpointError`, with `name`, for placements that neither replicate nor shard, and for a strided shard whose split factor
    is not the number of chunks that the axes to its right make of its dim.
    """
    # `shard` splits in the same way, and so does torch if rows divide evenly. If they do not, a strided shard of torch may
    # consist of several boxes, and `own_box` refuses it by its size.
    splits: list[DimCut] = []
    axes = zip(tensor.placements, tensor.device_mesh.shape, _own_coordinate(tensor), strict=True)
    for placement, num_chunks, index in reversed(list(axes)):
        if isinstance(placement, StridedShard):  # before Shard, of which it is a subclass in some versions of torch
            dim, factor = placement.dim, int(placement.split_factor)
            if factor == math.prod(split.num_chunks for split in splits if split.dim == dim):
                splits.append(DimCut(dim, num_chunks, index))
                continue
        elif isinstance(placement, Shard):
            splits.insert(0, DimCut(placement.dim, num_chunks, index))
            continue
        elif isinstance(placement, Replicate):
            continue
        raise CheckpointError(
            f"{name} is placed {tensor.placements} on a mesh of {tuple(tensor.device_mesh.shape)}; "
            "a checkpoint holds sharded and replicated tensors only."
        )
    return splits


def placement_words(tensor: Tensor) -> tuple[str, ...] | None:
    """Return the placements of `tensor` as text for the manifest, one for each mesh axis; None for a plain tensor."""
    return tuple(map(str, tensor.placements)) if isinstance(tensor, DTensor) else None


def local_data(tensor: Tensor) -> Tensor:
    """Return this rank's local tensor of a DTensor, or a plain `tensor` itself, detached: it shares memory with `tensor`."""
    return (local_of(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def rank_prefix(rank: int) -> str:
    return f"{OF_RANKS}{rank:05d}/"


def state_name(rank: int) -> str:
    """Return the name of the tensor that holds, as bytes of JSON, the states of the objects that `rank` saved by `state=`."""
    return f"{rank_prefix(rank)}state"


def object_states(state: Mapping[str, Stateful], team: Team) -> tuple[dict[str, DTensor], dict[str, Tensor]]:
    """Call `state_dict` of each object in `state`, the argument of `save`. Return two dicts, name in the checkpoint -> tensor:
    (DTensors, tensors saved for this rank alone). The latter are the plain tensors, and one with JSON of all states, which
    names the other tensors. Both dicts are {} without objects.

    Raises `CheckpointError` for values that a checkpoint cannot hold, and for tensors sharded over ranks other than `team`.
    """
    if not state:
        return {}, {}
    tensors: dict[str, Tensor] = {}
    words = encode({key: thing.state_dict() for key, thing in state.items()}, OF_STATE.rstrip("/"), tensors)
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    for name, tensor in sharded.items():
        if set(tensor.device_mesh.mesh.flatten().tolist()) != set(team.ranks):
            raise CheckpointError(
                f"{name} is sharded over other ranks than the model, whose ranks alone save and load."
            )
    names = {name: rank_prefix(team.index) + name for name in tensors if name not in sharded}
    own = {names[name]: tensors[name] for name in names}
    return sharded, {state_name(team.index): as_bytes(renamed(words, names)), **own}


class RandomState:
    """Object for `state=` of `save` and `load`: the random states of Python, numpy, torch and accelerator in this process.

    `load_state_dict` does nothing with the state of another rank, so that no two ranks draw the same numbers. If the number of
    ranks has changed, `load` passes the state of rank 0 to all, so only rank 0 restores it and the others keep theirs.
    """

    def state_dict(self) -> dict[str, Any]:
        kind, keys, position, has_gauss, gauss = cast(tuple[Any, ...], np.random.get_state(legacy=True))
        state = {
            "rank": _rank(),
            "python": random.getstate(),
            "numpy": (str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
            "torch": torch.get_rng_state(),
        }
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is not None:
            state["device"] = torch.get_device_module(device).get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        if state["rank"] != _rank():
            return
        random.setstate(state["python"])
        kind, keys, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
        torch.set_rng_state(state["torch"])
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is not None and "device" in state:
            torch.get_device_module(device).set_rng_state(state["device"])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
