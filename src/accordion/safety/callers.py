"""Refuse calls of a sharded model from a forked process, or from two threads at once."""

from __future__ import annotations

import os
from threading import get_ident

from accordion import _torch
from accordion.engine.observer import Observer
from accordion.errors import UsageError


class OneCaller(Observer):
    """Observer that refuses calls from a forked process or a second thread. `alone`: there is one rank, so forks are allowed."""

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._pid = os.getpid()
        self._thread: int | None = None

    def unit_is_called(self) -> None:
        """Raise `UsageError` in a forked process, and in a thread if another thread's forward is in progress."""
        thread = self._thread
        if thread is None:  # the outermost call
            if not self._alone and os.getpid() != self._pid:
                raise UsageError(
                    f"a sharded model was called in process {os.getpid()}, a fork of process {self._pid} that sharded it, and "
                    "the call would wait for other ranks forever; call the model in the process that sharded it, and not in "
                    "workers of a DataLoader."
                )
        elif thread != get_ident() and not _torch.is_in_backward():
            raise UsageError(
                "a sharded model was called from two threads at once, and all ranks must call its units in the same order; call "
                "it from one thread, or hold a lock around each forward and backward."
            )

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        self._thread = get_ident()

    def forward_ends(self, error: BaseException | None) -> None:
        self._thread = None

    def interrupted(self) -> None:
        self._thread = None
