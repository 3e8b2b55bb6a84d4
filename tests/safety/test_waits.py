"""Waits for collectives end, with an error that names the cause."""

from __future__ import annotations

import contextlib
import logging
from unittest import mock

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

TIMED_OUT = "Operation timed out!"


@pytest.mark.parametrize(
    ("communicator", "outcomes"),
    [
        (GlooCommunicator, [TIMED_OUT, None]),
        (GlooCommunicator, [TIMED_OUT, "Connection closed by peer"]),
        (Communicator, ["MPI_ERR_OTHER: known error"]),
    ],
)
def test_a_failure_of_a_work_is_named_and_a_work_may_end_during_a_timeout(
    communicator: type[Communicator], outcomes: list[str | None]
) -> None:
    """`outcomes`: of each wait for the work, the text of its error."""
    work, failure = mock.Mock(), outcomes[-1]
    work.wait.side_effect = [text and RuntimeError(text) for text in outcomes]
    pending = Pending(communicator(None, torch.device("cpu")), [work])
    error = pytest.raises(DivergenceError, match=f"while this rank gathers unit 1: {failure}")
    with error if failure else contextlib.nullcontext():
        DivergenceMonitor([], [0]).wait(pending, "gathers unit 1")
    assert work.wait.call_count == len(outcomes)


def test_only_works_of_gloo_are_waited_for_with_a_timeout() -> None:
    """A wait with a timeout aborts works of torch's nccl2, NCCL or MPI."""
    work = mock.Mock()
    DivergenceMonitor([], [0]).wait(Pending(Communicator(None, torch.device("cpu")), [work], [work]), "gathers unit 1")
    assert work.wait.call_args_list == [mock.call()] * 2  # as a work, and as a send


@pytest.mark.parametrize("cannot_ask", [False, True])
def test_a_wait_for_a_rank_that_sends_nothing_names_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cannot_ask: bool
) -> None:
    """One rank evaluates, and the other waits at a barrier that the engine does not see."""
    for name, value in {"REPORT_AFTER_S": 1e-3, "POLL_S": 1e-3, "LOST_S": 1.0, "SILENT_POLLS": 3}.items():
        monkeypatch.setattr(divergence, name, value)
    alone_here = DivergenceMonitor([], [0, 1], hub_of(0, 2))
    alone_here.cannot_ask = cannot_ask
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(DivergenceError, match=r"ranks have made no progress for 1 s"),
    ):
        alone_here.meet({"what": "begins a forward"})
    hint = f" {divergence.CANNOT_ASK}" if cannot_ask else ""
    silent = "there is no answer from rank 1, whose process has not started, is stopped, or hangs"
    text = f"rank 0 begins a forward, and {silent}; all ranks must call the model."
    assert caplog.messages == [text + hint]


def test_the_text_of_a_device_assert_is_shorter_than_cudas_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's kernel refuses a text of 255 bytes at its launch, even if the condition is true."""
    texts: list[bytes] = []
    monkeypatch.setattr(torch, "_assert_async", lambda condition, text: texts.append(text.encode()))
    for name in ("blocks.1", "base_model.model." + "layers." * 40, "\u00e9" * 300):
        _torch.assert_on_device(torch.tensor(True), f"ranks are in different units: this rank gathers unit 1 ({name})")
    assert [len(text) < 255 for text in texts] == [True] * 3
    assert texts[0].endswith(b"(blocks.1)")


def test_a_forward_after_the_process_group_was_destroyed_raises() -> None:
    monitor = DivergenceMonitor([], [0])
    monitor.check()
    monitor.listens = True
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match="was called after dist"):
        monitor.check()
