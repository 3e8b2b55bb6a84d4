"""Load a checkpoint: each rank reads the parts that its shards need into existing tensors."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion.checkpoint.boxes import overlap
from accordion.checkpoint.collective import Team, joined
from accordion.checkpoint.contents import (
    OF_RANKS,
    OF_STATE,
    Contents,
    Stateful,
    contents,
    local_data,
    object_states,
    own_box,
    state_name,
)
from accordion.checkpoint.format import Manifest, TensorEntry
from accordion.checkpoint.json_values import Json, decode
from accordion.checkpoint.optimizer_list import OptimizerList
from accordion.checkpoint.optimizer_states import same_kind_on_all
from accordion.checkpoint.reading import REPLACED, TURNS, Files, Read, opened, place_of, steady
from accordion.checkpoint.restore import differences, restored
from accordion.checkpoint.save import finish_work
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.errors import AccordionError, CheckpointError, some_of
from accordion.optimizers.wrap import LocalStep
from accordion.state import Only

SHOWN = 8  # faults that a message lists


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    state: Mapping[str, Stateful] | None = None,
    strict: bool = True,
    only: Only = None,
) -> Json:
    """Fill `model` and `optimizer` from the checkpoint at `path`, saved by any number of ranks; return the saved `extra`.

    Collective. Each rank reads its shards into the tensors that exist. First waits for a background save of this model, and
    raises its error.

    Args:
        optimizer: one, or a list as it was saved. Missing states are created. A parameter group takes the saved options of the
            group that had its parameters.
        state: name -> object, with names that `save` was given. Its `load_state_dict` gets what this rank saved, or what rank 0
            saved if the number of ranks differs. DTensors, saved by all ranks, are read into those in its own `state_dict`.
        strict: if False, fill tensors of the same name, shape and kind of dtype, leave other tensors of the model and the states
            of other parameters as they are, and name the differences in one warning.
        only: the tensors of the model to load, with the value that was passed to `save`; `()` loads none.

    Raises `CheckpointError` on every rank, before anything changes, if a tensor is missing, surplus, misshapen or damaged, or
    if the optimizer is of another kind or refuses its state: all checksums are compared first, and the optimizer's
    `load_state_dict` is called once for a test and undone. Then the objects in `state` are loaded, one by one; if one raises,
    those before it keep what they loaded. Raises `UsageError` inside `full_params` and for a parked model.
    """
    team, stepping = finish_work(model, optimizer, "load")
    request = _Request(model=model, optimizer=stepping, state=state or {}, strict=strict, only=only, team=team)

    for _ in range(TURNS):
        with closing(team.agree(lambda: steady(lambda: checkpoint_at(path), opened))) as files:
            try:
                plan = _checked(files, request)
            except CheckpointError:
                # If any rank sees that another checkpoint has taken the name since `files` were opened, read that one.
                current = place_of(lambda: checkpoint_at(path))
                if any(team.gathered(int(current != (str(files.folder), files.mark)))):
                    continue
                raise
            plan.fill(files, request)
            if plan.left and team.leads:
                warnings.warn(f"{files.folder} was loaded in part: {'; '.join(plan.left)}.", stacklevel=2)
            return plan.extra
    raise CheckpointError(f"{path} was {REPLACED}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The arguments of `load` on this rank, and the ranks that load."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    state: Mapping[str, Stateful]
    strict: bool
    only: Only
    team: Team


def _checked(files: Files, request: _Request) -> _Plan:
    """Plan this load, compare the checksums of all that it reads, and return the plan. Collective. Raises `CheckpointError` on
    every rank if the checkpoint is damaged or does not fit, or if ranks were given different checkpoints."""
    team = request.team
    if len(set(team.gathered(files.digest))) > 1:
        folder = f"{files.folder}, whose manifest has the digest {files.digest & (2**64 - 1):016x}"
        folders = joined(team.shared(folder), team.ranks)
        raise CheckpointError(
            f"ranks were given different checkpoints, {folders}; pass the path of the same one on all ranks."
        )
    wanted = team.agree(lambda: contents(request.model, request.optimizer, request.only))
    same_kind_on_all(wanted, team)
    plan = team.agree(lambda: _plan(files, wanted, request))
    team.agree(lambda: _check(files, plan, team))
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Everything that a load does on this rank, decided by `_plan` before anything changes. Call `_check`, then `fill`."""

    of_model: list[Read]  # into the model's tensors
    of_optimizer: list[Read]  # into the tensors of `optimizer`
    of_state: list[Read]  # into the tensors of `sharded`
    optimizer: dict[str, Any]  # the state dict to load; its tensors are filled by `of_optimizer`
    extra: Json  # what `load` returns
    state: str | None  # name of the tensor with the saved states of the objects in `state=`; None to load none
    sharded: Mapping[str, Tensor]  # the sharded tensors of these objects
    left: list[str]  # differences that a load with strict=False leaves as they are, for the warning

    def fill(self, files: Files, request: _Request) -> None:
        """Test if the optimizer takes its state; then load the objects in `state=`, the optimizer, and the model. Collective: a
        step begins when all ranks have ended the one before it."""
        team, optimizer = request.team, request.optimizer
        saved = team.agree(lambda: _saved_states(files, self, request.state))
        # The optimizer and the objects may refuse their state, so they get it before any tensor changes.
        if optimizer is not None:
            team.agree(lambda: _load_optimizer(optimizer, self.optimizer, only_try=True))
        team.agree(lambda: files.fill_all(self.of_state))
        for key, thing in request.state.items():
            team.agree(partial(_load_state, key, thing, saved))
        team.agree(lambda: files.fill_all(self.of_optimizer))
        if optimizer is not None:
            team.agree(lambda: _load_optimizer(optimizer, self.optimizer, only_try=False))
        team.agree(lambda: files.fill_all(self.of_model))


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], *, only_try: bool) -> None:
    """Load `state` into the optimizer. If that fails, restore its previous groups and states (in a list, those of the optimizer
    that failed), and raise the error.

    `only_try`: only test if the optimizer accepts `state`, whose tensors need not be filled yet: restore the previous groups and
    states in any case. If the optimizer refuses `state`, raises its error if that is an `AccordionError`, else `CheckpointError`.
    """
    if isinstance(optimizer, OptimizerList):
        for part, of_part in optimizer.divided(state):
            _load_optimizer(part, of_part, only_try=only_try)
        return
    target: object = optimizer
    attributes = dict(vars(optimizer))
    try:
        if only_try and isinstance(target, LocalStep):
            super(LocalStep, target).load_state_dict(state)
        else:
            optimizer.load_state_dict(state)
    except BaseException as error:
        vars(optimizer).update(attributes)
        if not only_try or not isinstance(error, Exception):
            raise
        what = f"{type(optimizer).__name__} refuses the saved state of the optimizer"
        raise _refused(what, error) from error
    if only_try:
        vars(optimizer).update(attributes)


def _load_state(key: str, thing: Stateful, saved: Mapping[str, Any]) -> None:
    try:
        thing.load_state_dict(saved[key])
    except Exception as error:
        raise _refused(f"state[{key!r}] refuses its saved state", error) from error


def _refused(what: str, error: Exception) -> Exception:
    if isinstance(error, AccordionError):
        return error
    return CheckpointError(f"{what} ({type(error).__name__}: {error}); it is of another kind, or was changed.")


def _plan(files: Files, wanted: Contents, request: _Request) -> _Plan:
    """Compare the checkpoint with `wanted`, and return the plan of this rank's load. Raises `CheckpointError` if they differ
    and `strict` is True, if a file is missing or has another size, or if the states for `state=` were not saved or differ."""
    manifest, optimizer = files.manifest, request.optimizer
    unlike = differences(manifest, wanted)
    if unlike and request.strict:
        raise CheckpointError(f"{files.folder} does not fit: {'; '.join(unlike)}.")
    files.check_sizes()
    state, tensors = ({}, {}) if optimizer is None else restored(manifest, wanted, optimizer)
    present = {id(tensor) for tensor in wanted.tensors.values()}
    of_model: list[Read] = []
    of_optimizer: list[Read] = []
    for name, tensor in wanted.of_model().items():
        entry = manifest.tensors.get(source := manifest.aliases.get(name, name))
        if entry and entry.fits(tensor):
            of_model += _reads(source, entry, tensor)
    sharded = _sharded_states(manifest, request)
    for name, tensor in tensors.items():
        of_optimizer += _reads(name, manifest.tensors[name], tensor, fresh=id(tensor) not in present)
    of_state = [read for name, t in sharded.items() for read in _reads(name, manifest.tensors[name], t)]
    extra = decode(manifest.extra, dict[str, Tensor]().__getitem__)  # `extra` cannot hold tensors
    state_of_rank = None
    if request.state:
        saved = {name for name in manifest.tensors if name.startswith(OF_RANKS) and name.split("/")[2:] == ["state"]}
        if not saved:
            raise CheckpointError("it was saved without state=; load it without state=.")
        # If as many ranks saved as load, each loads its own states; otherwise all load those of the first rank.
        own = state_name(request.team.index)
        state_of_rank = own if len(saved) == len(request.team.ranks) and own in saved else min(saved)
    return _Plan(
        of_model=of_model,
        of_optimizer=of_optimizer,
        of_state=of_state,
        sharded=sharded,
        optimizer=state,
        extra=extra,
        state=state_of_rank,
        left=unlike,
    )


def _sharded_states(manifest: Manifest, request: _Request) -> dict[str, DTensor]:
    """Return {name in the checkpoint: sharded tensor} of the objects in `state=`, except those that saved no sharded tensors.
    Raises `CheckpointError` if names, shapes or kinds of the tensors differ from the saved ones."""
    # `state_dict` is called only if it is needed, since that of a data loader may begin an iteration.
    prefixes = {key: f"{OF_STATE}{key}/" for key in request.state}
    having = [key for key, prefix in prefixes.items() if any(name.startswith(prefix) for name in manifest.tensors)]
    begins = tuple(prefixes[key] for key in having)
    saved = {name: entry for name, entry in manifest.tensors.items() if name.startswith(begins)}
    present, _ = object_states({key: request.state[key] for key in having}, request.team)
    unlike = {
        "missing in the checkpoint": [name for name in present if name not in saved],
        "in the checkpoint alone": [name for name in saved if name not in present],
        "of another shape or kind": [name for name, t in present.items() if name in saved and not saved[name].fits(t)],
    }
    texts = [f"{len(names)} {what}: {some_of(names, SHOWN)}" for what, names in unlike.items() if names]
    if texts:
        raise CheckpointError(f"sharded tensors in state= do not fit: {'; '.join(texts)}.")
    return present


def _check(files: Files, plan: _Plan, team: Team) -> None:
    """Compare the checksums of all bytes that this rank loads, and on the first rank also those of the `state=` of all ranks.
    Raises `CheckpointError` if one differs."""
    reads = [*plan.of_model, *plan.of_optimizer, *plan.of_state]
    for name, entry in files.manifest.tensors.items():
        is_used = plan.state is not None and (name == plan.state or name.startswith(plan.state + "/"))
        if is_used or (team.leads and name.startswith(OF_RANKS)):
            reads += [Read(name, entry, chunk, chunk.box, None) for chunk in entry.chunks]
    if faults := files.faults(reads):
        raise CheckpointError(f"{files.folder} is damaged: {some_of(faults, SHOWN, '; ')}.")


def _saved_states(files: Files, plan: _Plan, state: Mapping[str, Stateful]) -> dict[str, Any]:
    """Read and return {key: saved state} of all objects that were saved with `state=`, for this rank; {} if this load got no
    `state=`. Raises `CheckpointError` if a key of `state` is missing."""
    if plan.state is None:
        return {}
    words = json.loads(bytes(files.whole(plan.state).tolist()))
    saved: dict[str, Any] = decode(
        words, lambda name: plan.sharded[name] if name in plan.sharded else files.whole(name)
    )
    lost = [key for key in state if key not in saved]
    if lost:
        raise CheckpointError(
            f"{files.folder} has no state for {', '.join(lost)}; it has {', '.join(saved) or 'none'}."
        )
    return saved


def _reads(name: str, entry: TensorEntry, tensor: Tensor, fresh: bool = False) -> Iterable[Read]:
    """Iterate over the reads that fill this rank's shard of `tensor`. `fresh`: `tensor` is new, so it may be filled before all
    checksums are compared. Raises `CheckpointError` if `tensor` is on the meta device."""
    local = local_data(tensor)
    if local.is_meta:
        raise CheckpointError(f"{name} is on the meta device; call to_empty before loading.")
    box = own_box(name, tensor)
    for chunk in entry.chunks if box.numel else ():
        part = overlap(box, chunk.box)
        if part is not None:
            yield Read(name, entry, chunk, part, local[part.within(box)], fresh)
