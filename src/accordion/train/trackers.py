"""TensorBoard, Weights & Biases and MLflow, to which a run sends its metrics. A resumed run continues its run there."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accordion.errors import UsageError
from accordion.files import write_whole
from accordion.train.config import JobConfig, flat

IDS = "trackers.json"  # in the run folder: tracker -> id of this run there
FLUSH_S = 10  # maximum age of a figure before TensorBoard writes it


def trackers_of(config: JobConfig, run_dir: Path, first_step: int, say: Callable[[str], None]) -> dict[str, RunTracker]:
    """Open the trackers that `config.log` names, store the ids of their runs in `run_dir`, and return name -> tracker. If one
    cannot be opened, reports that to `say` and leaves it out. `first_step`: number of steps done before; 0 starts new runs."""
    kinds: dict[str, type[RunTracker]] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _Mlflow}
    ids, opened = dict[str, str](), dict[str, RunTracker]()
    if first_step:
        with suppress(OSError, ValueError):  # no file, or a damaged one: new runs
            stored = json.loads((run_dir / IDS).read_text(encoding="utf-8"))
            ids = {k: v for k, v in stored.items() if isinstance(v, str)} if isinstance(stored, dict) else {}
    for name, tracker in [(name, kind()) for name, kind in kinds.items() if getattr(config.log, name)]:
        try:
            theirs = tracker.open(config, run_dir, first_step, ids.get(name))
        except Exception as error:  # clients of services raise errors of any kind
            say(f"not recorded in {name}: {' '.join(str(error).split())}; training goes on")
            continue
        opened[name] = tracker
        if theirs is not None:
            ids[name] = theirs
            write_whole(run_dir / IDS, json.dumps(ids) + "\n")
    return opened


class _TensorBoard:
    def open(self, config: JobConfig, run_dir: Path, first_step: int, theirs: str | None) -> None:
        if find_spec("tensorboard") is None:
            raise UsageError("it is not installed here; pip install tensorboard, or give --log.tensorboard false")
        from torch.utils.tensorboard import SummaryWriter

        purged = first_step + 1 if first_step else None  # these steps are trained again
        self._writer: Any = SummaryWriter(str(run_dir), purge_step=purged, flush_secs=FLUSH_S)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class _Wandb:
    def open(self, config: JobConfig, run_dir: Path, first_step: int, theirs: str | None) -> str:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=config.log.wandb,
            name=run_dir.name,
            dir=str(run_dir),
            config=flat(config),
            id=theirs,
            resume="allow" if theirs is not None else None,
        )
        # Steps of W&B only grow, but a resumed run repeats steps that were not saved.
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        # The client passes the values to another process, which waits for the service.
        self._run.log({**values, "step": step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Mlflow:
    def open(self, config: JobConfig, run_dir: Path, first_step: int, theirs: str | None) -> str:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._mlflow.set_experiment(config.log.mlflow)
        run = self._mlflow.start_run(run_id=theirs, run_name=run_dir.name)
        known = run.data.params  # cannot be overwritten
        self._mlflow.log_params({key: str(value) for key, value in flat(config).items() if key not in known})
        return str(run.info.run_id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step, synchronous=False)  # sent by another thread

    def close(self, *, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


RunTracker = _TensorBoard | _Wandb | _Mlflow
"""A tracker of metrics. `open` starts a run there, or continues the one with the id `theirs` after `first_step` steps; it returns
the run's id, or None if the tracker needs none to continue. `log` does not wait for a service. If a method raises, the caller
reports that and uses the tracker no more."""
