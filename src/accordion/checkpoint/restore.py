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
from accordion.checkpoint.contents import Contents, cuts, optimizer_name
from accordion.checkpoint.format import CODES, DTYPES, Manifest, TensorEntry, holds
from accordion.checkpoint.json_values import Json, decode
from accordion.checkpoint.optimizer_list import parts_of
from accordion.errors import CheckpointError
from accordion.optimizers.low_bit import LowBitStates, packed_shape


def differences(manifest: Manifest, contents: Contents) -> list[str]:
    """Return texts that describe the differences between the checkpoint and `contents`; [] if the checkpoint fits."""
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
        *listed("missing in the checkpoint", missing),
        *listed("in the checkpoint but not in the model", [ties.get(name, name) for name in surplus]),
        *listed("of another shape", shapes),
        *listed("of another kind", kinds),
    ]
    if contents.optimizer is not None:
        unlike += _optimizer_differences(manifest.optimizer, contents.optimizer)
    return unlike


def listed(what: str, names: Iterable[str]) -> list[str]:
    """Return ["NUMBER WHAT: NAME, NAME, ..."], or [] if there are no `names`."""
    names = list(names)
    return [f"{len(names)} {what}: {', '.join(names)}"] if names else []


def _optimizer_differences(saved: Json, current: Json) -> list[str]:
    if misfit := _misfit(saved, current):
        return [misfit]
    theirs, ours = ({n: i for i, g in enumerate(words["groups"]) for n in g["params"]} for words in (saved, current))
    return [
        *listed("missing in the checkpoint's parameter groups", (name for name in ours if name not in theirs)),
        *listed("only in the checkpoint's parameter groups", (name for name in theirs if name not in ours)),
        *(
            f"the parameters of group {i} are in group {', '.join(map(str, sources))} of the checkpoint (strict=False takes the "
            "options of one group, and of several none)"
            for i, sources in enumerate(_sources(saved, current))
            if sources not in ([], [i])
        ),
    ]


def _misfit(saved: Json, current: Json) -> str:
    """Return the reason why the optimizer `current` can take no state of the optimizer `saved`; "" if it can."""
    if saved is None:
        return "it was saved without an optimizer; load it without one"
    theirs, ours = saved.get("kind") or [], current["kind"]
    if LowBitStates.__name__ in theirs and LowBitStates.__name__ not in ours:
        return f"it has low-bit states; pass the {optimizer_name(current)} to wrap_optimizer before it is loaded"
    if saved.get("of_rows"):
        return "it has optimizer states of single ranks, which an earlier snapshot saved; load it without the optimizer"
    if theirs and theirs[0] not in ours and ours[0] not in theirs:  # neither class inherits from the other
        names = [optimizer_name(words) for words in (saved, current)]
        return f"it was saved with {names[0]} and the optimizer is {names[1]}, whose states have other meanings"
    return ""


def _sources(saved: Json, current: Json) -> list[list[int]]:
    """Return, for each group of the optimizer `current`, the indices of the groups of `saved` that have any of its parameters."""
    theirs = {name: i for i, group in enumerate(saved["groups"]) for name in group["params"]}
    return [sorted({theirs[name] for name in group["params"] if name in theirs}) for group in current["groups"]]


def restored(
    manifest: Manifest, contents: Contents, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the state dict to load into `optimizer`, {saved name: tensor in it that is still to be filled}).

    A parameter keeps its current states if the saved optimizer lacks it, or if it was saved with another shape. Any other
    parameter gets its saved states, or none if none were saved. A group takes the options of the saved group that had its
    parameters, and keeps its own if several or none had any. If the saved optimizer does not fit, for example because it is of
    another class, return the current state dict and {}. Raises `CheckpointError` if a saved state is no dict.
    """
    tensors: dict[str, Tensor] = {}
    low_bit = [part.param_groups for part in parts_of(optimizer) if isinstance(part, LowBitStates)]
    has_blocks = {id(p) for groups in low_bit for group in groups for p in group["params"]}

    def tensor_for(param: Tensor | None, name: str) -> Tensor:
        tensors[name] = _fitting(
            name, manifest.tensors[name], param, contents.tensors.get(name), id(param) in has_blocks
        )
        return tensors[name]

    words, current = manifest.optimizer, optimizer.state_dict()
    if _misfit(words, contents.optimizer):
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
            if name not in saved_params or (entry is not None and entry.shape != tuple(param.shape)):
                continue
            state.pop(index, None)
            if name in words["state"]:
                state[index] = decode(words["state"][name], partial(tensor_for, param))
                if not isinstance(state[index], dict):
                    raise CheckpointError(f"the optimizer's state of {name} is no dict.")
    return {"state": state, "param_groups": groups}, tensors


def _fitting(name: str, entry: TensorEntry, param: Tensor | None, present: Tensor | None, has_blocks: bool) -> Tensor:
    """Return the tensor to fill from `entry`: the optimizer's `present` one if its shape and dtype fit and it is a DTensor
    exactly if a new one would be; else a new one.

    A step count is plain, on the CPU. Any other new tensor with the shape of `param` is sharded like `param`. One of another
    shape is plain, on the CPU, if it was saved plain or `param` is no DTensor. Otherwise it is a DTensor on the mesh of `param`:
    sharded on dim 0 if it was saved sharded, or if `param` has low-bit states (`has_blocks`) and the tensor has one element for
    each block; replicated if not.
    """
    # torch keeps the step count as a plain tensor. Its shape does not show that, since a parameter may be 0-d too.
    dtype, step = DTYPES[entry.dtype], name.endswith("/step")
    like = param is not None and entry.shape == tuple(param.shape) and not step
    placed = isinstance(param, DTensor) and not step and (like or entry.placements is not None)
    if present is not None and entry.fits(present) and isinstance(present, DTensor) == placed:
        return present
    if like:
        assert param is not None
        return torch.empty_like(param.detach(), dtype=dtype)
    if not placed or param is None:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    assert isinstance(param, DTensor)
    block = param.numel() // max(1, math.prod(entry.shape))
    none = torch.empty(0, dtype=dtype, device=local_of(param).device)
    is_packed = has_blocks and block > 0 and entry.shape == packed_shape(param.shape, block)
    if is_packed or any(placement != "R" for placement in entry.placements or ()):
        splits = cuts(name, rows_dtensor(none, param, entry.shape))
        return rows_dtensor(none.new_empty(box_of(entry.shape, splits).shape), param, entry.shape)
    mesh = param.device_mesh
    return DTensor.from_local(none.new_empty(entry.shape), mesh, [Replicate()] * mesh.ndim, run_check=False)
