"""Weights & Biases and MLflow beside the record: the same figures, under one run of theirs over all starts of ours."""

from __future__ import annotations

import importlib
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
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
            config=flat(config),
            id=before,
            resume="allow" if before is not None else None,
        )
        # Their own steps only grow; a run that goes on takes back what was not saved.
        self._run.define_metric("*", step_metric="step")
        keep(str(self._run.id))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Mlflow:
    """Owns what waits for MLflow, and the thread that gives it to MLflow.

    Its client waits for each answer, and tries a server that is gone again for minutes; no step waits for that, nor does the end
    of the process. What the server does not take is dropped, which is said once. Nothing is sent or said after `close`.
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
        self._waiting = deque[list[Any]]()  # metrics of a step
        self._status = ""  # with which the run ends there, once it ends
        self._wake, self._lock = Event(), Lock()
        self._is_told = self._is_over = False
        self._thread = Thread(target=self._serve, name="accordion-mlflow", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        if len(self._waiting) == MOST_WAITING:
            self._dropped(f"{MOST_WAITING} steps wait for its answer")
        elif self._thread.is_alive():
            now = round(1000 * time.time())
            self._waiting.append([self._entities.Metric(key, value, now, step) for key, value in values.items()])
            self._wake.set()

    def close(self, *, failed: bool) -> None:
        self._status = "FAILED" if failed else "FINISHED"
        self._wake.set()
        self._thread.join(CLOSE_S)
        with self._lock:
            self._is_over = True
            if self._thread.is_alive():
                self._say(
                    f"not all figures are in mlflow: it has not taken them in {CLOSE_S:g} s at the end of the run"
                )

    def _serve(self) -> None:
        try:
            client, run = self._opened()
        except Exception as error:  # whatever a service or its client says
            with self._lock:
                if not self._is_over:
                    self._say(_left_out("mlflow", error))
            return
        while not self._is_over:
            status, taken = self._status, list[Any]()
            for _ in range(min(AT_ONCE, len(self._waiting))):
                taken += self._waiting.popleft()
            if taken:
                self._ask(partial(client.log_batch, run, metrics=taken))
            elif status:
                self._ask(partial(client.set_terminated, run, status=status))
                return
            else:
                self._wake.wait()
                self._wake.clear()

    def _ask(self, what: Callable[[], object]) -> None:
        try:
            what()
        except Exception as error:
            self._dropped(" ".join(str(error).split()))

    def _opened(self) -> tuple[Any, str]:
        """The client, and the run's name with it."""
        client = self._client()
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

    def _dropped(self, why: str) -> None:
        with self._lock:
            if not self._is_told and not self._is_over:
                self._is_told = True
                self._say(
                    f"some figures are not in mlflow: {why}; training goes on, and later ones are sent if it answers"
                )
