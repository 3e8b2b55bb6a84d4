"""`accordion.fit`: a run of `accordion train` on a task that a program holds, in its own processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accordion.train.fitting import Fit


def fit(task: object, config: str | os.PathLike[str] | None = None, options: Mapping[str, Any] | None = None) -> Fit:
    """Train `task` as `accordion train --task` does, with its resume, checkpoints, metrics, plan and faults.

    Under torchrun or srun every process calls it and is one rank; elsewhere this process is the only rank. `task`: an object
    with `model`, `dataset` and `loss`, see docs/tasks.md. `config`: a run file. `options`: keys as in run files, such as
    `{"train.steps": 50}`; they win over the file. The process group is made and ended in here.

    Raises `UsageError` for mistakes in any of these, before the first step; `CheckpointError`, `NonFiniteError` and
    `DivergenceError` as the command ends with; what the task's own code raises. `SystemExit(75)` where a signal ended the run
    (SIGTERM, SIGUSR1), once it is saved: a launcher starts the program again, and the same call goes on from there. The program's
    own handlers are back then, and one that came too late for the run is sent to them. Needs
    `pip install 'accordion-fsdp[train]'`.
    """
    from accordion.train.fitting import fitted

    return fitted(task, None if config is None else os.fspath(config), options or {})
