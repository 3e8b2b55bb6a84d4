"""Compare a checkpoint with a model and an optimizer, and build the optimizer's state dict from it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from accordion._torch import local_of, rows_dtensor
from accordion.checkpoint.boxes import box_of
from accordion.checkpoint.contents import Contents, cuts, optimizer_name, own_coordinate
from accordion.checkpoint.format import CODES, DTYPES, Manifest, TensorEntry, holds
from accordion.checkpoint.json_values import Json, decode
from accordion.checkpoint.optimizer_list import parts_of
from accordion.checkpoint.optimizer_states import RankStates
from accordion.errors import CheckpointError
from accordion.optimizers.low_bit import LowBitStates, packed_shape


def differences(manifest: Manifest, contents: Contents, states: RankStates | None = None) -> list[str]:
    """Return texts that describe each difference between the checkpoint and `contents`; empty if the checkpoint fits."""
    wanted = contents.of_model()
    sources = {name: manifest.aliases.get(name, name) for name in wanted}
    used = set(sources.values())
    missing = [name for name, source in sources.items() if source not in manifest.tensors]
    surplus = [name for name in manifest.tensors if name.startswith("model/") and name not in used] if wanted else []
    # A surplus tensor may be one that the model ties to another tensor, and the checkpoint does not.
    ties = {name: f"{name} (the model ties it to {source})" for name, source in contents.aliases.items()}
    shapes, kinds = [], []
    for name, source in sources.items():
        if (entry := manifest.tensors.get(source)) is None:
            continue
        tensor, both = wanted[name], f"{name} is {{}} in the checkpoint and {{}} in the model".format
        if entry.shape != tuple(tensor.shape):
            shapes.append(both(entry.shape, tuple(tensor.shape)))
        if not holds(tensor.dtype, DTYPES[entry.dtype]):
            kinds.append(both(entry.dtype, CODES.get(tensor.dtype, tensor.dtype)))
    unlike = [
        *_listed("missing in the checkpoint", missing),
        *_listed("in the checkpoint but not in the model", [ties.get(name, name) for name in surplus]),
        *_listed("of another shape", shapes),
        *_listed("of another kind", kinds),
    ]
    if contents.optimizer is not None:
        unlike += _optimizer_differences(manifest.optimizer, contents.optimizer)
    return unlike + ([states.why] if states is not None and states.why is not None else [])


def _listed(what: str, names: Iterable[str]) -> list[str]:
    """Return ["NUMBER WHAT: NAME, NAME, ..."], or [] if there are no `names`."""
    names = list(names)
    return [f"{len(names)} {what}: {', '.join(names)}"] if names else []


def _optimizer_differences(saved: Json, current: Json) -> list[str]:
    if saved is None:
        return ["it was saved without an optimizer; load it without one"]
    if _lacks_wrapper(saved, current):
        return [f"it has low-bit states; pass the {optimizer_name(current)} to wrap_optimizer before it is loaded"]
    if not _is_related(saved, current):
        names = [optimizer_name(words) for words in (saved, current)]
        return [f"it was saved with {names[0]} and the optimizer is {names[1]}, whose states have other meanings"]
    theirs, ours = ([group["params"] for group in words["groups"]] for words in (saved, current))
    unlike = []
    if len(theirs) != len(ours):
        unlike.append(f"it has {len(theirs)} parameter groups and the optimizer has {len(ours)}")
    all_theirs, all_ours = ({name for names in groups for name in names} for groups in (theirs, ours))
    for i, our in enumerate(ours):
        text = f"missing in the checkpoint's parameter group {i}" if i < len(theirs) else f"of group {i} missing in it"
        unlike += _listed(text, (name for name in our if name not in all_theirs))
    for i, their in enumerate(theirs):
        unlike += _listed(
            f"only in the checkpoint's parameter group {i}", (name for name in their if name not in all_ours)
        )
    for i, their in enumerate(_sources(saved, current)):
        if len(their) > 1:
            numbers = ", ".join(map(str, their))
            unlike.append(
                f"parameter group {i} has parameters of the checkpoint's groups {numbers}, so it keeps its current options"
            )
        elif their and their != [i]:
            unlike.append(
                f"parameter group {i} is the checkpoint's group {their[0]} (with strict=False it takes the options of that group)"
            )
    return unlike


def _is_related(saved: Json, current: Json) -> bool:
    """Return True if the class of one optimizer equals or inherits from the other's, or the saved one's is not recorded."""
    theirs, ours = saved.get("kind") or [], current["kind"]
    return not theirs or theirs[0] in ours or ours[0] in theirs


def _lacks_wrapper(saved: Json, current: Json) -> bool:
    """Return True if `saved` has low-bit states in the form that `wrap_optimizer` gives them, and `current` is not wrapped."""
    return LowBitStates.__name__ in (saved.get("kind") or []) and LowBitStates.__name__ not in current["kind"]


def _sources(saved: Json, current: Json) -> list[list[int]]:
    """Return for each group of `current` the indices of the groups of `saved` that contain any of its parameters."""
    theirs = {name: i for i, group in enumerate(saved["groups"]) for name in group["params"]}
    return [sorted({theirs[name] for name in group["params"] if name in theirs}) for group in current["groups"]]


def restored(
    manifest: Manifest, contents: Contents, optimizer: torch.optim.Optimizer, states: RankStates | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the state dict to load into `optimizer`, {saved name: tensor in it that is still to be filled}).

    A parameter keeps its current states if the saved optimizer lacks it, if it was saved with another shape, or if its saved
    states belong to other rows of it. Any other parameter gets its saved states, or none if none were saved. If the saved
    optimizer is of another class, nothing changes.
    """
    tensors: dict[str, Tensor] = {}
    low_bit = [part.param_groups for part in parts_of(optimizer) if isinstance(part, LowBitStates)]
    has_blocks = {id(p) for groups in low_bit for group in groups for p in group["params"]}

    def tensor_for(param: Tensor | None, name: str) -> Tensor:
        if states is not None and param is not None and name.startswith(states.prefix):
            state, local = states.tensor(manifest, name, param, contents.tensors.get(name.removeprefix(states.prefix)))
            if local.numel():
                tensors[name] = local
            return state
        if name not in manifest.tensors:
            raise CheckpointError(f"the optimizer's state refers to {name}, which the checkpoint does not hold.")
        tensors[name] = _fitting(
            name, manifest.tensors[name], param, contents.tensors.get(name), id(param) in has_blocks
        )
        return tensors[name]

    words, current = manifest.optimizer, optimizer.state_dict()
    if words is None or _lacks_wrapper(words, contents.optimizer) or not _is_related(words, contents.optimizer):
        return current, tensors
    groups = []
    for group, sources in zip(current["param_groups"], _sources(words, contents.optimizer), strict=True):
        options = words["groups"][sources[0]]["options"] if len(sources) == 1 else {}
        groups.append({**group, **decode(options, partial(tensor_for, None)), "params": group["params"]})
    state = current["state"] | decode(words.get("shared", {}), partial(tensor_for, None))
    saved_params = {name for group in words["groups"] for name in group["params"]}
    for group, ours in zip(groups, contents.optimizer["groups"], strict=True):
        for index, name in zip(group["params"], ours["params"], strict=True):
            param, entry = contents.params[name], manifest.tensors.get("model/" + name)
            fits = (entry is None or entry.shape == tuple(param.shape)) and not (states and name in states.misfits)
            fits = fits and name in saved_params
            state.pop(index, None) if fits else None
            if fits and name in words["state"]:
                saved = words["state"][name] if states is None else states.put_into(name, words["state"][name])
                state[index] = decode(saved, partial(tensor_for, param))
                if not isinstance(state[index], dict):
                    raise CheckpointError(f"the optimizer's state of {name} is no dict.")
    return {"state": state, "param_groups": groups}, tensors


def _fitting(name: str, entry: TensorEntry, param: Tensor | None, present: Tensor | None, has_blocks: bool) -> Tensor:
    """Return the tensor to fill from `entry`: the optimizer's `present` one if its shape and dtype fit, else a new one.

    A new one is sharded like `param` if it has the shape of `param`, and on dim 0 over the same ranks if it was saved in rows or,
    with `has_blocks` (the states of `param` are low-bit), has one element for each block of `param`. Any other new one is whole
    on each rank.
    """
    # torch keeps the step count as a plain tensor. Its shape does not show that, since a parameter may be 0-d too.
    dtype, step = DTYPES[entry.dtype], name.endswith("/step")
    like = param is not None and entry.shape == tuple(param.shape) and not step
    placed = isinstance(param, DTensor) and not step and (like or entry.placements is not None)
    same = present is not None and tuple(present.shape) == entry.shape and holds(present.dtype, dtype)
    if present is not None and same and isinstance(present, DTensor) == placed:
        return present
    if like:
        assert param is not None
        return torch.empty_like(param.detach(), dtype=dtype)
    if not placed or param is None:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    assert isinstance(param, DTensor)
    block, none = (
        param.numel() // max(1, math.prod(entry.shape)),
        torch.empty(0, dtype=dtype, device=local_of(param).device),
    )
    is_packed = has_blocks and block > 0 and entry.shape == packed_shape(param.shape, block)
    if is_packed or any(placement != "R" for placement in entry.placements or ()):
        splits = cuts(name, rows_dtensor(none, param, entry.shape), own_coordinate(param))
        return rows_dtensor(none.new_empty(box_of(entry.shape, splits).shape), param, entry.shape)
    mesh = param.device_mesh
    return DTensor.from_local(none.new_empty(entry.shape), mesh, [Replicate()] * mesh.ndim, run_check=False)
