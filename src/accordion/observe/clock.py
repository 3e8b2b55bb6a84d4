"""Clocks of a recording: `HostClock` marks moments of the host, `DeviceClock` records events on streams and reads them later."""

from __future__ import annotations

import time
from typing import Any

import torch

Mark = Any
"""A moment: an int (nanoseconds of `time.perf_counter_ns`), or an event on a device stream. `us` of both clocks takes ints."""


class HostClock:
    """A clock whose marks are moments of the host, as ints. Its time 0 is its creation."""

    def __init__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def mark(self, stream: Any = None) -> Mark:
        """Return the present moment of the host; `stream` is ignored. `DeviceClock` returns a new event on `stream`, or on the
        current stream if that is None."""
        return time.perf_counter_ns()

    def settle(self) -> None:
        """Do nothing. In `DeviceClock`: wait on the host until the device has reached all marks. Call this before `us`."""

    def us(self, mark: Mark) -> float:
        """Return the microseconds from the creation of the clock to `mark`."""
        return (mark - self._start_ns) / 1e3  # type: ignore[no-any-return]


class DeviceClock(HostClock):
    """A clock whose marks are events on streams of `device`. The constructor waits for the device; `mark` does not."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device
        self._module.synchronize(device)
        # The device is idle, so that both clocks start at the same moment.
        self._start = self.mark()
        super().__init__()

    def mark(self, stream: Any = None) -> Mark:
        event = torch.Event(self._device, enable_timing=True)
        event.record(stream if stream is not None else self._module.current_stream(self._device))
        return event

    def settle(self) -> None:
        self._module.synchronize(self._device)

    def us(self, mark: Mark) -> float:
        # Marks of other threads are ints.
        return super().us(mark) if isinstance(mark, int) else self._start.elapsed_time(mark) * 1e3
