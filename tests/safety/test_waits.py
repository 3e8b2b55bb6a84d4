"""What a wait for a collective takes for its end."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

from accordion import _torch
from accordion.engine.communicator import Communicator, Pending
from accordion.engine.gloo import GlooCommunicator
from accordion.errors import DivergenceError, UsageError
from accordion.safety import divergence
from accordion.safety.divergence import DivergenceMonitor
from tests.support.hubs import hub_of


class EndsLate:
    """A work that has ended once a wait for it was given up, as any may between these two words of its backend."""

    def __init__(self, failure: str | None = None) -> None:
        self._failure = failure
        self.waits = 0

    def is_completed(self) -> bool:
        return self.waits > 0

    def wait(self, *timeout: object) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._failure is not None:
            raise RuntimeError(self._failure)


def waits_for(work: EndsLate) -> None:
    communicator = GlooCommunicator(None, torch.device("cpu"))
    DivergenceMonitor([], [0]).wait(Pending(communicator, [work]), "gathers unit 1")


def test_what_ends_while_a_wait_is_given_up_has_ended() -> None:
    work = EndsLate()
    waits_for(work)
    assert work.waits == 2


def test_what_fails_while_a_wait_is_given_up_has_failed() -> None:
    with pytest.raises(DivergenceError, match="while this rank gathers unit 1: Connection closed by peer"):
        waits_for(EndsLate("Connection closed by peer"))


class EndsItself:
    """A work of torch's nccl2, NCCL or MPI: to it a timeout is an order, after which it is over for good."""

    def __init__(self, failure: str | None = None) -> None:
        self.timeouts: list[object] = []
        self._failure = failure

    def is_completed(self) -> bool:
        return False

    def wait(self, *timeout: object) -> None:
        self.timeouts += timeout
        if timeout or self._failure is not None:
            raise RuntimeError(
                self._failure or "Watchdog caught collective operation timeout: NCCL operation timed out"
            )


def test_no_work_but_one_of_gloo_is_waited_for_with_a_timeout() -> None:
    work = EndsItself()
    DivergenceMonitor([], [0]).wait(Pending(Communicator(None, torch.device("cpu")), [work], [work]), "gathers unit 1")
    assert work.timeouts == []


def test_a_failure_of_a_work_of_another_backend_is_named() -> None:
    pending = Pending(Communicator(None, torch.device("cpu")), [EndsItself("MPI_ERR_OTHER: known error")])
    with pytest.raises(DivergenceError, match="while this rank gathers unit 1: MPI_ERR_OTHER"):
        DivergenceMonitor([], [0]).wait(pending, "gathers unit 1")


@pytest.mark.parametrize("cannot_ask", [False, True])
def test_who_waits_for_a_rank_that_says_nothing_names_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cannot_ask: bool
) -> None:
    """One rank evaluates, the other waits at a barrier of its own: nothing that the engine could see there."""
    for name, seconds in {"REPORT_AFTER_S": 1e-3, "POLL_S": 1e-3, "LOST_S": 1.0}.items():
        monkeypatch.setattr(divergence, name, seconds)
    alone_here = DivergenceMonitor([], [0, 1], hub_of(0, 2))
    alone_here.cannot_ask = cannot_ask
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(DivergenceError, match=r"ranks have made no progress for 1 s"),
    ):
        alone_here.meet({"what": "begins a forward"})
    hint = f" {divergence.CANNOT_ASK}" if cannot_ask else ""
    text = "rank 0 begins a forward, and there is no answer from rank 1; all ranks must call the model."
    assert caplog.messages == [text + hint]


def test_what_a_device_asserts_has_fewer_bytes_than_cuda_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's kernel refuses a text of 255 bytes when it is launched, whether the condition holds or not."""
    texts: list[bytes] = []
    monkeypatch.setattr(torch, "_assert_async", lambda condition, text: texts.append(text.encode()))
    for name in ("blocks.1", "base_model.model." + "layers." * 40, "\u00e9" * 300):
        _torch.assert_on_device(torch.tensor(True), f"ranks are in different units: this rank gathers unit 1 ({name})")
    assert [len(text) < 255 for text in texts] == [True] * 3
    assert texts[0].endswith(b"(blocks.1)")


def test_who_has_left_its_process_group_is_told_so_at_its_next_forward() -> None:
    monitor = DivergenceMonitor([], [0])
    monitor.check()
    monitor.listens = True
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match="was called after dist"):
        monitor.check()
