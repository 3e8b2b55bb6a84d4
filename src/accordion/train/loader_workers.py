"""Workers of a loader outlive the signals by which a scheduler announces the end to all processes of a job."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from accordion.train.ending import SIGNALS


class Shelter:
    """A loader's `worker_init_fn`, by which SIGTERM and SIGUSR1 do nothing in its workers until `end`. Owns a byte they all see.

    A signal that is blocked or ignored is so too in programs that a worker starts, and nobody could end these by it; a handler
    stays with the worker. But Python does not tell a handler who sent a signal, and by SIGTERM a loader and multiprocessing end
    workers that did not end when asked to: `end` comes before that. A worker whose parent is gone finds that out by itself.
    """

    def __init__(self, own: Callable[[int], object] | None) -> None:
        """`own`: the user's, called in each worker once the handlers are set."""
        self._own = own
        self._ends = multiprocessing.RawValue(
            ctypes.c_bool, False
        )  # without a lock, which a second signal would wait for

    def __call__(self, worker: int) -> None:
        for number in SIGNALS:
            signal.signal(number, self._take)
        if self._own is not None:
            self._own(worker)

    def _take(self, number: int, frame: object) -> None:
        if self._ends.value and number == signal.SIGTERM:
            os._exit(0)  # as torch's own handler where the parent asks: other codes are told as errors

    def begin(self) -> None:
        self._ends.value = False
        atexit.register(self.end)  # which Python runs before multiprocessing's: that one waits for workers

    def end(self) -> None:
        """From now on SIGTERM ends workers."""
        self._ends.value = True
        atexit.unregister(self.end)


def sheltered(loader: Any) -> Callable[[], None]:
    """Shelter the workers that `loader` starts from now on, if it has any. Gives what is to be called before it is dropped."""
    if not (isinstance(loader, DataLoader) and loader.num_workers):
        return lambda: None
    shelter = loader.worker_init_fn
    if not isinstance(shelter, Shelter):
        loader.worker_init_fn = shelter = Shelter(shelter)
    shelter.begin()
    return shelter.end
