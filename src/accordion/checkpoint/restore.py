"""Whether a checkpoint fits a model and an optimizer, and the optimizer's state dict that it stands for."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from accordion.checkpoint.contents import Contents, optimizer_name
from accordion.checkpoint.format import CODES, DTYPES, Manifest, TensorEntry, holds
from accordion.checkpoint.json_values import Json, decode
from accordion.checkpoint.optimizer_states import OwnStates
from accordion.errors import CheckpointError

LONGEST_NAME = 300  # letters of one that a message lists


def differences(manifest: Manifest, found: Contents, own: OwnStates | None = None) -> list[str]:
    """Everything by which the checkpoint does not fit `found`, each naming both sides; empty if it fits."""
    wanted = found.of_model()
    sources = {name: manifest.aliases.get(name, name) for name in wanted}
    used = set(sources.values())
    missing = [name for name, source in sources.items() if source not in manifest.tensors]
    surplus = [name for name in manifest.tensors if name.startswith("model/") and name not in used] if wanted else []
    # A tie that the model has and the checkpoint has not is worth a word.
    ties = {name: f"{name} (the model ties it to {source})" for name, source in found.aliases.items()}
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
    if found.optimizer is not None:
        unlike += _optimizer_differences(manifest.optimizer, found.optimizer)
    return unlike + ([own.why] if own is not None and own.why is not None else [])


def _listed(what: str, names: Iterable[str]) -> list[str]:
    """One line for all `names`, none if there are none."""
    names = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in names]
    return [f"{len(names)} {what}: {', '.join(names)}"] if names else []


def _optimizer_differences(saved: Json, own: Json) -> list[str]:
    if saved is None:
        return ["it was saved without an optimizer; load it without one"]
    if not _is_related(saved, own):
        names = [optimizer_name(words) for words in (saved, own)]
        return [f"it was saved with {names[0]} and the optimizer is {names[1]}, whose states mean other things"]
    theirs, ours = ([group["params"] for group in words["groups"]] for words in (saved, own))
    unlike = []
    if len(theirs) != len(ours):
        unlike.append(f"it has {len(theirs)} parameter groups and the optimizer has {len(ours)}")
    all_theirs, all_ours = ({name for names in groups for name in names} for groups in (theirs, ours))
    for i, our in enumerate(ours):
        where = f"missing in the checkpoint's parameter group {i}" if i < len(theirs) else f"of group {i} missing in it"
        unlike += _listed(where, (name for name in our if name not in all_theirs))
    for i, their in enumerate(theirs):
        unlike += _listed(
            f"only in the checkpoint's parameter group {i}", (name for name in their if name not in all_ours)
        )
    for i, their in enumerate(_sources(saved, own)):
        if len(their) > 1:
            told = ", ".join(map(str, their))
            unlike.append(
                f"parameter group {i} is of groups {told} of the checkpoint, so that its options stay its own"
            )
        elif their and their != [i]:
            unlike.append(
                f"parameter group {i} is group {their[0]} of the checkpoint (with strict=False it takes that one's options)"
            )
    return unlike


def _is_related(saved: Json, own: Json) -> bool:
    """Whether one of the two kinds of optimizers is the other, or made of it; a converted checkpoint names none."""
    theirs, ours = saved.get("kind") or [], own["kind"]
    return not theirs or theirs[0] in ours or ours[0] in theirs


def _sources(saved: Json, own: Json) -> list[list[int]]:
    """For each group of the optimizer, those of the checkpoint that have parameters of it."""
    theirs = {name: i for i, group in enumerate(saved["groups"]) for name in group["params"]}
    return [sorted({theirs[name] for name in group["params"] if name in theirs}) for group in own["groups"]]


def restored(
    manifest: Manifest, found: Contents, optimizer: torch.optim.Optimizer, own: OwnStates | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state dict to give to `optimizer`, and its tensors by name, which are still to be filled. `own`: of this rank.

    What the checkpoint does not hold, or in another shape, stays as it is; `differences` says so.
    """
    made: dict[str, Tensor] = {}

    def tensor_for(param: Tensor | None, name: str) -> Tensor:
        if own is not None and param is not None and name.startswith(own.prefix):
            state, local = own.tensor(manifest, name, param, found.tensors.get(name.removeprefix(own.prefix)))
            if local.numel():
                made[name] = local
            return state
        if name not in manifest.tensors:
            raise CheckpointError(f"the optimizer's state refers to {name}, which the checkpoint does not hold.")
        made[name] = _fitting(name, manifest.tensors[name], param, found.tensors.get(name))
        return made[name]

    words, now = manifest.optimizer, optimizer.state_dict()
    if words is None or not _is_related(words, found.optimizer):
        return now, made
    groups = []
    for group, sources in zip(now["param_groups"], _sources(words, found.optimizer), strict=True):
        options = words["groups"][sources[0]]["options"] if len(sources) == 1 else {}
        groups.append({**group, **decode(options, partial(tensor_for, None)), "params": group["params"]})
    state = now["state"] | decode(words.get("shared", {}), partial(tensor_for, None))
    for group, ours in zip(groups, found.optimizer["groups"], strict=True):
        for index, name in zip(group["params"], ours["params"], strict=True):
            param, entry = found.params[name], manifest.tensors.get("model/" + name)
            fits = (entry is None or entry.shape == tuple(param.shape)) and not (own and name in own.misfits)
            state.pop(index, None) if fits else None
            if fits and name in words["state"]:
                saved = words["state"][name] if own is None else own.put_into(name, words["state"][name])
                state[index] = decode(saved, partial(tensor_for, param))
                if not isinstance(state[index], dict):
                    raise CheckpointError(f"the optimizer's state of {name} is no dict.")
    return {"state": state, "param_groups": groups}, made


def _fitting(name: str, entry: TensorEntry, param: Tensor | None, present: Tensor | None) -> Tensor:
    """A tensor of the optimizer to be filled: the one that is present if it fits, else one placed like its parameter.

    A count of steps is never placed like a parameter, though a 0-d parameter has its shape: torch keeps it plain.
    """
    dtype, step = DTYPES[entry.dtype], name.endswith("/step")
    like = param is not None and entry.shape == tuple(param.shape) and not step
    placed = isinstance(param, DTensor) and not step and (like or entry.placements is not None)
    same = present is not None and tuple(present.shape) == entry.shape and holds(present.dtype, dtype)
    if present is not None and same and isinstance(present, DTensor) == placed:
        return present
    if like:
        assert param is not None
        return torch.empty_like(param.detach(), dtype=dtype)
    plain = torch.empty(entry.shape, dtype=dtype, device=param.device if placed and param is not None else "cpu")
    if not placed:
        return plain
    assert isinstance(param, DTensor)
    mesh = param.device_mesh
    return DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)
