"""Reading a checkpoint: every rank the rows it needs, into the tensors that are there."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accordion.checkpoint.background import saver_of
from accordion.checkpoint.boxes import overlap
from accordion.checkpoint.collective import Team, joined
from accordion.checkpoint.contents import (
    OF_RANKS,
    Contents,
    Stateful,
    check_stateful,
    contents,
    local_data,
    model_tensors,
    only_one,
    own_box,
    state_name,
)
from accordion.checkpoint.format import DTYPES, Manifest, TensorEntry, holds
from accordion.checkpoint.json_values import Json, decode
from accordion.checkpoint.optimizer_states import OwnStates, own_states, same_kind_on_all
from accordion.checkpoint.prune import before
from accordion.checkpoint.reading import REPLACED, TURNS, Files, Read, opened, place_of, steady
from accordion.checkpoint.restore import differences, restored
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.engine.hooks import engine_of
from accordion.errors import AccordionError, CheckpointError, UsageError
from accordion.optim import LocalStep
from accordion.state import Only, settle

SHOWN = 8  # faults of a damaged checkpoint that a message lists


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    state: Mapping[str, Stateful] | None = None,
    strict: bool = True,
    only: Only = None,
) -> Json:
    """Fill `model` and `optimizer` from a checkpoint of any number of ranks; called by all ranks together.

    `model`: its shapes, dtypes and placements decide what each rank reads, into the tensors that are there.
    `optimizer`: its state is made where it has none; a parameter group takes the options of the group that its parameters were
    in. `state`: objects whose `load_state_dict` gets what this rank saved, or
    what rank 0 did where the number of ranks is another. `strict=False` fills what has the same name and shape, leaves the
    rest as it is and says what in one warning. `only`: which tensors of the model, as `save` was given it; the others stay as
    they are. `()`: none of them, whatever the checkpoint has. Returns the `extra` that was saved.

    Every byte that is used is held against its checksum first. Raises `CheckpointError` on every rank, before anything
    changes, naming every missing, extra or misshapen tensor, every file and tensor that is damaged, an optimizer of another
    kind, or one that does not take its state: it is asked once before the tensors are read into it. Objects in `state` are
    given theirs after that, one by one; those before one that refuses keep what they got.
    """
    engine = engine_of(model)
    if engine is not None:
        if engine.suspended:
            raise UsageError(
                "load does not work inside full_params, where the parameters are no shards; leave it first."
            )
        settle(engine, "loads a checkpoint")
    saver_of(model).wait()
    team = Team.of(model_tensors(model)[0].values())
    optimizer = team.agree(partial(only_one, optimizer))

    def open_files() -> Files:
        check_stateful(state or {}, "load_state_dict")
        return steady(lambda: checkpoint_at(path), opened)

    for _ in range(TURNS):
        with closing(team.agree(open_files)) as files:
            try:
                plan = _checked(files, model, optimizer, state or {}, team, strict, only)
            except CheckpointError:
                # If another checkpoint has taken the name since `files` were opened, as any rank sees it, that one is read.
                now = place_of(lambda: checkpoint_at(path))
                if any(team.gathered(int(now != (str(files.folder), files.mark)))):
                    continue
                raise
            plan.fill(files, optimizer, state or {}, team)
            if plan.left and team.leads:
                warnings.warn(f"{files.folder} was loaded in part: {'; '.join(plan.left)}.", stacklevel=2)
            return plan.extra
    raise CheckpointError(f"{path} was {REPLACED}")


def _checked(
    files: Files,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Stateful],
    team: Team,
    strict: bool,
    only: Only,
) -> _Plan:
    """Return what this load will do, all of whose bytes are as they were written. Raises `CheckpointError` on every rank."""
    if len(set(team.gathered(files.digest))) > 1:
        here = f"{files.folder}, whose manifest has the digest {files.digest & (2**64 - 1):016x}"
        folders = joined(team.shared(here), team.index, here)
        raise CheckpointError(
            f"ranks were given other checkpoints, {folders}; pass the path of the same one on all ranks."
        )
    wanted = team.agree(lambda: contents(model, optimizer, only))
    same_kind_on_all(wanted, team)
    own = own_states(files, wanted, team)
    plan = team.agree(lambda: _plan(files, wanted, optimizer, own, bool(state), team, strict))
    try:
        team.agree(lambda: _check(files, plan, team))
    except CheckpointError as error:
        older = team.shared((before(files.folder) or "") if team.leads else "")[0]
        more = f" The one before it, {older}, is complete: load that, or move {files.folder} away." if older else ""
        raise CheckpointError(f"{error}{more}") from error
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """All that a load will do on this rank, decided before it does any of it.

    Attributes:
        optimizer: the state dict to load.
        own_state: the tensor with what a rank kept of `state` for itself; None if nothing is asked for.
        left: what is left out, in words.
    """

    of_model: list[Read]
    of_optimizer: list[Read]
    optimizer: dict[str, Any]
    extra: Json
    own_state: str | None
    left: list[str]

    def fill(
        self, files: Files, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Stateful], team: Team
    ) -> None:
        """Do it; no rank begins a part of it before all have ended the one before."""
        words = team.agree(lambda: _of_this_rank(files, self, state))
        # Who refuses what he is given refuses it before any tensor changes; the weights are last.
        if optimizer is not None:
            team.agree(lambda: _take(optimizer, self.optimizer, only_try=True))
        for key, thing in state.items():
            team.agree(partial(_give, key, thing, words))
        with torch.no_grad():
            team.agree(lambda: files.fill_all(self.of_optimizer))
        if optimizer is not None:
            team.agree(lambda: _take(optimizer, self.optimizer, only_try=False))
        with torch.no_grad():
            team.agree(lambda: files.fill_all(self.of_model))


def _take(optimizer: torch.optim.Optimizer, state: dict[str, Any], *, only_try: bool) -> None:
    """Give the optimizer its state. Where it does not take it, it has its own groups and states again.

    `only_try`: it has its own again in any case, as the tensors of the state are not filled yet.
    """
    given: object = optimizer
    before = dict(vars(optimizer))
    try:
        if only_try and isinstance(given, LocalStep):
            super(LocalStep, given).load_state_dict(state)  # type: ignore[misc]
        else:
            optimizer.load_state_dict(state)
    except BaseException as error:
        vars(optimizer).update(before)
        if not only_try or not isinstance(error, Exception):
            raise
        what = f"{type(optimizer).__name__} does not take the optimizer's state that was saved"
        raise _not_taken(what, error) from error
    if only_try:
        vars(optimizer).update(before)


def _give(key: str, thing: Stateful, words: Mapping[str, Any]) -> None:
    try:
        thing.load_state_dict(words[key])
    except Exception as error:
        raise _not_taken(f"state[{key!r}] does not take what was saved of it", error) from error


def _not_taken(what: str, error: Exception) -> Exception:
    if isinstance(error, AccordionError):
        return error
    return CheckpointError(f"{what} ({type(error).__name__}: {error}); it is of another kind, or was changed.")


def _plan(
    files: Files,
    wanted: Contents,
    optimizer: torch.optim.Optimizer | None,
    own: OwnStates | None,
    has_state: bool,
    team: Team,
    strict: bool,
) -> _Plan:
    """Compare the checkpoint with what is to be filled, and list what this rank reads."""
    manifest, folder = files.manifest, files.folder
    unlike = differences(manifest, wanted, own)
    if unlike and strict:
        raise CheckpointError(f"{folder} does not fit: " + "; ".join(unlike) + ".")
    files.check_sizes()
    state, tensors = ({}, {}) if optimizer is None else restored(manifest, wanted, optimizer, own)
    present = {id(tensor) for tensor in wanted.tensors.values()}
    of_model: list[Read] = []
    of_optimizer: list[Read] = []
    try:
        for name, tensor in wanted.of_model().items():
            entry = manifest.tensors.get(source := manifest.aliases.get(name, name))
            if entry and entry.shape == tuple(tensor.shape) and holds(tensor.dtype, DTYPES[entry.dtype]):
                of_model += _reads(source, entry, tensor)
        for name, tensor in tensors.items():
            of_optimizer += _reads(name, manifest.tensors[name], tensor, fresh=id(tensor) not in present)
        extra = decode(manifest.extra, dict[str, Tensor]().__getitem__)  # it can hold no tensor
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder} is damaged: {type(error).__name__}: {error}.") from error
    return _Plan(
        of_model=of_model,
        of_optimizer=of_optimizer,
        optimizer=state,
        extra=extra,
        own_state=_own_state(manifest, team) if has_state else None,
        left=unlike,
    )


def _own_state(manifest: Manifest, team: Team) -> str:
    """Whose state this rank takes: its own where as many ranks saved, else the first one's."""
    saved = {name for name in manifest.tensors if name.startswith(OF_RANKS) and name.split("/")[2:] == ["state"]}
    if not saved:
        raise CheckpointError("it was saved without state; load it without state.")
    own = state_name(team.index)
    return own if len(saved) == len(team.ranks) and own in saved else min(saved)


def _check(files: Files, plan: _Plan, team: Team) -> None:
    """Raise `CheckpointError` unless all that this load uses is as it was written; rank 0 looks at every file's header too."""
    reads = [*plan.of_model, *plan.of_optimizer]
    for name, entry in files.manifest.tensors.items():
        mine = plan.own_state is not None and (name == plan.own_state or name.startswith(plan.own_state + "/"))
        if mine or (team.leads and name.startswith(OF_RANKS)):
            reads += [Read(name, entry, chunk, chunk.box, None) for chunk in entry.chunks]
    faults = files.faults(reads)
    if faults:
        more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        raise CheckpointError(f"{files.folder} is damaged: " + "; ".join(faults[:SHOWN] + more) + ".")


def _of_this_rank(files: Files, plan: _Plan, state: Mapping[str, Stateful]) -> dict[str, Any]:
    """What the objects in `state` get."""
    if plan.own_state is None:
        return {}

    def tensor(name: str) -> Tensor:
        if name not in files.manifest.tensors:
            raise CheckpointError(f"{plan.own_state} refers to {name}, which the checkpoint does not hold.")
        return files.whole(name)

    words = json.loads(bytes(tensor(plan.own_state).tolist()))
    found: dict[str, Any] = decode(words, tensor)
    lost = [key for key in state if key not in found]
    if lost:
        raise CheckpointError(
            f"{files.folder} has no state for {', '.join(lost)}; it has {', '.join(found) or 'none'}."
        )
    return found


def _reads(name: str, entry: TensorEntry, tensor: Tensor, fresh: bool = False) -> Iterable[Read]:
    """The parts of chunks that make up what this rank holds of `tensor`."""
    local = local_data(tensor)
    if local.is_meta:
        raise CheckpointError(f"{name} is on the meta device; call to_empty before loading.")
    own = own_box(name, tensor)
    for chunk in entry.chunks if own.numel else ():
        part = overlap(own, chunk.box)
        if part is not None:
            yield Read(name, entry, chunk, part, local[part.within(own)], fresh)
