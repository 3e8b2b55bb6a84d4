"""`accordion.fit`: train a task in the processes of the calling program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accordion.errors import check_installed

if TYPE_CHECKING:
    from accordion.train.fitting import Fit


PACKAGES = ("yaml", "rich", "tokenizers", "transformers", "pyarrow", "datasets")  # of the extra "train"


def fit(task: object, config: str | os.PathLike[str] | None = None, options: Mapping[str, Any] | None = None) -> Fit:
    """Train `task` as `accordion train --task` does, in the calling processes, and return the result of the run.

    Under torchrun or srun every process calls it and is one rank; otherwise this process is the only rank. Creates the process
    group and destroys it at the end. `task`: object with `model`, `dataset` and `loss`, see docs/tasks.md. `config`: a run file.
    `options`: keys of run files, such as `{"train.steps": 50}`, which override the file.

    Raises `UsageError` for mistakes in the arguments, before the first step, and if there is a process group already. Raises
    `CheckpointError`, `NonFiniteError` and `DivergenceError` as the command does, and exceptions of the task's own code. If a
    signal (SIGTERM, SIGUSR1) ends the run, it saves and raises `SystemExit(75)`: a launcher then starts the program again, and
    the same call resumes. The program's own signal handlers are replaced during the run, and restored before this returns or
    raises. Needs `pip install 'accordion-fsdp[train]'`.
    """
    check_installed("acc.fit", PACKAGES, "train")
    from accordion.train.fitting import fitted

    return fitted(task, None if config is None else os.fspath(config), options or {})
