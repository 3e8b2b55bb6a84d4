"""Whether the job's store still answers: a rank that is cut off from it ends by itself and says why."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

TICKS = 20  # in a time-out; counted, so that a process that was suspended does not end when it wakes


def watch_store(store: Store, rank: int, timeout_s: float) -> None:
    """From now on, end this process with one line on stderr once the store has not answered for `timeout_s`.

    A read from a machine that is cut off returns when the system gives the connection up, on Linux after a quarter of an hour
    and more, and torch's clients of the store wait for it. So one thread asks, on a connection of its own, and another counts.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        _Lifeline(store.host, store.port, rank, timeout_s).start()


class _Lifeline:
    """Owns a connection to the store and two threads, which end with the process."""

    def __init__(self, host: str, port: int, rank: int, timeout_s: float) -> None:
        self._where, self._rank, self._timeout_s = f"{host}:{port}", rank, timeout_s
        self._own = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        self._num_answers = 0

    def start(self) -> None:
        for work in (self._ask, self._count):
            threading.Thread(target=work, name="accordion-store-watchdog", daemon=True).start()

    def _ask(self) -> None:
        while True:
            try:
                self._own.check(["accordion"])
            except Exception:  # closed: at the end of a job too, when this process has little time left anyway
                return
            self._num_answers += 1
            time.sleep(self._timeout_s / TICKS)

    def _count(self) -> None:
        heard, silent = 0, 0
        while silent <= TICKS:
            time.sleep(self._timeout_s / TICKS)
            silent = 0 if self._num_answers > heard else silent + 1
            heard = self._num_answers
        print(
            f"accordion: rank {self._rank} stopped: the job's store at {self._where} has not answered for {self._timeout_s:g} s "
            "(launch.timeout_s); its machine, or the network to it, is gone.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
