"""Save a checkpoint: each rank writes its shards into its own file, then rank 0 writes the manifest."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accordion.checkpoint.background import Saving, ThreadAgreement, saver_of
from accordion.checkpoint.checksums import PIECE_BYTES, kind_here
from accordion.checkpoint.collective import Team
from accordion.checkpoint.contents import Contents, Stateful, contents, model_tensors, object_states, placement_words
from accordion.checkpoint.format import Manifest, TensorEntry, code_of, dump
from accordion.checkpoint.json_values import Json, encode
from accordion.checkpoint.optimizer_list import as_one, parts_of
from accordion.checkpoint.optimizer_states import same_on_all
from accordion.checkpoint.prune import check_keep, prune_before
from accordion.checkpoint.storage.folders import Folder, folder_at
from accordion.checkpoint.storage.local import Local
from accordion.checkpoint.writing import FileLayout, described, layout_of, write
from accordion.engine.hooks import engine_of
from accordion.errors import CheckpointError, UsageError
from accordion.optimizers.wrap import parked_error
from accordion.park import ParkedModel
from accordion.safety.same_on_ranks import compare_replicas
from accordion.state import Only, settle


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    extra: Json = None,
    state: Mapping[str, Stateful] | None = None,
    background: bool = False,
    keep: int = 0,
    only: Only = None,
) -> Saving:
    """Write a checkpoint of `model` and `optimizer` that any number of ranks can load; return a handle with `wait()`.

    Collective. The checkpoint appears complete or not at all. An earlier background save of this model is waited for first, and
    its error raised. Raises `CheckpointError` on every rank if any rank fails, and, before anything is written, if models,
    optimizers, options or states that must be equal differ between ranks; `DivergenceError` if replicas of a shard differ;
    `UsageError` inside `full_params` and for a wrong argument.

    Args:
        path: folder to create, on storage that all ranks share; replaces an older checkpoint of that name. Or a URL for fsspec,
            such as `s3://bucket/run/step-100`, where nothing is replaced.
        optimizer: one optimizer or a list of several; a list is loaded into a list of as many, in the same order.
        extra: numbers, strings, lists, tuples and dicts to save with the tensors; those of rank 0 are saved.
        state: name -> object whose `state_dict()` is saved for each rank: a scheduler, a scaler, a data loader,
            `RandomState()`. `load` takes the same names. DTensors in a state are saved once.
        background: return when everything is copied to host memory, and write in a thread. The next save waits for the thread;
            if it failed, the next step of `optimizer`, the next save or load, or `wait()` raises its error.
        keep: number of complete checkpoints to keep among those in the same folder whose names differ only in the number at
            the end; older ones are removed after the save. 0 keeps all.
        only: the tensors of the model to save: "trained", the parameters that require a gradient (adapters without their base);
            a pattern of names; a function (name, tensor) -> bool, the same on all ranks; `()` for none. Pass it to `load` too.
    """
    team, stepping = finish_work(model, optimizer, "save")
    if (engine := engine_of(model)) is not None:
        compare_replicas(engine)
    team.agree(lambda: check_keep(keep))
    target = team.agree(lambda: folder_at(path))
    sharded, own_states = team.agree(lambda: object_states(state or {}, team))
    saved_once = team.agree(lambda: contents(model, stepping, only))
    saved_once = replace(saved_once, tensors={**saved_once.tensors, **sharded})
    same_on_all(saved_once, stepping, team)
    name, _, place = team.shared(f"{secrets.token_hex(4)} {target}" if team.leads else "")[0].partition(" ")
    form, plan = team.agree(
        lambda: (form_of(saved_once, team, encode(extra, "extra")), layout_of(saved_once, own_states, team))
    )
    job = SaveJob(target=target, name=name, place=place, form=form, plan=plan, team=team, keep=keep)
    if not background:
        job.run(team.agree)
        return Saving()
    return saver_of(model).start(job.plan, job.run, ThreadAgreement(team, name), team, parts_of(stepping))


def finish_work(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None, call: str
) -> tuple[Team, torch.optim.Optimizer | None]:
    """Wait for all work in progress of `model`, also a background save; return (the model's ranks, the optimizer that steps).

    Collective. The optimizer that steps is the inner one if `optimizer` wraps another, an `OptimizerList` for several, None for
    None. `call`: "save" or "load". Raises `CheckpointError` if the background save failed, `UsageError` inside `full_params`, for
    a load into a parked model, and if `optimizer` is no optimizer.
    """
    engine = engine_of(model)
    if engine is not None:
        if engine.suspended:
            raise UsageError(
                f"{call} does not work inside full_params, because the parameters are not sharded there; leave it first."
            )
        if call == "load" and engine.observers.find(ParkedModel) is not None:
            raise parked_error()
        settle(engine, f"{call}s a checkpoint")
    saver_of(model).wait()
    team = Team.of(model_tensors(model)[0].values())
    return team, team.agree(partial(as_one, optimizer))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """A save on this rank and all that it needs, collected before the first byte is written. `run` writes the files."""

    target: Folder
    name: str  # 8 hexadecimal digits, unique for each save, the same on all ranks
    place: str  # the target of rank 0 as text, to find a rank with another path
    form: Manifest  # without files and chunks
    plan: FileLayout
    team: Team
    keep: int

    def run(self, agree: Callable[[Callable[[], object]], object], host: memoryview | None = None) -> None:
        """Write the checkpoint, then remove older ones as `keep` says. Collective. If writing fails, remove what was written
        and raise the error.

        `agree`: calls a function on each rank and raises on all ranks if one fails, as `Team.agree` does. `host`: the bytes of
        `plan.parts`, one after the other, in host memory; None reads them from their devices.
        """
        leads = self.team.leads
        drafts: list[Folder] = []
        try:
            agree(lambda: drafts.append(self.target.begin(self.name)) if leads else None)
            begun = drafts[0] if drafts else self.target.begun(self.name)
            agree(lambda: self._write_file(begun, host) if self.plan.parts else None)
            # The rename in `commit` makes the folder a checkpoint.
            agree(lambda: begun.commit(dump(described(self.form, begun))) if leads else None)
        except BaseException:
            for one in drafts:
                with suppress(Exception):  # the first error is the one to raise
                    one.discard()
            raise
        agree(lambda: prune_before(self.target, self.keep) if leads and self.keep else None)

    def _write_file(self, begun: Folder, host: memoryview | None) -> None:
        if isinstance(begun, Local) and not begun.path.is_dir() and str(self.target) != self.place:
            raise CheckpointError(
                f"this rank saves to {self.target} and rank 0 to {self.place}; pass the same path on all ranks, on storage "
                "that all of them share."
            )
        write(begun, f"rank-{self.team.index:05d}.safetensors", self.plan, host)


def form_of(saved_once: Contents, team: Team, extra: Json) -> Manifest:
    """Return the manifest of a save, without files and chunks, which are not known yet. `saved_once`: all that is saved, except
    what each rank saves for itself. `extra`: encoded by `encode`."""
    tensors = {
        name: TensorEntry(
            dtype=code_of(name, tensor.dtype), shape=tuple(tensor.shape), placements=placement_words(tensor), chunks=()
        )
        for name, tensor in saved_once.tensors.items()
    }
    meshes = dict.fromkeys(tensor.device_mesh for tensor in saved_once.tensors.values() if isinstance(tensor, DTensor))
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
        aliases=saved_once.aliases,
        optimizer=saved_once.optimizer,
        extra=extra,
        saved_by=saved_by,
    )
