"""A side stream after an error on it, and under a caller that computes on several streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from accordion.engine.streams import SideStream, Transfer
from accordion.safety.divergence import DivergenceMonitor
from tests.happens_before.checker import Checker, Stream
from tests.happens_before.stand_ins import DeviceModule


@pytest.fixture
def checker() -> Checker:
    return Checker()


def side_stream(checker: Checker, name: str) -> SideStream:
    stream = SideStream(torch.device("cpu"), DivergenceMonitor([], [0]))
    stream._module, stream.stream, stream.sleeps = DeviceModule(checker), Stream(checker, name), True
    return stream


def has_waited(stream: Stream, other: Stream) -> bool:
    """Return True if `stream` has waited for all that was begun on `other`."""
    return stream.clock.get(other.number, 0) == other.clock[other.number]


def launch(side: SideStream, checker: Checker, error: type[BaseException] | None = None) -> Transfer:
    def steps() -> Any:
        checker.current.tick()  # a kernel
        if error is not None:
            raise error
        yield from ()

    return side.start(steps(), [torch.zeros(1)], "does something")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_what_raises_on_a_side_stream_leaves_the_compute_stream_waiting_for_what_was_begun(checker, error) -> None:
    """Its buffers are dropped by the unwinding, and the next tensor takes their memory."""
    side = side_stream(checker, "side")
    with pytest.raises(error):
        launch(side, checker, error)
    assert checker.current is checker.compute
    assert has_waited(checker.compute, side.stream)


def test_the_stream_whose_memory_a_transfer_holds_waits_for_its_end_wherever_it_lands(checker) -> None:
    side, other = side_stream(checker, "side"), Stream(checker, "other")
    transfer = launch(side, checker)
    with checker.entered(other):
        transfer.land()
    assert has_waited(checker.compute, side.stream)
    assert has_waited(other, side.stream)


class Event:
    def __init__(self, *, blocking: bool = False) -> None:
        self.blocking = blocking


class OldEvent:
    """Of a device module that knows no other kind."""


@pytest.mark.parametrize("kind", [Event, OldEvent])
@pytest.mark.parametrize("blocking", [False, True])
def test_threads_that_wait_for_a_side_stream_do_not_spin_where_the_device_has_such_events(
    monkeypatch, kind, blocking
) -> None:
    stream = mock.Mock()
    module = SimpleNamespace(Stream=lambda *_, **__: stream, Event=kind)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    side_stream = SideStream(torch.device("cuda"), DivergenceMonitor([], [0]))
    (side_stream.for_threads() if blocking else side_stream).record()
    (event,) = stream.record_event.call_args.args or (None,)
    assert getattr(event, "blocking", None) == (True if blocking and kind is Event else None)


def test_a_copy_waits_for_what_makes_its_source_and_for_nothing_that_compute_was_given_since(checker) -> None:
    reduces, stores = side_stream(checker, "side"), side_stream(checker, "store")
    reduce = launch(reduces, checker)
    reduce.land()
    checker.compute.tick()  # the backward goes on
    stores.copy(lambda: None, [torch.zeros(1)], "copies", reduce)
    assert has_waited(stores.stream, reduces.stream)
    assert not has_waited(stores.stream, checker.compute)
    stores.copy(lambda: None, [torch.zeros(1)], "copies what compute has cast")
    assert has_waited(stores.stream, checker.compute)
