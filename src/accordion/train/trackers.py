"""Weights & Biases and MLflow beside the record: the same figures, under one run of theirs over all starts of ours."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Lock, Thread
from typing import Any, Protocol

from accordion.errors import UsageError
from accordion.train.config import JobConfig, LogConfig, flat
from accordion.train.tokens import write_whole

IDS = "trackers.json"  # in the run folder: which runs of theirs this one is
PACKAGES = ("wandb", "mlflow")
MOST_WAITING = 10_000  # steps and validations whose figures wait for MLflow; of more, the newest are dropped
AT_ONCE = 100  # of them in one request: MLflow takes 1000 figures
CLOSE_S = 10.0  # at the end of a run, in which MLflow takes what waits


class FigureSink(Protocol):
    """Takes figures of a step without waiting for a service; what it raises is told, and it is asked no more."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self, *, failed: bool) -> None: ...


def check_trackers(log: LogConfig) -> None:
    """Raises `UsageError` where a package is asked for that is not installed."""
    for name in PACKAGES:
        if getattr(log, name) is not None and find_spec(name) is None:
            raise UsageError(f"log.{name} needs {name}, not installed here; pip install 'accordion-fsdp[log]'.")


def trackers_of(
    config: JobConfig, run_dir: Path, *, goes_on: bool, say: Callable[[str], None]
) -> dict[str, FigureSink]:
    """Those that `config.log` names, opened. One that cannot be opened is told of and left out."""
    before, found = _ids(run_dir) if goes_on else {}, dict[str, FigureSink]()
    ids = dict(before)

    def keep(name: str, of_theirs: str) -> None:
        ids[name] = of_theirs
        write_whole(run_dir / IDS, json.dumps(ids) + "\n")

    makers: dict[str, Callable[[], FigureSink]] = {
        "wandb": lambda: _Wandb(config, run_dir, before.get("wandb"), partial(keep, "wandb")),
        "mlflow": lambda: _Mlflow(config, run_dir.name, before.get("mlflow"), partial(keep, "mlflow"), say),
    }
    for name, make in makers.items():  # the one with a thread, which keeps an id later, is the last
        if getattr(config.log, name) is not None:
            try:
                found[name] = make()
            except Exception as error:  # whatever a service or its client says
                say(_left_out(name, error))
    return found


def _left_out(name: str, error: Exception) -> str:
    return f"not recorded in {name}: {' '.join(str(error).split())}; training goes on"


def _ids(run_dir: Path) -> dict[str, str]:
    try:
        said = json.loads((run_dir / IDS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in said.items() if isinstance(v, str)} if isinstance(said, dict) else {}


class _Wandb:
    """Their client hands figures to a process of its own, which waits for the service."""

    def __init__(self, config: JobConfig, run_dir: Path, before: str | None, keep: Callable[[str], None]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=config.log.wandb,
            name=run_dir.name,
            dir=str(run_dir),
            mode=config.log.wandb_mode,
            config=flat(config),
            id=before,
            resume="allow"
            if before is not None and config.log.wandb_mode == "online"
            else None,  # files have no other choice
        )
        # Their own steps only grow; a run that goes on takes back what was not saved.
        self._run.define_metric("*", step_metric="step")
        keep(str(self._run.id))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Mlflow:
    """Owns a queue, and the thread that gives what is in it to MLflow.

    Its client waits for each answer, and tries a server that is gone again for minutes; no step waits for that. What the server
    does not take is dropped, and this is told once. The thread ends at `close`; one that waits for an answer longer than
    `CLOSE_S` ends when that comes, sends no figures and says nothing more, and does not hold the end of the process.
    """

    def __init__(
        self,
        config: JobConfig,
        name: str,
        before: str | None,
        keep: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._client: Any = importlib.import_module("mlflow.tracking").MlflowClient
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._config, self._name, self._before, self._keep, self._say = config, name, before, keep, say
        # Figures of a step, the step, and when they came, in ms since 1970; None: no more will come.
        self._waiting: Queue[tuple[Mapping[str, float], int, int] | None] = Queue(MOST_WAITING)
        self._status = ""  # with which the run ends there
        self._over = Event()  # whether nothing more is sent and said
        self._lock, self._is_told = Lock(), False
        self._thread = Thread(target=self._serve, name="accordion-mlflow", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._over.is_set():
            return
        try:
            self._waiting.put_nowait((dict(values), step, round(1000 * time.time())))
        except Full:
            self._dropped(f"{MOST_WAITING} steps wait for its answer")

    def close(self, *, failed: bool) -> None:
        until = time.monotonic() + CLOSE_S
        self._status = "FAILED" if failed else "FINISHED"
        while not self._over.is_set() and time.monotonic() < until:
            try:
                self._waiting.put(None, timeout=0.1)
                break
            except Full:  # until some of it is taken, or the thread gives up
                continue
        self._thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            if self._thread.is_alive():
                self._over.set()
                self._say(
                    f"not all figures are in mlflow: it has not taken them in {CLOSE_S:g} s at the end of the run"
                )

    def _serve(self) -> None:
        try:
            client, run = self._opened()
        except Exception as error:  # whatever a service or its client says
            self._give_up(error)
            return
        goes_on = True
        while goes_on and not self._over.is_set():
            taken, goes_on = self._taken()
            if taken:
                self._ask(partial(client.log_batch, run, metrics=taken))
        self._ask(partial(client.set_terminated, run, status=self._status))

    def _opened(self) -> tuple[Any, str]:
        """The client, and the run's name with it."""
        client = self._client(tracking_uri=self._config.log.mlflow_uri)
        run = self._before
        if run is None:
            experiment = client.get_experiment_by_name(self._config.log.mlflow)
            at = experiment.experiment_id if experiment else client.create_experiment(self._config.log.mlflow)
            run = str(client.create_run(at, run_name=self._name).info.run_id)
        else:
            client.update_run(run, status="RUNNING")
        self._keep(run)
        known = client.get_run(run).data.params  # which cannot be written anew there
        settings = [self._entities.Param(k, str(v)) for k, v in flat(self._config).items() if k not in known]
        client.log_batch(run, params=settings)
        return client, run

    def _ask(self, what: Callable[[], object]) -> None:
        if not self._over.is_set():
            try:
                what()
            except Exception as error:
                self._dropped(" ".join(str(error).split()))

    def _taken(self) -> tuple[list[Any], bool]:
        """Metrics of what waits, and whether more may come; waits for the first."""
        taken = [self._waiting.get()]
        while taken[-1] is not None and len(taken) < AT_ONCE:
            try:
                taken.append(self._waiting.get_nowait())
            except Empty:
                break
        metric = self._entities.Metric
        found = [metric(k, v, now, step) for values, step, now in filter(None, taken) for k, v in values.items()]
        return found, taken[-1] is not None

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            if not self._over.is_set():
                self._over.set()
                self._say(_left_out("mlflow", error))

    def _dropped(self, why: str) -> None:
        with self._lock:
            if not self._is_told and not self._over.is_set():
                self._is_told = True
                self._say(
                    f"some figures are not in mlflow: {why}; training goes on, and later ones are sent if it answers"
                )
