"""Compare optimizer states over ranks: those that are equal on all are saved once, and others are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion.checkpoint.collective import Team
from accordion.checkpoint.contents import (
    OF_STATE,
    Contents,
    optimizer_name,
    placement_words,
)
from accordion.checkpoint.json_values import Json
from accordion.checkpoint.optimizer_list import parts_of
from accordion.checkpoint.writing import bytes_of
from accordion.errors import CheckpointError, some_of
from accordion.optimizers.whole_matrices import OwnerStep
from accordion.optimizers.wrap import LocalStep

SHORT = 60  # largest length of a description that ranks exchange as it is; of longer ones they exchange a digest
DIGEST = 16  # hexadecimal digits
NAMED = 3  # states that a message names
Place: TypeAlias = tuple[str, str | None]
"""(name of a parameter, key in its state), which names one state; the key is None for all states if keys are not strings."""


def same_on_all(contents: Contents, optimizer: torch.optim.Optimizer | None, team: Team) -> None:
    """Raise `CheckpointError` on all ranks if ranks differ in something of `contents` that is saved once, or if a state of the
    optimizer describes the rows of one rank without being shaped like them. Collective."""
    unequal = _differing(team, team.agree(lambda: _facts(contents) if len(team.ranks) > 1 else {}))
    _refuse(unequal, "save")
    places: list[Place] = [(param, key) for param, key in map(json.loads, sorted(unequal))]

    def check() -> None:
        if of_rows := places or _of_local_rows(contents, optimizer):
            raise CheckpointError(
                f"the optimizer's states {_named(of_rows)} are neither shaped like the rows of their rank nor equal on all "
                'ranks, so other ranks could not use them; save without the optimizer, or pass state={"optimizer": optimizer} '
                "instead, which saves them for each rank."
            )

    team.agree(check)


def same_kind_on_all(contents: Contents, team: Team) -> None:
    """Raise `CheckpointError` on all ranks if their optimizers are of different classes, or only some have one. Collective."""
    _refuse(_differing(team, {KIND: optimizer_name(contents.optimizer)}), "load")


def _differing(team: Team, facts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return {name: values of all ranks} for the `facts` (name -> value) that differ between ranks. A rank that lacks a fact has
    the value "". Collective."""
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
    """Iterate over ((name of a parameter, key of its state), value) in `words`, the optimizer as JSON. If the keys of a state are
    not strings, yield ((name, None), all its values)."""
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
    """Return (parameter, key) of the optimizer states that describe this rank's shard, even if they are equal on all ranks.

    Loaded on another number of ranks they would be wrong. These are the plain tensors, except 0-d ones and "step", that an
    optimizer of `wrap_optimizer` has for sharded parameters.
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
