"""Marks in time: of the host's clock on CPU, and on an accelerator device events, whose times are read after the last step."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

Mark = Any
"""A moment: an int, nanoseconds of `time.perf_counter_ns`, or an event on a stream. Each clock takes ints."""


class TraceClock(Protocol):
    def mark(self, stream: Any = None) -> Mark:
        """Return a mark of the present moment, on `stream` or on the current stream."""

    def settle(self) -> None:
        """Wait on the host until the device has reached all marks. Call it before `us`."""

    def us(self, mark: Mark) -> float:
        """Return the microseconds from the creation of the clock to `mark`."""


def clock_of(device: torch.device) -> TraceClock:
    return HostClock() if device.type == "cpu" else DeviceClock(device)


class HostClock:
    def __init__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def mark(self, stream: Any = None) -> Mark:
        return time.perf_counter_ns()

    def settle(self) -> None:
        pass

    def us(self, mark: Mark) -> float:
        return (mark - self._start_ns) / 1e3  # type: ignore[no-any-return]


class DeviceClock:
    """A clock of events on device streams. The constructor waits for the device; `mark` does not."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device
        self._module.synchronize(device)
        self._start, self._start_ns = (
            self.mark(),
            time.perf_counter_ns(),
        )  # the device is idle, so both are the same moment

    def mark(self, stream: Any = None) -> Mark:
        event = torch.Event(self._device, enable_timing=True)
        event.record(stream if stream is not None else self._module.current_stream(self._device))
        return event

    def settle(self) -> None:
        self._module.synchronize(self._device)

    def us(self, mark: Mark) -> float:
        if isinstance(mark, int):
            return (mark - self._start_ns) / 1e3
        return self._start.elapsed_time(mark) * 1e3  # type: ignore[no-any-return]
