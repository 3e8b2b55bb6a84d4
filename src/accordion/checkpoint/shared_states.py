"""What of an optimizer is the same on all ranks, compared by digests; what is not is refused by name, or kept for each rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion.checkpoint.collective import Team
from accordion.checkpoint.contents import Contents, local_data, optimizer_name, own_box, placement_words, rank_prefix
from accordion.checkpoint.format import code_of
from accordion.checkpoint.json_values import Json, as_bytes
from accordion.checkpoint.writing import bytes_of
from accordion.errors import CheckpointError
from accordion.optim import LocalStep

SHORT = 60  # letters of a value that ranks tell each other as it is, and not by its digest
DIGEST = 16  # hexadecimal digits
NAMED = 3  # states that a message names
Place: TypeAlias = tuple[str, str | None]
"""A parameter's name and a key of its state; None for all of a state whose keys are no strings."""


def same_on_all(
    found: Contents, optimizer: torch.optim.Optimizer | None, team: Team, rank_states: bool
) -> tuple[Contents, dict[str, Tensor]]:
    """Return what is saved once, and the tensors that this rank keeps for itself by name; a collective.

    A state that is neither shaped like its shard nor equal on all ranks is kept for each rank with `rank_states`. Without it,
    and where ranks differ in anything else, raises `CheckpointError` on all of them, saying what differs.
    """
    facts = team.agree(lambda: _facts(found) if len(team.ranks) > 1 else {})
    apart = differing(team, facts)
    _refuse(apart)
    places: list[Place] = [(param, key) for param, key in map(json.loads, sorted(apart))]
    if places and not rank_states:
        raise CheckpointError(
            f"the optimizer's states {named(places)} are neither shaped like the rows of their rank nor equal on all ranks, so "
            "that one rank's would stand for all; pass rank_states=True to save, which keeps each rank's for a resume on as many "
            "ranks under the same strategy and mesh."
        )
    of_rows = list(dict.fromkeys([*places, *_of_local_rows(found, optimizer)]))
    return team.agree(lambda: _split(found, places, of_rows, team)) if of_rows else (found, {})


def same_kind_on_all(found: Contents, team: Team) -> None:
    """Raise `CheckpointError` on all ranks where they have optimizers of several kinds, or one has none; a collective."""
    _refuse(differing(team, {KIND: optimizer_name(found.optimizer)}), "load")


def differing(team: Team, facts: Mapping[str, str]) -> dict[str, list[str]]:
    """Those of `facts` that are not the same on all ranks, with what each rank has, "" for nothing. A collective."""
    if len(set(team.shared(_digest(json.dumps(facts, sort_keys=True))))) == 1:
        return {}
    heard = [json.loads(text) for text in team.shared(json.dumps(facts), most=None)]
    names = dict.fromkeys(name for each in heard for name in each)
    all_have = {name: [each.get(name, "") for each in heard] for name in names}
    return {name: values for name, values in all_have.items() if len(set(values)) > 1}


def named(places: Sequence[Place]) -> str:
    """The first of some states, for a message."""
    told = [f"all of {param}" if key is None else f"{key!r} of {param}" for param, key in places[:NAMED]]
    return ", ".join(told) + (f" and {len(places) - NAMED} more" if len(places) > NAMED else "")


# -- what is compared


# Begin the names of what is no state of a parameter; those are JSON lists.
MODEL, KIND, GROUP, SHARED = "model/", "optimizer", "group/", "shared/"
SAME_ON_ALL = {
    MODEL: "models",
    KIND: "optimizers",
    GROUP: "groups of the optimizer",
    SHARED: "states of the optimizer that belong to no parameter",
}


def _facts(found: Contents) -> dict[str, str]:
    facts = {name: str(_lies(tensor)) for name, tensor in _model(found)}
    facts[KIND] = optimizer_name(found.optimizer)
    if found.optimizer is None:
        return facts
    for i, group in enumerate(found.optimizer["groups"]):
        names, text = group["params"], json.dumps(group["params"])
        told = text if len(text) <= SHORT else f"{len(names)} from {names[0]} to {names[-1]}"
        facts[f"{GROUP}{i}/params"] = f"{told} ({_digest(text)})"
        for key, value in group["options"].items():
            facts[f"{GROUP}{i}/{key}"] = _said(value, found.tensors)
    for key, value in found.optimizer.get("shared", {}).items():
        facts[f"{SHARED}{key}"] = _said(value, found.tensors)
    return facts | {json.dumps(place): _said(value, found.tensors) for place, value in states(found.optimizer)}


def states(words: Json) -> Iterator[tuple[Place, Json]]:
    """The states of an optimizer, each as JSON."""
    for param, entry in words["state"].items():
        if any(key.startswith("$") for key in entry):
            yield (param, None), entry
        else:
            yield from (((param, key), value) for key, value in entry.items())


def _model(found: Contents) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in found.tensors.items() if name.startswith("model/")]


def _lies(tensor: Tensor) -> tuple[Any, ...]:
    return str(tensor.dtype), tuple(tensor.shape), placement_words(tensor)


def _said(value: Json, tensors: Mapping[str, Tensor]) -> str:
    """A value in few letters, equal where all of it is: of a sharded tensor how it lies, of any other what is in it too."""
    text = "" if isinstance(value, dict) and "$tensor" in value else json.dumps(value)
    for name in refers_to(value):
        tensor = tensors[name]
        text += str(_lies(tensor)) if isinstance(tensor, DTensor) else _in(tensor)
    return _short(text)


def _in(tensor: Tensor) -> str:
    if tensor.numel() == 1:
        return str(_lies(tensor)) + str(tensor.tolist())
    return str(_lies(tensor)) + _digest(bytes_of(tensor.detach().cpu().contiguous()))


def _short(text: str) -> str:
    return text if len(text) <= SHORT else _digest(text)


def _digest(what: str | memoryview) -> str:
    return hashlib.sha256(what.encode() if isinstance(what, str) else what).hexdigest()[:DIGEST]


def refers_to(value: Json) -> Iterator[str]:
    """Names of the tensors in a value."""
    if isinstance(value, list):
        for item in value:
            yield from refers_to(item)
    elif isinstance(value, dict):
        if "$tensor" in value:
            yield value["$tensor"]
        else:
            yield from refers_to(list(value.values()))


# -- what is refused


def _refuse(apart: Mapping[str, list[str]], who: str = "save") -> None:
    """Raise `CheckpointError` where ranks differ in more than states."""
    for begins, what in SAME_ON_ALL.items():
        names = [name for name in apart if name.startswith(begins)]
        if names:
            values = apart[names[0]]
            other = next(i for i, value in enumerate(values) if value != values[0])
            subject = "" if begins == KIND else f"in {names[0]} "
            told = [values[i] or "nothing" for i in (0, other)]
            raise CheckpointError(
                f"ranks hold different {what}: {subject}rank 0 has {told[0]} and rank {other} has {told[1]}; {who} needs the "
                "same model and optimizer, with the same options, on every rank."
            )


# -- what is kept for each rank

OWN = "$rank"  # stands in the manifest for a state that each rank keeps for itself


def _of_local_rows(found: Contents, optimizer: torch.optim.Optimizer | None) -> list[Place]:
    """Places that hold for the rows of this rank alone though ranks may not differ in them, be it that there is one rank.

    A step on local tensors makes of them what is not shaped like them. Counts of steps are no function of rows.
    """
    given: object = optimizer
    if not isinstance(given, LocalStep):
        return []
    return [
        (param, key)
        for (param, key), value in states(found.optimizer)
        if key != "step" and isinstance(found.params.get(param), DTensor)
        for name in refers_to(value)
        if not isinstance(found.tensors[name], DTensor) and found.tensors[name].dim()
    ]


def _split(
    found: Contents, places: list[Place], of_rows: list[Place], team: Team
) -> tuple[Contents, dict[str, Tensor]]:
    """Take `places` out of what is saved once, and note of which rows `of_rows` are."""
    prefix = rank_prefix(team.index)
    own = dict(states(found.optimizer))
    mine = {place: own[place] for place in places if place in own}
    gone = {name for value in mine.values() for name in refers_to(value)}
    kept: dict[str, Any] = {param: dict(entry) for param, entry in found.optimizer["state"].items()}
    for param, key in places:
        if key is None:
            kept[param] = {OWN: True}
        elif OWN not in kept.setdefault(param, {}):
            kept[param][key] = {OWN: True}
    tensors = {prefix + name: local_data(found.tensors[name]) for name in gone}
    words = {
        "num_ranks": len(team.ranks),
        "rows": {param: rows_of(param, found) for param, _ in of_rows},
        "states": [[*place, _renamed(value, prefix)] for place, value in mine.items()],
        "sharded": [prefix + name for name in gone if isinstance(found.tensors[name], DTensor)],
        "empty": {name: [code_of(name, t.dtype), list(t.shape)] for name, t in tensors.items() if not t.numel()},
    }
    contents = replace(
        found,
        tensors={name: tensor for name, tensor in found.tensors.items() if name not in gone},
        optimizer={**found.optimizer, "state": kept, "of_rows": [list(place) for place in of_rows]},
    )
    return contents, {f"{prefix}optimizer": as_bytes(words), **tensors}


def rows_of(param: str, found: Contents) -> Json:
    """Which part of a parameter this rank holds, and how it lies in memory: offset, shape and strides."""
    tensor = found.params[param]
    box = own_box(param, tensor)
    return [list(box.offset), list(box.shape), list(local_data(tensor).stride())]


def _renamed(value: Json, prefix: str) -> Json:
    if isinstance(value, list):
        return [_renamed(item, prefix) for item in value]
    if isinstance(value, dict):
        if "$tensor" in value:
            return {"$tensor": prefix + value["$tensor"]}
        return {key: _renamed(item, prefix) for key, item in value.items()}
    return value
