"""The failure detector without sockets: reports of ranks, and their sentences."""

from __future__ import annotations

import faulthandler
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import accordion as acc
from accordion.errors import DivergenceError
from accordion.safety import divergence
from accordion.safety.liveness import wording
from accordion.safety.liveness.messages import HasEnded, Post, decoded, encoded
from accordion.safety.liveness.polling import once_after, poll
from tests.support import models
from tests.support.hubs import hub_of, hubs_of
from tests.support.processes import run_python
from tests.support.ranked import on_world

# -- waiting


def test_poll_returns_the_first_answer_or_none_in_time() -> None:
    answers, waits, pauses = [0, 0, 7], list[float](), list[float]()
    assert poll(lambda: answers.pop(0), 9.0, waits.append, pauses.append) == 7
    assert len(waits) == len(pauses) == 2
    assert pauses[1] == 2 * pauses[0]
    assert poll(lambda: None, 0.0) is None


def test_once_after_calls_once() -> None:
    calls: list[str] = []
    check = once_after(2.0, lambda: calls.append("slow"))
    for waited_s in (1.0, 3.0, 4.0):
        check(waited_s)
    assert calls == ["slow"]


# -- messages


def test_a_message_is_one_line() -> None:
    message = Post(rank=1, model="m", report={"what": "gathers\n\u00e9"})
    line = encoded(message)
    assert line.count(b"\n") == 1
    assert decoded(line.rstrip(b"\n")) == message
    assert decoded(b"Fatal Python error: Aborted") is None


def test_a_meeting_ends_when_all_have_joined_and_returns_reports_that_differ() -> None:
    hubs = hubs_of(3)
    for second in ("a", "b"):
        hubs[1].arrive("m", 3, "a", wakes=True)
        assert ["m" in hub.called for hub in hubs] == [True, False, True]
        hubs[0].arrive("m", 3, "a", wakes=True)
        assert "m" not in hubs[0].over
        hubs[2].arrive("m", 3, second, {"evaluates": True}, wakes=True)
        reports = [(0, "a", {}), (1, "a", {}), (2, "b", {"evaluates": True})]
        for hub in hubs:
            over = hub.over.pop("m", None)
            assert over is not None
            assert over.reports is None if second == "a" else [tuple(one) for one in over.reports or []] == reports
            assert "m" not in hub.called
            assert "m" not in hub.over


def test_cause_returns_the_first_error_and_a_secondary_one_only_without_it() -> None:
    hubs = hubs_of(4)
    hubs[2].say_ended("waited in vain", echo=True)
    hubs[2].say_ended("is not said twice")
    assert [hub.cause() for hub in hubs] == [(2, "waited in vain")] * 2 + [None, (2, "waited in vain")]
    hubs[1].post("m", {"failed": "failed: ValueError"})
    assert hubs[3].cause() == (1, "failed: ValueError")
    assert hubs[3].cause(model="another") == (2, "waited in vain")
    hubs[1].post("m", None)
    assert hubs[3].cause() == (2, "waited in vain")
    assert hubs[3].gone([0, 1]) is None
    assert hubs[3].gone([1, 2]) == (2, "waited in vain")


def test_a_closed_connection_is_an_end_unless_the_rank_reported_one() -> None:
    hubs = hubs_of(3)
    hubs[0].receive(HasEnded(rank=1, text="failed: ValueError"))
    for rank in (1, 2):
        hubs[0].receive(HasEnded(rank=rank, text=wording.SILENT_END, closed=True))
    assert hubs[0].lost == {1: "failed: ValueError", 2: wording.SILENT_END}


def test_ranks_report_their_positions() -> None:
    hubs = hubs_of(3)
    hubs[1].position.phase, hubs[2].position.doing = "in the forward of step 2", "gathers unit 1"
    where = hubs[2].where([0, 1, 2])
    assert where[1].startswith("is in the model in the forward of step 2 at hubs.py:")
    assert where[0].startswith("is outside of the model")
    assert hubs[0].where([2])[2].startswith("gathers unit 1")


def test_ranks_that_do_not_answer_are_named() -> None:
    silent = "there is no answer from rank {}, whose process has not started, is stopped, or hangs"
    first, last = hub_of(0, 4), hub_of(3, 4)
    first.receive(HasEnded(rank=1, text=wording.LOST_END.format(12)))
    first.receive(HasEnded(rank=7, text="is of another model"))
    lost = "rank 1 has not answered for 12 s: its machine, or the network to it, is gone"
    assert first.others([0, 1, 2, 3]) == f"{lost}; {silent.format('2, 3')}"
    assert last.others([0, 1, 2, 3]) == silent.format(0), "all answers come through it"
    assert last.others([0, 1, 2, 3], silent_too=False) == ""


def test_ranks_that_step_differently_raise_at_the_same_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are compared in quiet meetings, which end with a message only if reports differ: of the first 8 backwards, and then
    of every 8th."""
    monkeypatch.setattr(divergence, "POSTS_S", 0.0)
    for begins, raises in ((2, 2), (8, 8), (9, 16), (17, 24)):
        hubs = hubs_of(3)
        monitors = [divergence.DivergenceMonitor([], range(3), hub) for hub in hubs]
        for num in range(1, raises + divergence.NOTICED_STEPS):
            for rank in (2, 1, 0) if num % 2 else (0, 1, 2):
                monitors[rank].send_steps(num, num + (num >= begins and rank == 2))
        for monitor in monitors:
            with pytest.raises(DivergenceError, match="begins a backward"):
                monitor.send_steps(raises + divergence.NOTICED_STEPS, 0)


def test_our_own_error_is_secondary_if_it_names_another_rank() -> None:
    error = DivergenceError("rank 1 has ended")
    assert not wording.is_echo(error)
    error.of_rank = 1
    assert wording.is_echo(error)
    assert not wording.is_backends_echo(error)


def test_the_position_of_a_rank_that_prints_its_error_is_that_of_the_error(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        "import functools, sys\n"
        "from accordion.safety.liveness.hub import Position\n"
        "sys.excepthook = functools.partial(print, Position())\n"
        "raise ValueError('late')\n"
    )
    assert "is outside of the model at loop.py:4 `raise ValueError" in run_python(script).stdout


@pytest.mark.cpu("devices have threads of their own")
@on_world(2)
def test_shard_starts_one_thread_and_leaves_hooks_alone(mesh: Any) -> None:
    before = sys.excepthook, faulthandler.is_enabled(), signal.getsignal(signal.SIGTERM)
    threads = set(threading.enumerate())
    acc.shard(models.plain(), mesh=mesh)
    assert before == (sys.excepthook, faulthandler.is_enabled(), signal.getsignal(signal.SIGTERM))
    assert {thread.name for thread in set(threading.enumerate()) - threads} <= {"accordion-hub"}


# -- how it is worded


def test_a_handled_error_is_reported_with_its_place() -> None:
    try:
        raise ValueError("bad sample\nand more")
    except ValueError as error:
        text = wording.while_handling(error)
    assert text.startswith(" while it handles ValueError: bad sample (at test_liveness.py:")
    assert [wording.while_handling(each) for each in (None, SystemExit(1), StopIteration())] == [""] * 3


WORDS = """Fatal Python error: Aborted

{first} 0x01 (most recent call first):
  File "/usr/lib/python3/site-packages/torch/x.py", line 3 in wait
  File "/job/train.py", line 7 in run

Thread 0x02 (most recent call first):
  File "/job/train.py", line 321 in <module>"""


@pytest.mark.parametrize(("first", "line"), [("Thread", 321), ("Current thread", 7)])
def test_a_crash_is_reported_with_the_line_of_the_crashed_or_the_main_thread(
    monkeypatch: pytest.MonkeyPatch, first: str, line: int
) -> None:
    monkeypatch.setattr(wording, "OWN_FOLDERS", ("/usr/lib/python3/site-packages/torch/",))
    text = wording.end_of(WORDS.format(first=first).splitlines())
    assert text.startswith(f"has crashed (Aborted) at train.py:{line}; gloo can crash if")
    assert wording.end_of([]) == wording.end_of(["stray"]) == wording.SILENT_END


def failed_wait_while_handling(handled: BaseException, waits: int) -> BaseException:
    """Return the error that follows `handled` if `waits` nested handlers each wait for others and time out."""
    try:
        try:
            if waits == 1:
                raise handled
            raise failed_wait_while_handling(handled, waits - 1)
        finally:
            raise RuntimeError("gloo: Timed out waiting")
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("handled", "says"),
    [(ValueError("bad sample"), " while it handles ValueError: bad sample"), (RuntimeError("gloo: Broken pipe"), "")],
)
@pytest.mark.parametrize("waits", [1, 2])
def test_a_wait_that_fails_in_handlers_reports_the_handled_error_and_no_other_wait(
    waits: int, handled: Exception, says: str
) -> None:
    text = wording.failure(failed_wait_while_handling(handled, waits), "after the backward of step 2")
    place = r" \(at test_liveness.py:\d+ `.*`\)" if says else ""
    where = r"at test_liveness.py:\d+ `.*`"
    assert re.fullmatch(
        f"waited for others in vain {where} after the backward of step 2{re.escape(says)}{place}", text
    ), text


def test_a_wait_that_fails_after_an_interrupt_reports_the_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    for waits in (1, 2):
        text = wording.failure(failed_wait_while_handling(KeyboardInterrupt(), waits), "in the forward of step 2")
        assert text == "was interrupted (Ctrl-C or SIGINT) in the forward of step 2"
        hubs = hubs_of(2)
        hubs[1].explain(failed_wait_while_handling(KeyboardInterrupt(), waits))
        assert capsys.readouterr().err == ""
        assert hubs[0].cause() == (1, "was interrupted (Ctrl-C or SIGINT)"), "it ends of itself, not because of others"
    gone = failed_wait_while_handling(RuntimeError("gloo: Broken pipe"), 2)
    gone.__context__ = RuntimeError("gloo: Broken pipe")
    gone.__context__.__context__ = gone.__context__
    assert " while it handles " not in wording.failure(gone)
