"""What a wait for a collective takes for its end."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from accordion import _torch
from accordion.engine.communicator import Pending, alone
from accordion.engine.gloo import GlooCommunicator
from accordion.errors import DivergenceError, UsageError
from accordion.safety import divergence, party_line
from accordion.safety.divergence import DivergenceMonitor


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
    DivergenceMonitor([], [0]).wait(Pending(alone(torch.device("cpu")), [work], [work]), "gathers unit 1")
    assert work.timeouts == []


def test_a_failure_of_a_work_of_another_backend_is_named() -> None:
    pending = Pending(alone(torch.device("cpu")), [EndsItself("MPI_ERR_OTHER: known error")])
    with pytest.raises(DivergenceError, match="while this rank gathers unit 1: MPI_ERR_OTHER"):
        DivergenceMonitor([], [0]).wait(pending, "gathers unit 1")


@pytest.mark.parametrize("asks_in_vain", [False, True])
def test_who_waits_for_a_rank_that_says_nothing_names_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asks_in_vain: bool
) -> None:
    """One rank evaluates, the other waits at a barrier of its own: nothing that the engine could see there."""
    for name, seconds in {"PATIENCE_S": 1e-3, "POLL_S": 1e-3, "LOST_S": 1.0}.items():
        monkeypatch.setattr(divergence, name, seconds)
    alone_here = DivergenceMonitor([], [0, 1])
    alone_here._store, alone_here.asks_in_vain = HashStore(), asks_in_vain
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(DivergenceError, match=r"ranks have come to nothing new in 1 s"),
    ):
        alone_here.meet({"what": "begins a forward"})
    hint = f" {divergence.UNHEARD}" if asks_in_vain else ""
    assert caplog.messages == ["rank 0 begins a forward, nothing is heard of rank 1: all must call the model." + hint]


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


# -- what ranks say of one another


def test_files_of_torch_are_known_as_such_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "torch")
    for name in ("torch", "link"):
        assert f"{tmp_path}/{name}/" in party_line.spellings(f"{tmp_path}/link/__init__.py")


def test_an_error_that_is_handled_is_told_with_its_place() -> None:
    try:
        raise ValueError("bad sample\nand more")
    except ValueError as error:
        told = party_line.in_hand(error)
    assert told.startswith(" while it handles ValueError: bad sample (at test_waits.py:")
    assert [party_line.in_hand(each) for each in (None, SystemExit(1), StopIteration())] == [""] * 3


WORDS = """Fatal Python error: Aborted

{first} 0x01 (most recent call first):
  File "/usr/lib/python3/site-packages/torch/x.py", line 3 in wait
  File "/job/train.py", line 7 in run

Thread 0x02 (most recent call first):
  File "/job/train.py", line 321 in <module>"""


@pytest.mark.parametrize(("first", "line"), [("Thread", 321), ("Current thread", 7)])
def test_a_crash_is_told_by_the_thread_that_crashed_or_the_main_one(
    monkeypatch: pytest.MonkeyPatch, first: str, line: int
) -> None:
    monkeypatch.setattr(party_line, "OWN_FOLDERS", ("/usr/lib/python3/site-packages/torch/",))
    told = party_line.crash_of(WORDS.format(first=first).splitlines())
    assert told.startswith(f"(Aborted) at train.py:{line}; gloo lets a process crash")
    assert party_line.crash_of([]) == party_line.crash_of(["stray"]) == ""


def waited_behind(handled: BaseException, waits: int) -> BaseException:
    """What comes of `handled` where so many handlers around it wait in vain."""
    try:
        try:
            if waits == 1:
                raise handled
            raise waited_behind(handled, waits - 1)
        finally:
            raise RuntimeError("gloo: Timed out waiting")
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("handled", "says"),
    [(ValueError("bad sample"), " while it handles ValueError: bad sample"), (RuntimeError("gloo: Broken pipe"), "")],
)
@pytest.mark.parametrize("waits", [1, 2])
def test_who_waits_in_vain_while_it_handles_an_error_tells_of_that_and_of_no_other_wait(
    waits: int, handled: Exception, says: str
) -> None:
    text = party_line.told(waited_behind(handled, waits), "after the backward of step 2")
    place = r" \(at test_waits.py:\d+ `.*`\)" if says else ""
    where = r"at test_waits.py:\d+ `.*`"
    assert re.fullmatch(
        f"waited for others in vain {where} after the backward of step 2{re.escape(says)}{place}", text
    ), text


def test_who_waits_in_vain_because_it_was_interrupted_tells_of_that() -> None:
    for waits in (1, 2):
        text = party_line.told(waited_behind(KeyboardInterrupt(), waits), "in the forward of step 2")
        assert text == "was interrupted (Ctrl-C or SIGINT) in the forward of step 2"
        line, ended = SimpleNamespace(phase=""), list[tuple[str, bool]]()
        line.say_ended = lambda text, echo, ended=ended: ended.append((text, echo))
        assert party_line.explain(line, waited_behind(KeyboardInterrupt(), waits)) == ""  # type: ignore[arg-type]
        assert ended == [("was interrupted (Ctrl-C or SIGINT)", False)], "it ends of itself, and not because of others"
    gone = waited_behind(RuntimeError("gloo: Broken pipe"), 2)
    gone.__context__ = RuntimeError("gloo: Broken pipe")
    gone.__context__.__context__ = gone.__context__
    assert " while it handles " not in party_line.told(gone)


def test_who_has_ended_is_told_with_how_and_is_not_among_the_silent():
    line = SimpleNamespace(
        where=lambda ranks: {2: "waits"},
        ended={1: f"has not answered for 12 s: {party_line.LOST_END}", 7: "is of another model"},
        _ends=SimpleNamespace(rank=0),
    )
    assert party_line.PartyLine.told_of(line, [0, 1, 2, 3]) == (  # type: ignore[arg-type]
        "rank 1 has not answered for 12 s: its machine, or the network to it, is gone; rank 2 waits; "
        "nothing is heard of rank 3, whose process has not begun, is stopped, or hangs"
    )
