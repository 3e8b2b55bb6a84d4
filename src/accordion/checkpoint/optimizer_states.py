"""Compare optimizer states over ranks: save those that are equal on all once, and refuse others or save them for each rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion._torch import as_dtensor
from accordion.checkpoint.collective import Team
from accordion.checkpoint.contents import (
    OF_STATE,
    Contents,
    local_data,
    optimizer_name,
    own_box,
    placement_words,
    rank_prefix,
)
from accordion.checkpoint.format import DTYPES, Manifest, code_of
from accordion.checkpoint.json_values import Json, as_bytes, renamed
from accordion.checkpoint.optimizer_list import parts_of
from accordion.checkpoint.reading import Files
from accordion.checkpoint.writing import bytes_of
from accordion.errors import CheckpointError, some_of
from accordion.optimizers.whole_matrices import OwnerStep
from accordion.optimizers.wrap import LocalStep

SHORT = 60  # largest length of a description that ranks exchange as it is; of longer ones they exchange a digest
DIGEST = 16  # hexadecimal digits
NAMED = 3  # states that a message names
OF_RANK = "$rank"  # in the manifest, in place of a state that is saved for each rank
Place: TypeAlias = tuple[str, str | None]
"""(name of a parameter, key in its state), which names one state; the key is None for all states if keys are not strings."""


# -- saving


def same_on_all(
    contents: Contents, optimizer: torch.optim.Optimizer | None, team: Team, rank_states: bool
) -> tuple[Contents, dict[str, Tensor]]:
    """Compare `contents` over ranks; return (the contents to save once, {name: tensor to save for this rank}). Collective.

    With `rank_states`, optimizer states that are neither shaped like a shard nor equal on all ranks are saved for each rank.
    Raises `CheckpointError` on all ranks if there are such states without `rank_states`, or if ranks differ in anything else.
    """
    unequal = _differing(team, team.agree(lambda: _facts(contents) if len(team.ranks) > 1 else {}))
    _refuse(unequal, "save")
    places: list[Place] = [(param, key) for param, key in map(json.loads, sorted(unequal))]
    if places and not rank_states:
        raise CheckpointError(
            f"the optimizer's states {_named(places)} are neither shaped like the rows of their rank nor equal on all ranks, and "
            "only one rank's would be saved; pass rank_states=True to save, which keeps those of each rank for a resume on as "
            "many ranks under the same strategy and mesh."
        )
    of_rows = list(dict.fromkeys([*places, *_of_local_rows(contents, optimizer)]))
    return team.agree(lambda: _split(contents, places, of_rows, team)) if of_rows else (contents, {})


def same_kind_on_all(contents: Contents, team: Team) -> None:
    """Raise `CheckpointError` on all ranks if their optimizers are of different classes, or only some have one. Collective."""
    _refuse(_differing(team, {KIND: optimizer_name(contents.optimizer)}), "load")


def _differing(team: Team, facts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return {name: values of all ranks} for those `facts` (name -> value) that differ; "" on ranks without it. Collective."""
    if len(set(team.shared(_digest(json.dumps(facts, sort_keys=True).encode())))) == 1:
        return {}
    of_ranks = [json.loads(text) for text in team.shared(json.dumps(facts), most=None)]
    names = dict.fromkeys(name for each in of_ranks for name in each)
    all_have = {name: [each.get(name, "") for each in of_ranks] for name in names}
    return {name: values for name, values in all_have.items() if len(set(values)) > 1}


# Prefixes of the names of facts; the name of a parameter's state is a JSON list instead.
MODEL, KIND, GROUP, SHARED = "model/", "optimizer", "group/", "shared/"
SAME_ON_ALL = {
    MODEL: "models",
    KIND: "optimizers",
    GROUP: "groups of the optimizer",
    SHARED: "states of the optimizer that belong to no parameter",
    OF_STATE: "sharded tensors in state=",
}


def _refuse(unequal: Mapping[str, list[str]], call: str) -> None:
    """Raise `CheckpointError` if `unequal` ({fact: values}) has a fact other than a state of a parameter. `call`: "save" or
    "load", for the message."""
    for begins, what in SAME_ON_ALL.items():
        name = next((name for name in unequal if name.startswith(begins)), None)
        if name is not None:
            values = unequal[name]
            other = next(i for i, value in enumerate(values) if value != values[0])
            subject = "" if begins == KIND else f"in {name} "
            raise CheckpointError(
                f"ranks hold different {what}: {subject}rank 0 has {values[0] or 'nothing'} and rank {other} has "
                f"{values[other] or 'nothing'}; {call} needs the same model and optimizer, with the same options, on every rank."
            )


def _facts(contents: Contents) -> dict[str, str]:
    """Return {name: short description} of all optimizer states and of everything that must be equal on all ranks."""
    facts = {name: _placement(t) for name, t in contents.tensors.items() if name.startswith((MODEL, OF_STATE))}
    facts[KIND] = optimizer_name(contents.optimizer)
    if contents.optimizer is None:
        return facts
    for i, group in enumerate(contents.optimizer["groups"]):
        names, text = group["params"], json.dumps(group["params"])
        listed = text if len(text) <= SHORT else f"{len(names)} from {names[0]} to {names[-1]}"
        facts[f"{GROUP}{i}/params"] = f"{listed} ({_digest(text.encode())})"
        for key, value in group["options"].items():
            facts[f"{GROUP}{i}/{key}"] = _brief(value, contents.tensors)
    for key, value in contents.optimizer.get("shared", {}).items():
        facts[f"{SHARED}{key}"] = _brief(value, contents.tensors)
    return facts | {json.dumps(place): _brief(value, contents.tensors) for place, value in _states(contents.optimizer)}


def _states(words: Json) -> Iterator[tuple[Place, Json]]:
    """Iterate over (place, value) of all states of parameters in `words`, the optimizer as JSON."""
    for param, entry in words["state"].items():
        if any(key.startswith("$") for key in entry):
            yield (param, None), entry
        else:
            yield from (((param, key), value) for key, value in entry.items())


def _placement(tensor: Tensor) -> str:
    return str((str(tensor.dtype), tuple(tensor.shape), placement_words(tensor)))


def _brief(value: Json, tensors: Mapping[str, Tensor]) -> str:
    """Return a short text that is equal on two ranks if `value` is; it ignores the elements of DTensors, but not their type."""
    text = "" if isinstance(value, dict) and "$tensor" in value else json.dumps(value)
    for name in _refers_to(value):
        tensor = tensors[name]
        text += _placement(tensor)
        if not isinstance(tensor, DTensor):
            single = tensor.numel() == 1
            text += str(tensor.tolist()) if single else _digest(bytes_of(tensor.detach().cpu().contiguous()))
    return text if len(text) <= SHORT else _digest(text.encode())


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGEST]


def _refers_to(value: Json) -> Iterator[str]:
    """Iterate over the names of the tensors to which the JSON `value` refers."""
    if isinstance(value, dict) and "$tensor" in value:
        yield value["$tensor"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _refers_to(item)


def _named(places: Sequence[Place]) -> str:
    """Return text for a message that names the first few of `places`, and says if there are more."""
    return some_of([f"all of {param}" if key is None else f"{key!r} of {param}" for param, key in places], NAMED)


def _of_local_rows(contents: Contents, optimizer: torch.optim.Optimizer | None) -> list[Place]:
    """Return the places of states that describe this rank's shard of a parameter, even if they are equal on all ranks.

    These are the plain tensors, except 0-d ones and "step", that an optimizer of `wrap_optimizer` has for sharded parameters.
    """
    if optimizer is None:
        return []
    has_rows = {
        id(part): isinstance(part, LocalStep) and not isinstance(part, OwnerStep) for part in parts_of(optimizer)
    }
    is_wrapped = [has_rows[id(part)] for part in parts_of(optimizer) for _ in part.param_groups]
    groups = zip(is_wrapped, contents.optimizer["groups"], strict=True)
    wrapped = {param for flag, group in groups if flag for param in group["params"]}
    return [
        (param, key)
        for (param, key), value in _states(contents.optimizer)
        if param in wrapped and key != "step" and isinstance(contents.params.get(param), DTensor)
        for name in _refers_to(value)
        if not isinstance(contents.tensors[name], DTensor) and contents.tensors[name].dim()
    ]


def _split(
    contents: Contents, places: list[Place], of_rows: list[Place], team: Team
) -> tuple[Contents, dict[str, Tensor]]:
    """Return (`contents` without the states at `places`, {name: tensor to save for this rank} with these states).

    One of the tensors is JSON with the values of the states, and the box of this rank for each parameter in `of_rows`.
    """
    prefix = rank_prefix(team.index)
    states = dict(_states(contents.optimizer))
    values = {place: states[place] for place in places if place in states}
    moved = {name for value in values.values() for name in _refers_to(value)}
    entries: dict[str, Any] = {param: dict(entry) for param, entry in contents.optimizer["state"].items()}
    for param, key in places:
        if key is None:
            entries[param] = {OF_RANK: True}
        elif OF_RANK not in entries.setdefault(param, {}):
            entries[param][key] = {OF_RANK: True}
    names = {name: prefix + name for name in moved}
    tensors = {names[name]: local_data(contents.tensors[name]) for name in moved}
    words = {
        "rows": {param: _rows_of(param, contents) for param, _ in of_rows},
        "states": [[*place, renamed(value, names)] for place, value in values.items()],
        "sharded": [prefix + name for name in moved if isinstance(contents.tensors[name], DTensor)],
        "empty": {name: [code_of(name, t.dtype), list(t.shape)] for name, t in tensors.items() if not t.numel()},
    }
    saved_once = replace(
        contents,
        tensors={name: tensor for name, tensor in contents.tensors.items() if name not in moved},
        optimizer={**contents.optimizer, "state": entries, "of_rows": [list(place) for place in of_rows]},
    )
    return saved_once, {f"{prefix}optimizer": as_bytes(words), **tensors}


def _rows_of(param: str, contents: Contents) -> Json:
    """Return [offset in the unsharded tensor, shape, strides] of this rank's shard of the parameter with the name `param`."""
    tensor = contents.params[param]
    box = own_box(param, tensor)
    return [list(box.offset), list(box.shape), list(local_data(tensor).stride())]


# -- loading


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStates:
    """The optimizer states in a checkpoint that were saved for this rank.

    Attributes:
        prefix: begins the names of this rank's tensors; `states`: values as JSON.
        sharded: names of tensors that are sharded like their parameter; `empty`: (dtype, shape) of those without elements.
        misfits: parameters whose states are left out, because on some rank they belong to another part of the parameter.
        why: the reason for leaving them out; None if all states fit.
    """

    prefix: str
    states: Mapping[Place, Json]
    sharded: frozenset[str]
    empty: Mapping[str, tuple[str, Sequence[int]]]
    misfits: frozenset[str]
    why: str | None

    def put_into(self, param: str, entry: Json) -> Json:
        """Return `entry`, the state of `param` in the manifest, with this rank's values in place of placeholders. A placeholder
        without a value is dropped."""
        if entry == {OF_RANK: True}:
            return self.states.get((param, None), {})
        values = {key: self.states.get((param, key), value) for key, value in entry.items()}
        return {key: value for key, value in values.items() if value != {OF_RANK: True}}

    def tensor(self, manifest: Manifest, name: str, param: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (state, its local tensor), to be filled from the saved tensor `name`: `present` if that is plain and its shape
        and dtype fit, else new. Sharded states are new and placed like `param`; one without elements needs no filling."""
        is_sharded = name in self.sharded
        if name in self.empty:
            code, shape = self.empty[name]
            local = torch.empty(tuple(shape), dtype=DTYPES[code], device="cpu")
        else:
            entry = manifest.tensors[name]
            dtype = DTYPES[entry.dtype]
            plain = None if is_sharded or isinstance(present, DTensor) else present
            if plain is not None and tuple(plain.shape) == entry.shape and plain.dtype == dtype:
                return plain, plain
            local = torch.empty(entry.shape, dtype=dtype, device=param.device if is_sharded else "cpu")
        return as_dtensor(local, param) if is_sharded and isinstance(param, DTensor) else local, local


def load_rank_states(files: Files, contents: Contents, team: Team) -> RankStates | None:
    """Read the optimizer states saved for this rank; None if there are none. Collective. Raises `CheckpointError` on damage."""
    manifest = files.manifest
    if contents.optimizer is None or not (manifest.optimizer or {}).get("of_rows"):
        return None
    saved = sum(name.startswith("rank/") and name.split("/")[2:] == ["optimizer"] for name in manifest.tensors)
    stepped = {param for group in contents.optimizer["groups"] for param in group["params"]}
    places: list[Place] = [(param, key) for param, key in manifest.optimizer["of_rows"] if param in stepped]
    prefix = rank_prefix(team.index)
    params = dict.fromkeys(param for param, _ in places)
    words: Mapping[str, Any] = {"states": [], "sharded": [], "empty": {}}
    misfits, why = (
        set(params),
        f"the {saved} rank{'s' * (saved != 1)} that saved, and this model is on {len(team.ranks)}",
    )
    if saved == len(team.ranks):
        name = f"{prefix}optimizer"
        team.agree(lambda: files.check(name.__eq__))
        words = team.agree(lambda: files.words(name))
        other = [param for param in params if words["rows"].get(param) != _rows_of(param, contents)]
        misfits = {param for text in team.shared(json.dumps(other), most=None) for param in json.loads(text)}
        why = "ranks that had other rows than this model's"
    lost = [place for place in places if place[0] in misfits]
    return RankStates(
        prefix=prefix,
        states={(param, key): value for param, key, value in words["states"]},
        sharded=frozenset(words["sharded"]),
        empty=words["empty"],
        misfits=frozenset(misfits),
        why=f"its optimizer states {_named(lost)} belong to the rows of {why} (they load on as many ranks under the same "
        "strategy and mesh; strict=False leaves out the states of these parameters)"
        if lost
        else None,
    )
