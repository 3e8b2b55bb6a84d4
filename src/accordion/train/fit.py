"""`accordion.fit`: train a task in the processes of the calling program."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accordion.errors import check_installed

if TYPE_CHECKING:
    from accordion.train.fitting import Fit


PACKAGES = ("yaml", "rich", "tokenizers", "transformers", "pyarrow", "datasets")  # of the extra "train"


def fit(
    task: object,
    config: str | os.PathLike[str] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    on_step: Callable[[dict[str, float]], bool | None] | None = None,
) -> Fit:
    """Train `task` as `accordion train --task` does, in the calling processes, and return the result of the run.

    If the program has a process group, each of its ranks calls this and trains in that group, on its current device; the group
    stays, and `launch.timeout_s` has no effect. Otherwise creates a group and destroys it at the end: under torchrun or srun
    every process calls this and is one rank, else this process is the only rank.

    Args:
        task: object with `model`, `dataset` and `loss`, see docs/tasks.md.
        config: path of a run file.
        options: keys of run files, such as `{"train.steps": 50}`, which override the file.
        on_step: called on every rank after each step with the metrics of `metrics.jsonl` by name (`step`, `loss`, ...), for
            example `ray.train.report`. If it returns True on any rank, all ranks save a checkpoint after one of the next two
            steps and go on; while it keeps returning True, they save no second time.

    In the main thread, a signal (SIGTERM, SIGUSR1) saves, ends the run and raises `SystemExit(75)`: a launcher then starts the
    program again, and the same call resumes. The program's own signal handlers are replaced during the run, and restored before
    this returns or raises. In another thread, such as a worker's of Ray Train, signals are left to the program, and
    `SystemExit` is never raised; the result then has the state "preempted".

    Raises `UsageError` for mistakes in the arguments, before the first step. Raises `CheckpointError`, `NonFiniteError` and
    `DivergenceError` as the command does, and exceptions of the task's own code and of `on_step`. Needs `pip install
    'accordion-fsdp[train]'`.
    """
    check_installed("acc.fit", PACKAGES, "train")
    from accordion.train.fitting import fitted

    return fitted(task, None if config is None else os.fspath(config), options or {}, on_step)
