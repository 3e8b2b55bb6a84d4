"""Writing a checkpoint: every rank its own rows into its own file, and rank 0 the manifest that makes it one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion.checkpoint.background import Saving, ThreadAgreement, saver_of
from accordion.checkpoint.boxes import box_of
from accordion.checkpoint.checksums import PIECE_BYTES, kind_here
from accordion.checkpoint.collective import Team, told_as
from accordion.checkpoint.contents import (
    Contents,
    Stateful,
    check_stateful,
    contents,
    local_data,
    model_tensors,
    only_one,
    own_box,
    own_coordinate,
    placement_words,
    state_name,
    writes,
)
from accordion.checkpoint.format import Manifest, TensorEntry, code_of, dump, file_name
from accordion.checkpoint.json_values import Json, as_bytes, encode
from accordion.checkpoint.optimizer_states import same_on_all
from accordion.checkpoint.prune import check_keep, prune_before
from accordion.checkpoint.storage.folders import Folder, Local, folder_at
from accordion.checkpoint.writing import FileLayout, WritePart, described, layout, write
from accordion.engine.hooks import engine_of
from accordion.errors import CheckpointError, UsageError
from accordion.safety.replicas import compare_replicas
from accordion.state import Only, settle


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Json = None,
    state: Mapping[str, Stateful] | None = None,
    rank_states: bool = False,
    background: bool = False,
    keep: int = 0,
    only: Only = None,
) -> Saving:
    """Write a checkpoint of `model` and `optimizer` that any number of ranks can load; called by all ranks together.

    `path`: folder that is made, on storage that all ranks see; an older checkpoint of that name is replaced. Or a URL such as
    `s3://bucket/run/step-100`, through fsspec, where nothing is replaced. `extra`: numbers, strings, lists, tuples and dicts
    to keep beside the tensors; rank 0's are taken. `state`: objects whose `state_dict()` is kept for each rank by itself: a
    scheduler, a scaler, a data loader, `RandomState()`. `keep`: then remove all but so many of the newest good checkpoints
    beside it whose names differ in the number at their end alone; 0 keeps all.

    `only`: which tensors of the model: "trained", the parameters that require a gradient, so that adapters are saved without
    their base; a pattern of names; a function (name, tensor) -> bool, the same on all ranks. `load` is given it too. `()`: none
    of them, the optimizer's states alone.

    `background`: returns as soon as everything is copied to host memory, and writes in a thread. A later save waits for it;
    where it failed, the next step of `optimizer`, the next save or `wait()` of what is returned raises.

    `rank_states`: states of the optimizer that are neither shaped like their shard nor equal on all ranks (scales of blocks of
    an 8-bit optimizer, a vector for each matrix) are kept for each rank, and load on as many ranks under the same cut alone.
    Without it they are refused: no rank's is right for another.

    The checkpoint appears complete or not at all. Raises `CheckpointError` on every rank where one of them failed, and, before
    anything is written, where ranks hold other models, optimizers, options or such states.
    """
    engine = engine_of(model)
    if engine is not None:
        if engine.suspended:
            raise UsageError(
                "save does not work inside full_params, where the parameters are no shards; leave it first."
            )
        settle(engine, "saves a checkpoint")
        compare_replicas(engine)
    saver = saver_of(model)
    saver.wait()
    team = Team.of(model_tensors(model)[0].values())
    optimizer = team.agree(partial(only_one, optimizer))

    def checked() -> Folder:
        check_keep(keep)
        check_stateful(state or {}, "state_dict")
        return folder_at(path)

    target = team.agree(checked)
    found, own = same_on_all(team.agree(lambda: contents(model, optimizer, only)), optimizer, team, rank_states)
    name, _, place = team.shared(f"{secrets.token_hex(4)} {target}" if team.leads else "")[0].partition(" ")
    own |= team.agree(lambda: _state_tensors(state or {}, team))
    form, plan = team.agree(lambda: (_form(found, team, encode(extra, "extra")), _layout(found, own, team)))
    job = SaveJob(target=target, name=name, place=place, form=form, plan=plan, team=team, keep=keep)
    if not background:
        job.run(team.agree)
        return Saving()
    return saver.start(job.plan, job.run, ThreadAgreement(team, name), team, optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """All that a save will write on this rank, decided before it writes any of it.

    `name`: of this save, the same on all ranks. `place`: rank 0's target, in words. `form`: the manifest without files.
    """

    target: Folder
    name: str
    place: str
    form: Manifest
    plan: FileLayout
    team: Team
    keep: int

    def run(self, agree: Callable[[Callable[[], object]], object], host: memoryview | None = None) -> None:
        """Write it all. `host`: the bytes of this rank's parts, where they were copied."""
        leads = self.team.leads
        made: list[Folder] = []
        try:
            agree(lambda: made.append(self.target.begin(self.name)) if leads else None)
            begun = made[0] if made else self.target.begun(self.name)
            agree(lambda: self._write_own(begun, host) if self.plan.parts else None)  # no file where it has none
            # From the rename on it is a checkpoint.
            agree(lambda: self.target.commit(begun, dump(described(self.form, begun))) if leads else None)
        except BaseException:
            for one in made:
                with suppress(Exception):  # the first failure is what counts
                    one.discard()
            raise
        agree(lambda: prune_before(self.target, self.keep) if leads and self.keep else None)

    def _write_own(self, begun: Folder, host: memoryview | None) -> None:
        """Write this rank's parts of all tensors."""
        if isinstance(begun, Local) and not begun.path.is_dir() and told_as(str(self.target)) != self.place:
            raise CheckpointError(
                f"this rank saves to {self.target} and rank 0 to {self.place}; pass the same path on all ranks, on storage "
                "that all of them share."
            )
        write(begun, file_name(self.team.index), self.plan, host)


def _layout(found: Contents, own: Mapping[str, Tensor], team: Team) -> FileLayout:
    """Lay out this rank's file. `own`: tensors that this rank keeps for itself."""
    parts = []
    for name, tensor in found.tensors.items():
        box = own_box(name, tensor)
        mine = writes(tensor, own_coordinate(tensor)) if isinstance(tensor, DTensor) else team.leads
        if mine and box.numel:
            parts.append(WritePart(name, box, local_data(tensor)))
    parts += [WritePart(name, box_of(t.shape, ()), t.detach()) for name, t in own.items() if t.numel()]
    return layout(parts, team.index)


def _state_tensors(state: Mapping[str, Stateful], team: Team) -> dict[str, Tensor]:
    """Return what this rank keeps of `state`: JSON as a tensor of bytes, and the tensors to which it refers."""
    if not state:
        return {}
    where = state_name(team.index)
    tensors: dict[str, Tensor] = {}
    words = encode({key: thing.state_dict() for key, thing in state.items()}, where, tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise CheckpointError(
                f"{name} is sharded; the state of a rank holds plain tensors only: pass an optimizer as optimizer=."
            )
    return {where: as_bytes(words), **tensors}


def _form(found: Contents, team: Team, extra: Json) -> Manifest:
    """The manifest with every tensor and no chunk."""
    tensors = {
        name: TensorEntry(
            dtype=code_of(name, tensor.dtype), shape=tuple(tensor.shape), placements=placement_words(tensor), chunks=()
        )
        for name, tensor in found.tensors.items()
    }
    meshes = dict.fromkeys(tensor.device_mesh for tensor in found.tensors.values() if isinstance(tensor, DTensor))
    saved_by: dict[str, Any] = {
        "torch": torch.__version__,
        "num_ranks": len(team.ranks),
        "meshes": [{"shape": list(mesh.shape), "axes": mesh.mesh_dim_names} for mesh in meshes],
    }
    return Manifest(
        checksum=kind_here(),
        piece_bytes=PIECE_BYTES,
        files={},
        tensors=tensors,
        aliases=found.aliases,
        optimizer=found.optimizer,
        extra=extra,
        saved_by=saved_by,
    )
