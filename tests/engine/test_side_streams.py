"""A side stream after an error on it, and under a caller that computes on several streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accordion.engine.streams import SideStream, Transfer
from accordion.safety.divergence import DivergenceMonitor


class Stream:
    """Remembers what was begun on it, and all that it waits for."""

    def __init__(self, name: str) -> None:
        self.name, self.begun, self.waits_for = name, 0, set[tuple[str, int]]()

    def record_event(self, event: object = None) -> tuple[str, int]:
        self.events = [*getattr(self, "events", ()), event]
        return self.name, self.begun

    def wait_event(self, event: tuple[str, int]) -> None:
        self.waits_for.add(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


@pytest.fixture
def device() -> SimpleNamespace:
    """A device module whose current stream is `now`, and a side stream on it."""
    module = SimpleNamespace(now=Stream("compute"))

    @contextlib.contextmanager
    def stream(other: Stream) -> Iterator[None]:
        module.now, before = other, module.now
        try:
            yield
        finally:
            module.now = before

    module.stream, module.current_stream = stream, lambda _: module.now
    side_stream = SideStream(torch.device("cpu"), DivergenceMonitor([], [0]))
    side_stream._module, side_stream.stream, side_stream.sleeps = module, Stream("side"), True
    module.side_stream = side_stream
    return module


def launch(device: SimpleNamespace, error: type[BaseException] | None = None) -> Transfer:
    def steps() -> Any:
        device.now.begun += 1  # a kernel
        if error is not None:
            raise error
        yield from ()

    return device.side_stream.start(steps(), [torch.zeros(1)], "does something")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_what_raises_on_a_side_stream_leaves_the_compute_stream_waiting_for_what_was_begun(device, error) -> None:
    """Its buffers are dropped by the unwinding, and the next tensor takes their memory."""
    compute = device.now
    with pytest.raises(error):
        launch(device, error)
    assert device.now is compute
    assert ("side", 1) in compute.waits_for


def test_the_stream_whose_memory_a_transfer_holds_waits_for_its_end_wherever_it_lands(device) -> None:
    compute, other = device.now, Stream("other")
    transfer = launch(device)
    device.now = other
    transfer.land()
    assert ("side", 1) in compute.waits_for & other.waits_for


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
    stream = Stream("side")
    module = SimpleNamespace(Stream=lambda *_, **__: stream, Event=kind)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    side_stream = SideStream(torch.device("cuda"), DivergenceMonitor([], [0]))
    (side_stream.for_threads() if blocking else side_stream).record()
    assert [getattr(event, "blocking", None) for event in stream.events] == [
        True if blocking and kind is Event else None
    ]


def test_a_copy_waits_for_what_makes_its_source_and_for_nothing_that_compute_was_given_since(device) -> None:
    reduce = launch(device)
    reduce.land()
    device.now.begun += 1  # the backward goes on
    store = SideStream(torch.device("cpu"), DivergenceMonitor([], [0]))
    store._module, store.stream, store.sleeps = device, Stream("store"), True
    store.copy(lambda: None, [torch.zeros(1)], "copies", reduce)
    assert store.stream.waits_for == {("side", 1)}
    store.copy(lambda: None, [torch.zeros(1)], "copies what compute has cast")
    assert ("compute", 1) in store.stream.waits_for
