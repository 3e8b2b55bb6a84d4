"""Who may call a sharded model: the process that sharded it, and one thread at a time."""

from __future__ import annotations

import os
from threading import get_ident

from accordion import _torch
from accordion.engine.observer import Observer
from accordion.errors import UsageError


class OneCaller(Observer):
    """Owns the process of a model, and the thread whose forward is under way.

    `alone`: there is one rank, whose forked children wait for nobody.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._pid = os.getpid()
        self._thread: int | None = None

    def unit_is_called(self) -> None:
        """Raises `UsageError` in a forked child, and in a thread that calls while another one's forward is under way."""
        thread = self._thread
        if thread is None:  # the outermost call
            if not self._alone and os.getpid() != self._pid:
                raise UsageError(
                    f"a sharded model was called in process {os.getpid()}, forked from process {self._pid} that sharded it, "
                    "where it would wait for other ranks for ever; call it in its own process, and keep it out of a loader's "
                    "workers."
                )
        elif thread != get_ident() and not _torch.is_in_backward():
            raise UsageError(
                "a sharded model was called from two threads at once, and its calls are steps that all ranks take in one order; "
                "call it from one thread, or hold a lock around each forward and backward."
            )

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        self._thread = get_ident()

    def forward_ends(self, error: BaseException | None) -> None:
        self._thread = None

    def interrupted(self) -> None:
        self._thread = None
