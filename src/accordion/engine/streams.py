"""Side streams: what runs on them, in which order against the compute stream, and what must live until then."""

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
"""A communication cut at its waits: it yields the works that must be done before it goes on."""

PAUSE_S = 5e-4  # between two polls of an event by a thread, which writes megabytes then


class Waiter(Protocol):
    """How a rank waits for others, and what it does if they do not come: `safety/divergence.py`.

    `broken`: why no collective is safe any more, None while all are.
    """

    broken: str | None

    def check(self) -> None:
        """Raise `DivergenceError` if collectives are not safe any more."""

    def wait(self, pending: Pending, what: str) -> None:
        """Let the host wait for works; `what` this rank does, for messages."""

    def looks(self, device: torch.device) -> bool:
        """Whether tags of messages are compared now."""

    def same_everywhere(self, rows: Tensor, mine: Tensor, what: str) -> None:
        """Fail unless each row of `rows` (num_ranks, n) is `mine` (n,). `what` this rank does, for messages."""

    def tell(self, text: str) -> None:
        """Let those who wait for this rank know that it will not come, and why: `text` follows its number."""


class SideStream:
    """Owns one side stream; the collectives started on a side stream run in the order in which they were started.

    Memory rule, which makes `record_stream` needless: every buffer is allocated and freed by the thread that runs forward
    and backward, on the compute stream. A transfer waits for the event recorded after its buffers were allocated, and
    holds them until the compute stream waits for its end. Where a caller computes on several streams, the one on which a
    buffer was allocated waits for all that used it before it is freed. With `late`, to show waits that are missing, nothing
    arrives before it is waited for: the host starts a transfer when it lands, and a device stream sleeps first.
    """

    _event: Callable[[], Any] = staticmethod(lambda: None)  # an event to record; None: the device's own kind
    makes: Callable[..., Transfer]  # what `start` makes: a `Transfer`, or one that writes down what it does

    def __init__(self, device: torch.device, waiter: Waiter, late: bool = False) -> None:
        self._device, self.waiter, self.late = device, waiter, late
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.stream: Any = None if self._module is None else self._module.Stream(device, priority=-1)
        self.makes = Transfer
        self.sleeps = self._module is not None  # work runs on a stream, and the host goes on

    def for_threads(self) -> SideStream:
        """This side stream, for whose work threads wait: they give the processor away meanwhile, where the device can."""
        if self._module is not None:
            self._event = _torch.blocking_events(self._module)
        return self

    def compute(self) -> Any:
        """The stream on which the caller computes; None on a device whose work is done in the order of the calls."""
        return None if self._module is None else self._module.current_stream(self._device)

    def record(self) -> Any:
        """What has been begun on this side stream by now."""
        return None if self._module is None else self.stream.record_event(self._event())

    def wait(self, event: Any) -> None:
        """Let this side stream wait for what another one recorded."""
        if self._module is not None:
            self.stream.wait_event(event)

    def follow(self) -> Any:
        """Let this side stream wait for what was begun on the compute stream by now; gives that stream."""
        now = self.compute()
        if now is not None:
            self.stream.wait_event(now.record_event())
        return now

    def lead(self, event: Any) -> Any:
        """Let the compute stream wait for what this side stream recorded; gives that stream."""
        now = self.compute()
        if now is not None:
            now.wait_event(event)
        return now

    def settle(self) -> None:
        """Let the host wait for what was begun on the compute stream: for what is made once and read on any stream."""
        now = self.compute()
        if now is not None:
            now.synchronize()

    def join(self, streams: Iterable[Any], into: Any = None) -> None:
        """Let the stream `into`, or the caller's, wait for others on which the caller computed."""
        now = self.compute() if into is None else into
        for stream in streams:
            if stream != now:
                now.wait_stream(stream)

    def entered(self) -> AbstractContextManager[Any]:
        """What runs inside runs on this side stream; only where it sleeps."""
        return self._module.stream(self.stream)  # type: ignore[no-any-return]

    def copy(self, copies: Callable[[], None], held: list[Any], what: str, after: Transfer | None = None) -> Transfer:
        """Begin copies on this side stream; nothing is waited for. `after`: what makes the source, if only that must end."""

        def steps() -> Steps:
            copies()
            yield from ()

        return self.start(steps(), held, what, after)

    def start(self, steps: Steps, held: list[Any], what: str, after: Transfer | None = None) -> Transfer:
        """Begin `steps` on this side stream. `held`: every tensor that they read or write. `what`: of this rank, for messages.

        `after`: what these steps follow, in place of all that the compute stream has been given by now.
        """
        return self.makes(self, steps, held, what, after)


class Transfer:
    """A communication under way; owns its buffers until it has landed.

    `begun_on`: the compute stream on which they were allocated. `aside`: another one on which it has landed. `ended`: all of it
    has been begun, and no host needs to wait.
    """

    __slots__ = ("_end", "_held", "_pending", "_side_stream", "_steps", "_what", "aside", "begun_on", "ended")

    def __init__(
        self, side_stream: SideStream, steps: Steps, held: list[Any], what: str, after: Transfer | None = None
    ) -> None:
        self._side_stream, self._steps, self._held, self._what = side_stream, steps, held, what
        self._pending: Pending | None = None
        self.ended = False
        self._end: Any = None
        self.begun_on: Any = None
        self.aside: Any = None
        if not side_stream.sleeps:
            if not side_stream.late:
                self._run()
            return
        if after is None:
            self.begun_on = side_stream.follow()
        else:
            self.begun_on = side_stream.compute()
            after._finish()
            side_stream.wait(after._end)
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
            side_stream.lead(side_stream.record())  # what was begun may be at work on buffers that the caller drops now
            raise

    def _run(self) -> None:
        """Go on as long as nothing has to be waited for by the host; on a stream-ordered backend that is to the end."""
        if self._pending is not None:
            self._side_stream.waiter.wait(self._pending, self._what)
            self._pending = None
        for pending in self._steps:
            if pending.works:
                self._pending = pending
                return
        self.ended = True
        self._end = self._side_stream.record()  # not at landing: the side stream goes on with other transfers

    def land(self) -> None:
        """Wait for the end (the host only where the backend needs it), make the compute stream wait, let the buffers go."""
        self._finish()
        if self._end is not None:
            now = self._side_stream.lead(self._end)
            if now is not None and now != self.begun_on:
                self.lead(self.begun_on)
                self.aside = now
        self._held.clear()

    def abandon(self) -> None:
        """Give up the result. The host waits for nothing: device memory goes in stream order, gloo's with its works."""
        if self.ended:
            self.land()
        if self._pending is not None:
            _torch.abandon_works(self._pending.communicator.group, [*self._pending.works, *self._pending.sends])
        self._steps.close()  # it holds whoever made it, who holds this
        self._held.clear()

    def lead(self, stream: Any) -> None:
        """It has landed; let one more compute stream wait for its end."""
        if self._end is not None and stream is not None:
            stream.wait_event(self._end)

    def join(self, side_stream: SideStream) -> None:
        """Let another side stream wait for the end; the buffers stay until this transfer, or a later one there, has landed."""
        self._finish()
        side_stream.wait(self._end)

    def block(self) -> None:
        """Block a thread of a pool until the transfer has ended; no buffer is freed.

        Python joins such threads at exit, and a collective before the end may never end then: raises `RuntimeError`.
        """
        while self._end is not None and not self._end.query():
            if not threading.main_thread().is_alive():
                raise RuntimeError("the program ended before the device did")
            time.sleep(PAUSE_S)

    def synchronize(self) -> None:
        """Let the host wait for the end, and the buffers go: not before, since any thread may ask, on a stream of its own."""
        self._finish()
        if self._end is not None:
            self._end.synchronize()
        self.land()

    def _finish(self) -> None:
        while not self.ended:
            self._advance()
