"""Weights & Biases and MLflow beside the record: the same figures, under one run of theirs over all starts of ours."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from accordion.errors import UsageError
from accordion.train.config import JobConfig, LogConfig, flat
from accordion.train.tokens import write_whole

IDS = "trackers.json"  # in the run folder: which runs of theirs this one is
PACKAGES = ("wandb", "mlflow")


class FigureSink(Protocol):
    """Takes figures of a step; what it raises is told, and it is asked no more."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self, *, failed: bool) -> None: ...


def check_trackers(log: LogConfig) -> None:
    """Raises `UsageError` where a package is asked for that is not installed."""
    for name in PACKAGES:
        if getattr(log, name) is not None and find_spec(name) is None:
            raise UsageError(f"log.{name} needs {name}, not installed here; pip install 'accordion[log]'.")


def trackers_of(
    config: JobConfig, run_dir: Path, *, goes_on: bool, say: Callable[[str], None]
) -> dict[str, FigureSink]:
    """Those that `config.log` names, opened. One that cannot be opened is told of and left out."""
    kinds: dict[str, type[_Wandb] | type[_Mlflow]] = {"wandb": _Wandb, "mlflow": _Mlflow}
    before, found = _ids(run_dir) if goes_on else {}, dict[str, FigureSink]()
    ids = dict(before)
    for name, kind in kinds.items():
        if getattr(config.log, name) is None:
            continue
        try:
            made = kind(config, run_dir, before.get(name))
        except Exception as error:  # whatever a service or its client says
            say(f"not recorded in {name}: {' '.join(str(error).split())}; training goes on")
            continue
        found[name], ids[name] = made, made.id
    if found:
        write_whole(run_dir / IDS, json.dumps(ids) + "\n")
    return found


def _ids(run_dir: Path) -> dict[str, str]:
    try:
        said = json.loads((run_dir / IDS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in said.items() if isinstance(v, str)} if isinstance(said, dict) else {}


class _Wandb:
    def __init__(self, config: JobConfig, run_dir: Path, before: str | None) -> None:
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
        self.id = str(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Mlflow:
    def __init__(self, config: JobConfig, run_dir: Path, before: str | None) -> None:
        tracking: Any = importlib.import_module("mlflow.tracking")
        self._client = tracking.MlflowClient(tracking_uri=config.log.mlflow_uri)
        if before is None:
            experiment = self._client.get_experiment_by_name(config.log.mlflow)
            at = experiment.experiment_id if experiment else self._client.create_experiment(config.log.mlflow)
            before = self._client.create_run(at, run_name=run_dir.name).info.run_id
        else:
            self._client.update_run(before, status="RUNNING")
        self.id = str(before)
        known = self._client.get_run(self.id).data.params  # which cannot be written anew there
        for key, value in flat(config).items():
            if key not in known:
                self._client.log_param(self.id, key, str(value))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self._client.log_metric(self.id, key, value, step=step)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self.id, status="FAILED" if failed else "FINISHED")
