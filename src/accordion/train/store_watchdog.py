"""Whether the job's store still answers: a rank that is cut off from it ends by itself and says why."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

TICKS = 20  # in a time-out; counted, so that a process that was suspended does not end when it wakes
ENDS_S = 2.0  # for an answer that is under way at the end


@contextmanager
def watched_store(store: Store, rank: int, timeout_s: float) -> Iterator[None]:
    """In the block, end this process with one line on stderr once the store has not answered for `timeout_s`.

    A read from a machine that is cut off returns when the system gives the connection up, on Linux after a quarter of an hour
    and more, and torch's clients of the store wait for it. So one thread asks, on a connection of its own, and another counts.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    lifeline = _Lifeline(store.host, store.port, rank, timeout_s) if isinstance(store, TCPStore) else None
    if lifeline is not None:
        lifeline.start()
    try:
        yield
    finally:
        if lifeline is not None:
            lifeline.stop()


class _Lifeline:
    """Owns a connection to the store, and two threads until `stop`.

    A thread that is inside of torch when Python ends aborts the process: Python ends it there, by unwinding through a C++
    destructor (seen in 4 of 12 processes that asked without a pause). So the one that asks is waited for.
    """

    def __init__(self, host: str, port: int, rank: int, timeout_s: float) -> None:
        self._where, self._rank, self._timeout_s = f"{host}:{port}", rank, timeout_s
        self._own = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        self._num_answers = 0
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=work, name="accordion-store-watchdog", daemon=True)
            for work in (self._ask, self._count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Returns when both threads have ended, or the store, which may be gone, has not answered for some time."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(ENDS_S)

    def _pause(self) -> bool:
        """False: it was stopped."""
        return not self._stopped.wait(self._timeout_s / TICKS)

    def _ask(self) -> None:
        while True:
            try:
                self._own.check(["accordion"])
            except Exception:  # closed
                return
            self._num_answers += 1
            if not self._pause():
                return

    def _count(self) -> None:
        heard, silent = 0, 0
        while silent <= TICKS:
            if not self._pause():
                return
            silent = 0 if self._num_answers > heard else silent + 1
            heard = self._num_answers
        print(
            f"accordion: rank {self._rank} stopped: the job's store at {self._where} has not answered for {self._timeout_s:g} s "
            "(launch.timeout_s); its machine, or the network to it, is gone.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
