"""Implementation of `accordion.fit`: `accordion train` in processes that already run."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from accordion.checkpoint.prune import newest
from accordion.devices import devices_here
from accordion.errors import CheckpointError, UsageError, nearest
from accordion.models.stored import cache_folder
from accordion.options import made, options_of
from accordion.safety.liveness.hub import hubs_of_job
from accordion.train import launch, loop
from accordion.train.config import JobConfig, check
from accordion.train.ending import PREEMPTED, Signals
from accordion.train.launch import RankPlace
from accordion.train.metrics import METRICS, steps_in, text_of
from accordion.train.prepare import Prepared, prepare
from accordion.train.run_files import values_of_file
from accordion.train.screen import Screen


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Result of a run. `state`: "finished", "stopped" for the reason `why`, or, outside of the main thread only, "preempted".
    `step`: last step, 0 without one; `loss`: its mean loss, None if not finite. `checkpoint`: path of the newest, or None."""

    run_dir: str
    state: str
    why: str
    step: int
    loss: float | None
    checkpoint: str | None


def fitted(task: object, config: str | None, options: Mapping[str, Any], on_step: loop.OnStep | None) -> Fit:
    """Train `task` in the calling processes and return the result, as `accordion.fit` describes. `config`: path of a run file.
    `options`: keys that override it. If a signal ends the run in the main thread, saves and raises `SystemExit(PREEMPTED)`."""
    began_s, cache = time.time(), cache_folder(os.environ)
    values = _values(config, options)
    job: JobConfig = made(JobConfig, values)
    check(job)
    in_group = dist.is_initialized()
    alone = RankPlace(rank=0, world=1, local_rank=0, local_world=1, starter="fit")
    place, store = launch.place_in_group() if in_group else (launch.place_of(os.environ) or alone, HashStore())
    if place is alone and job.launch.nproc > 1:
        raise UsageError(
            f"launch.nproc is {job.launch.nproc}, and fit trains in its own process; start the program with torchrun "
            f"--nproc-per-node {job.launch.nproc}, or leave it out."
        )
    device, _ = launch.choose(job.launch, place, devices_here())
    if not in_group and place is not alone:
        store = launch.joined(place)
        launch.give_up_store(store, job.launch.timeout_s)
    screen = Screen(speaks=place.rank == 0)
    prepared = launch.once_per_host(
        place, store, lambda: prepare(job, place, cache, screen, named=frozenset(values), began_s=began_s, task=task)
    )
    with Signals() as signals, ExitStack() as cleanups:
        try:
            outcome = loop.trained(place, store, prepared, device, signals, cleanups, on_step)
        except BaseException as error:
            # A rank that has reported its end can do nothing more in its group, so a program reports in its own group itself.
            for hub in [] if in_group else hubs_of_job():
                with suppress(Exception):  # must not hide the error itself
                    hub.explain(error)
            raise
        if outcome.state == "preempted" and threading.current_thread() is threading.main_thread():
            sys.exit(PREEMPTED)
    return _result(prepared, outcome)


def _result(prepared: Prepared, outcome: loop.Outcome) -> Fit:
    _, last = [("", {}), *steps_in(text_of(prepared.run_dir / METRICS))][-1]
    checkpoint = None
    with suppress(CheckpointError):
        checkpoint = newest(prepared.checkpoint_dir).path
    return Fit(
        run_dir=str(prepared.run_dir),
        state=outcome.state,
        why=outcome.why,
        step=last.get("step", 0),
        loss=last.get("loss"),
        checkpoint=checkpoint,
    )


def _values(config: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    known = {option.key: option for option in options_of(JobConfig)}
    values = {} if config is None else values_of_file(config, list(known.values()))
    for key, value in options.items():
        if key not in known:
            raise UsageError(f"options: key {key!r} does not exist; {nearest(str(key), known)}")
        values[key] = known[key].converted(value, key)
    return values
