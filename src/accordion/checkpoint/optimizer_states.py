"""Compare optimizer states over ranks: those that are equal on all are saved once, and others are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion.checkpoint.collective import Team
from accordion.checkpoint.contents import OF_STATE, Contents, optimizer_name, placement_words
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
"""(name of a parameter, key in its state). The key is None for the whole state of a parameter if it has keys that are no
strings or begin with "$"."""


def same_on_all(contents: Contents, optimizer: torch.optim.Optimizer | None, team: Team) -> None:
    """Raise `CheckpointError` on all ranks if they differ in something of `contents` that is saved once, or if the optimizer
    has a plain tensor for one rank's rows of a sharded parameter, which other ranks could not use. Collective."""
    facts = team.agree(lambda: _facts(contents) if len(team.ranks) > 1 else {})
    unequal = _unequal_states(team, facts, "save")

    def check() -> None:
        if of_rows := unequal or _of_local_rows(contents, optimizer):
            texts = [f"all of {param}" if key is None else f"{key!r} of {param}" for param, key in of_rows]
            raise CheckpointError(
                f"the optimizer's states {some_of(texts, NAMED)} are neither shaped like the rows of their rank nor equal on all "
                'ranks, so other ranks could not use them; save without the optimizer, or pass state={"optimizer": optimizer} '
                "instead, which saves them for each rank."
            )

    team.agree(check)


def same_kind_on_all(contents: Contents, team: Team) -> None:
    """Raise `CheckpointError` on all ranks if their optimizers are of different classes, or only some have one. Collective."""
    _unequal_states(team, {KIND: optimizer_name(contents.optimizer)}, "load")


# Prefixes of the names of facts; the name of a parameter's state is a JSON list instead.
MODEL, KIND, GROUP, SHARED = "model/", "optimizer", "group/", "shared/"
SAME_ON_ALL = {
    MODEL: "models",
    KIND: "optimizers",
    GROUP: "groups of the optimizer",
    SHARED: "states of the optimizer that belong to no parameter",
    OF_STATE: "sharded tensors in state=",
}


def _unequal_states(team: Team, facts: Mapping[str, str], call: str) -> list[Place]:
    """Return the states of parameters among `facts` (name -> value) that differ between ranks. Collective. A rank that lacks a
    fact has the value "". Raises `CheckpointError` if a fact differs that is not a state of a parameter. `call`: "save" or
    "load", for the message."""
    if len(set(team.shared(_digest(json.dumps(facts, sort_keys=True).encode())))) == 1:
        return []
    of_ranks = [json.loads(text) for text in team.shared(json.dumps(facts), most=None)]
    names = dict.fromkeys(name for each in of_ranks for name in each)
    all_have = {name: [each.get(name, "") for each in of_ranks] for name in names}
    unequal = {name: values for name, values in all_have.items() if len(set(values)) > 1}
    for begins, what in SAME_ON_ALL.items():
        name = next((name for name in unequal if name.startswith(begins)), None)
        if name is not None:
            values = unequal[name]
            other = next(i for i, value in enumerate(values) if value != values[0])
            subject = "" if begins == KIND else f"in {name} "
            raise CheckpointError(
                f"ranks hold different {what}: {subject}rank {team.ranks[0]} has {values[0] or 'nothing'} and rank "
                f"{team.ranks[other]} has {values[other] or 'nothing'}; {call} needs the same model and optimizer, with the same "
                "options, on every rank."
            )
    return [(param, key) for param, key in map(json.loads, sorted(unequal))]


def _facts(contents: Contents) -> dict[str, str]:
    """Return {name: short description} of all that `contents` saves once, without elements of DTensors and model tensors."""
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
    """Return a short text that is equal on two ranks if the JSON `value` and the `tensors` that it names are equal. Of DTensors
    it describes only dtype, shape and placements."""
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
    """Iterate over the names of all tensors in the JSON `value`."""
    if isinstance(value, dict) and "$tensor" in value:
        yield value["$tensor"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _refers_to(item)


def _of_local_rows(contents: Contents, optimizer: torch.optim.Optimizer | None) -> list[Place]:
    """Return the states that describe this rank's shard: the plain tensors, except 0-d ones and "step", that an optimizer of
    `wrap_optimizer`, except an `OwnerStep`, has for sharded parameters. Even if equal on all ranks, they fit no other rank."""
    if optimizer is None:
        return []
    is_wrapped = [
        isinstance(part, LocalStep) and not isinstance(part, OwnerStep)
        for part in parts_of(optimizer)
        for _ in part.param_groups
    ]
    groups = zip(is_wrapped, contents.optimizer["groups"], strict=True)
    wrapped = {param for flag, group in groups if flag for param in group["params"]}
    return [
        (param, key)
        for (param, key), value in _states(contents.optimizer)
        if param in wrapped and key != "step" and isinstance(contents.params.get(param), DTensor)
        for name in _refers_to(value)
        if not isinstance(contents.tensors[name], DTensor) and contents.tensors[name].dim()
    ]
