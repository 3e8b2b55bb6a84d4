"""Side streams: device streams for communication and copies, their order with the compute stream, and their buffers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import Pending

Steps = Generator[Pending, None, None]
"""A communication as a generator of `Pending`s. The works of each must have ended before `next` resumes the generator."""

PAUSE_S = 5e-4  # poll interval of a thread that waits for an event


class Waiter(Protocol):
    """Protocol for waits of the host for other ranks, and for checks that these do the same; implemented in
    `safety/divergence.py`. `broken`: the reason why collectives are not safe any more, None while they are safe."""

    broken: str | None

    def check(self) -> None:
        """Raise `DivergenceError` if collectives are not safe any more."""

    def wait(self, pending: Pending, what: str) -> None:
        """Let the host wait for the works in `pending`. Raises `DivergenceError` if one fails. `what`: what this rank does."""

    def looks(self, device: torch.device) -> bool:
        """Return True if the caller should compare the tags (unit numbers) of a collective on `device` by `same_everywhere`."""

    def same_everywhere(self, rows: Tensor, expected: Tensor, what: str) -> None:
        """Raise `DivergenceError` unless each row of `rows` (num_ranks, n) equals `expected` (n,); an accelerator asserts it
        instead. Call this only if `looks` returns True. `what`: what this rank does."""

    def tell(self, text: str) -> None:
        """Report to the ranks that wait for this one that it has failed. `text`: how, to follow "rank R" in their errors."""


class SideStream:
    """A stream next to the compute stream, on which transfers run in the order in which they were started.

    `late` (`debug="streams"`) delays transfers, so that a missing wait shows as a wrong result: on CPU until the host waits for
    the result, on a device by a sleep on the side stream.
    """

    # Memory rule, in place of `record_stream`: the thread of forward and backward allocates and frees buffers on the compute
    # stream. A transfer begins after the work on the compute stream that allocated its buffers, and refers to them until the
    # compute stream waits for its end. If a caller computes on several streams, a buffer is freed after the stream that
    # allocated it has waited for all streams that used it.

    _event: Callable[[], Any] = staticmethod(lambda: None)  # returns an event to record; None: the device's default
    # The class that `start` instantiates: the planner's and the recorder's log their transfers.
    makes: Callable[[SideStream, Steps, list[Any], str], Transfer]

    def __init__(self, device: torch.device, waiter: Waiter, late: bool = False) -> None:
        self._device, self.waiter, self.late = device, waiter, late
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.stream: Any = None if self._module is None else self._module.Stream(device, priority=-1)
        self.makes = Transfer
        self.sleeps = self._module is not None  # True if there is a device stream, on which work runs asynchronously

    def for_threads(self) -> SideStream:
        """Let threads that wait for this stream's later events sleep instead of poll, if the device can; return `self`."""
        if self._module is not None:
            self._event = _torch.blocking_events(self._module)
        return self

    def compute(self) -> Any:
        """Return the caller's current compute stream; None on a device without streams."""
        return None if self._module is None else self._module.current_stream(self._device)

    def record(self) -> Any:
        """Return a new event after all work on this side stream so far; None on a device without streams."""
        return None if self._module is None else self.stream.record_event(self._event())

    def wait(self, event: Any) -> None:
        """Let this side stream wait for `event`, without a wait of the host."""
        if self._module is not None:
            self.stream.wait_event(event)

    def follow(self) -> Any:
        """Let this side stream wait for all work so far on the compute stream, and return that stream; None without streams."""
        stream = self.compute()
        if stream is not None:
            self.stream.wait_event(stream.record_event())
        return stream

    def lead(self, event: Any) -> Any:
        """Let the compute stream wait for `event`, and return the compute stream; None on a device without streams."""
        stream = self.compute()
        if stream is not None:
            stream.wait_event(event)
        return stream

    def settle(self) -> None:
        """Let the host wait for all work on the compute stream so far, whose results any stream may then read."""
        stream = self.compute()
        if stream is not None:
            stream.synchronize()

    def join(self, streams: Iterable[Any], into: Any = None) -> None:
        """Let the stream `into` (by default the compute stream) wait for all work on `streams`."""
        target = self.compute() if into is None else into
        for stream in streams:
            if stream != target:
                target.wait_stream(stream)

    def entered(self) -> AbstractContextManager[Any]:
        """Context manager that makes this side stream the current stream; only for devices with streams."""
        return self._module.stream(self.stream)  # type: ignore[no-any-return]

    def copy(
        self, copies: Callable[[], None], tensors: list[Any], what: str, after: Transfer | None = None
    ) -> Transfer:
        """Run `copies()`, which begins copies, on this side stream; return the transfer. Other arguments: as of `start`."""

        def steps() -> Steps:
            copies()
            yield from ()

        return self.start(steps(), tensors, what, after)

    def start(self, steps: Steps, tensors: list[Any], what: str, after: Transfer | None = None) -> Transfer:
        """Start `steps` on this side stream, after all work on the compute stream so far, and return their transfer.

        `tensors`: buffers kept alive until `Transfer.land`. `what`: what this rank does, for messages, such as "reduces unit 3
        (layers.3)". `after`: a transfer after which the steps run, instead of the work on the compute stream.
        """
        transfer = self.makes(self, steps, tensors, what)
        transfer.begin(after)
        return transfer


class Transfer:
    """A communication or copy on a side stream; keeps its buffers alive until `land`, `synchronize` or `abandon`.
    `SideStream.start` makes one. Steps after works for which the host must wait (gloo) run in `land`, `join` or `synchronize`.

    `begun_on`: the compute stream that allocated the buffers. `landed_on`: the compute stream that called `land`, if that is
    another one; else None. `ended`: True if all steps have been started, so that the host has nothing left to wait for.
    """

    __slots__ = ("_end", "_pending", "_side_stream", "_steps", "_tensors", "_what", "begun_on", "ended", "landed_on")

    def __init__(self, side_stream: SideStream, steps: Steps, tensors: list[Any], what: str) -> None:
        self._side_stream, self._steps, self._tensors, self._what = side_stream, steps, tensors, what
        self._pending: Pending | None = None
        self.ended = False
        self._end: Any = None
        self.begun_on: Any = None
        self.landed_on: Any = None

    def begin(self, after: Transfer | None = None) -> None:
        """Start the steps after all work on the compute stream so far, or after the transfer `after`; called once. On a
        device without streams they start at once, or, if `late`, when the host waits; `after` is ignored."""
        side_stream = self._side_stream
        if not side_stream.sleeps:
            if not side_stream.late:
                self._run()
            return
        if after is None:
            self.begun_on = side_stream.follow()
        else:
            self.begun_on = side_stream.compute()
            after.join(side_stream)
        if side_stream.late:
            with side_stream.entered():
                _torch.sleep_on_device()
        self._advance()

    def _advance(self) -> None:
        side_stream = self._side_stream
        if not side_stream.sleeps:
            self._run()
            return
        try:
            with side_stream.entered():
                self._run()
        except BaseException:
            # Work that has begun may still use buffers that the caller frees now.
            side_stream.lead(side_stream.record())
            raise

    def _run(self) -> None:
        """Wait for the works of the last step, then run steps until one yields works; set `ended` at the end."""
        if self._pending is not None:
            self._side_stream.waiter.wait(self._pending, self._what)
            self._pending = None
        for pending in self._steps:
            if pending.works:
                self._pending = pending
                return
        self.ended = True
        self._end = self._side_stream.record()  # recorded here and not in `land`: other transfers follow on the stream

    def land(self) -> None:
        """Let the compute stream wait for the end, and drop the buffers. The host waits only if the backend needs it (gloo)."""
        self._finish()
        if self._end is not None:
            stream = self._side_stream.lead(self._end)
            if stream is not None and stream != self.begun_on:
                self.lead(self.begun_on)
                self.landed_on = stream
        self._tensors.clear()

    def abandon(self) -> None:
        """Give up the result without a wait of the host, and drop the buffers; unfinished works of gloo keep them alive."""
        if self.ended:
            self.land()
        if self._pending is not None:
            _torch.abandon_works(self._pending.communicator.group, [*self._pending.works, *self._pending.sends])
        self._steps.close()  # breaks the reference cycle with the object that made the steps
        self._tensors.clear()

    def lead(self, stream: Any) -> None:
        """Let the compute stream `stream` wait for the end of this transfer too; called after `land`."""
        if self._end is not None and stream is not None:
            stream.wait_event(self._end)

    def join(self, side_stream: SideStream) -> None:
        """Let `side_stream` wait for the end; with gloo the host waits too. The caller keeps this transfer alive until a later
        transfer on `side_stream` has landed."""
        self._finish()
        side_stream.wait(self._end)

    def block(self) -> None:
        """Block a worker thread until the device has ended this transfer, a copy, whose steps the host need not run. Frees no
        buffer. Raises `RuntimeError` if the program ends."""
        # Python joins such threads at exit, and a collective before the end may never end then.
        while self._end is not None and not self._end.query():
            if not threading.main_thread().is_alive():
                raise RuntimeError("the program ended before the device did")
            time.sleep(PAUSE_S)

    def synchronize(self) -> None:
        """Let the host wait for the end, and then drop the buffers. Any thread may call this, on a stream of its own."""
        self._finish()
        if self._end is not None:
            self._end.synchronize()
        self.land()

    def _finish(self) -> None:
        while not self.ended:
            self._advance()
