"""States of an optimizer that hold for the rows of one rank: read for the rank that saved them, where it has these rows again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion._torch import as_dtensor
from accordion.checkpoint.collective import Team
from accordion.checkpoint.contents import Contents, rank_prefix
from accordion.checkpoint.format import DTYPES, Manifest
from accordion.checkpoint.json_values import Json
from accordion.checkpoint.reading import Files
from accordion.checkpoint.shared_states import OWN, Place, named, refers_to, rows_of
from accordion.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStates:
    """What this rank kept of an optimizer for itself.

    `prefix`: begins the names of its tensors. `misfits`: parameters whose states here are those of other rows on some rank,
    which are left out; `why`: the same in words, None where all fits.
    """

    prefix: str
    states: Mapping[Place, Json]
    sharded: frozenset[str]
    empty: Mapping[str, tuple[str, Sequence[int]]]
    misfits: frozenset[str]
    why: str | None

    def put_into(self, param: str, entry: Json) -> Json:
        """The state of a parameter as the manifest has it, with what is this rank's own in it."""
        if entry == {OWN: True}:
            return self.states.get((param, None), {})
        own = {key: (param, key) for key, value in entry.items() if value == {OWN: True}}
        return {
            key: self.states[own[key]] if key in own else value
            for key, value in entry.items()
            if key not in own or own[key] in self.states
        }

    def tensor(self, manifest: Manifest, name: str, param: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
        """A state to be filled with the tensor `name`, `present` where that fits, and the elements of it that this rank has."""
        if name in self.empty:
            code, shape = self.empty[name]
            local = torch.empty(tuple(shape), dtype=DTYPES[code], device="cpu")
            return self._placed(name, local, param), local
        entry = manifest.tensors[name]
        dtype, is_sharded = DTYPES[entry.dtype], name in self.sharded
        plain = None if is_sharded or isinstance(present, DTensor) else present
        if plain is not None and tuple(plain.shape) == entry.shape and plain.dtype == dtype:
            return plain, plain
        local = torch.empty(entry.shape, dtype=dtype, device=param.device if is_sharded else "cpu")
        return self._placed(name, local, param), local

    def _placed(self, name: str, local: Tensor, param: Tensor) -> Tensor:
        return as_dtensor(local, param) if name in self.sharded and isinstance(param, DTensor) else local


def own_states(files: Files, found: Contents, team: Team) -> OwnStates | None:
    """What this rank kept for itself, None where nothing was; a collective."""
    manifest = files.manifest
    places: list[Place] = [(param, key) for param, key in (manifest.optimizer or {}).get("of_rows", [])]
    if not places or found.optimizer is None:
        return None
    saved = sum(
        name.startswith("rank/") and name.endswith("/optimizer") and name.count("/") == 2 for name in manifest.tensors
    )
    mine = {param for group in found.optimizer["groups"] for param in group["params"]}
    places = [place for place in places if place[0] in mine]
    prefix = rank_prefix(team.index)
    params = dict.fromkeys(param for param, _ in places)
    words: Mapping[str, Any] = {"states": [], "sharded": [], "empty": {}}
    misfits, why = (
        set(params),
        f"the {saved} rank{'s' * (saved != 1)} that saved, and this model is on {len(team.ranks)}",
    )
    if saved == len(team.ranks):
        words = team.agree(lambda: _words(files, prefix + "optimizer"))
        other = [param for param in params if words["rows"].get(param) != rows_of(param, found)]
        misfits = {param for text in team.shared(json.dumps(other), most=None) for param in json.loads(text)}
        why = "ranks that had other rows than this model's"
    lost = [place for place in places if place[0] in misfits]
    return OwnStates(
        prefix=prefix,
        states={(param, key): value for param, key, value in words["states"]},
        sharded=frozenset(words["sharded"]),
        empty=words["empty"],
        misfits=frozenset(misfits),
        why=f"its optimizer states {named(lost)} hold for the rows of {why} (they load on as many ranks under the same strategy "
        "and mesh; strict=False leaves out what these parameters have)"
        if lost
        else None,
    )


def _words(files: Files, name: str) -> dict[str, Any]:
    """A rank's words, held against their checksums. Raises `CheckpointError` where they are not what `save` writes."""
    files.check(name.__eq__)
    try:
        words = json.loads(bytes(files.whole(name).tolist()))
        return _checked(words, files.manifest, name.removesuffix("optimizer"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError) as error:
        raise CheckpointError(f"{files.folder} is damaged: {name}: {type(error).__name__}: {error}.") from error


def _checked(words: Json, manifest: Manifest, prefix: str) -> dict[str, Any]:
    """`words` where all that their readers take for granted is so."""
    rows, states, sharded, empty = (words[key] for key in ("rows", "states", "sharded", "empty"))
    if not isinstance(rows, dict) or not all(isinstance(name, str) for name in sharded):
        raise ValueError("rows is no object or sharded no list of names")
    for param, key, _ in states:
        if not isinstance(param, str) or not isinstance(key, str | None):
            raise ValueError("states are not named by a parameter and a key")
    for name, (code, shape) in empty.items():
        sizes_are_good = len(shape) <= 64 and all(type(n) is int and 0 <= n < 2**31 for n in shape)
        if not sizes_are_good or 0 not in shape or code not in DTYPES or name in manifest.tensors:
            raise ValueError(f"{name} is not an empty tensor")
    own = {name for name in manifest.tensors if name.startswith(prefix)} | set(empty)
    lost = [name for name in refers_to(states) if name not in own]
    if lost:
        raise ValueError(f"it refers to {lost[0]!r}, which is none of this rank's tensors")
    return dict(words)
