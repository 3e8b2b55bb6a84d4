"""A run folder has one job at a time: others are refused by name, and what a dead job left keeps nobody out."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from accordion.errors import UsageError
from accordion.train import owner
from accordion.train.launch import RankPlace, first_of_all
from accordion.train.owner import FILE, Claim, check_free, job_of

HOLDS = """
import sys, time
from pathlib import Path
from accordion.train.owner import Claim
claim = Claim({"run.dir": Path(sys.argv[1])}, sys.argv[2] or None, 0, print)
print("holds", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PATIENCE_S": 0.3, "BEAT_S": 0.1, "SILENCE_S": 0.6, "SETTLE_S": 0.1, "LOOK_S": 0.02}.items():
        monkeypatch.setattr(owner, name, value)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts another process that holds `tmp_path`."""
    started: list[subprocess.Popen[str]] = []

    def start(job: str = "") -> subprocess.Popen[str]:
        words = [sys.executable, "-c", HOLDS, str(tmp_path), job]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "holds\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def claimed(folder: Path, job: str | None = None, wait_s: float = 0.0, say: Callable[[str], None] = print) -> Claim:
    return Claim({"run.dir": folder}, job, wait_s, say)


def written(folder: Path, **changes: Any) -> None:
    """What an owner on another host left, written over what was there as an owner does: no reader finds the file empty."""
    said = {"host": "far", "pid": 7, "since": "2026-01-01 00:00:00 UTC", "job": None, "word": "w", "beats": 3}
    with open(os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
        file.truncate(file.write(json.dumps({**said, **changes}).encode()))


def test_a_second_job_is_told_who_has_the_folder(tmp_path: Path, other: Callable[..., subprocess.Popen[str]]) -> None:
    holder = other()
    since = json.loads((tmp_path / FILE).read_text())["since"]
    expected = (
        f"run.dir '{tmp_path}' is in use by another job: process {holder.pid} on {os.uname().nodename}, since {since};"
    )
    before = sorted(os.listdir(tmp_path))
    for ask in (claimed, lambda folder: check_free({"run.dir": folder}, None)):
        with pytest.raises(UsageError) as refused:
            ask(tmp_path)
        assert str(refused.value).startswith(expected)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_kill_leaves_no_lock(tmp_path: Path, other: Callable[..., subprocess.Popen[str]]) -> None:
    holder = other()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / FILE).exists()
    check_free({"run.dir": tmp_path}, None)
    claim = claimed(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    claim.release()
    assert not list(tmp_path.iterdir())


def test_a_restart_waits_for_the_earlier_start_of_its_job(
    tmp_path: Path, other: Callable[..., subprocess.Popen[str]]
) -> None:
    holder, said = other("torchrun 5"), list[str]()
    check_free({"run.dir": tmp_path}, "torchrun 5")
    with pytest.raises(UsageError, match="in use"):
        check_free({"run.dir": tmp_path}, "torchrun 6")
    with pytest.raises(UsageError, match="in use"):
        claimed(tmp_path, "torchrun 5", wait_s=0.6, say=said.append)
    assert said == [line for line in said if f"process {holder.pid} on" in line]
    assert len(said) == 1
    holder.kill()
    claimed(tmp_path, "torchrun 5", wait_s=60).release()


def test_the_checkpoints_of_a_run_are_claimed_too(tmp_path: Path) -> None:
    for name in ("a", "b", "kept"):
        (tmp_path / name).mkdir()
    first = Claim({"run.dir": tmp_path / "a", "checkpoint.dir": tmp_path / "kept"}, None, 0, print)
    with pytest.raises(UsageError, match=r"checkpoint\.dir .*kept' is in use by another job"):
        Claim({"run.dir": tmp_path / "b", "checkpoint.dir": tmp_path / "kept"}, None, 0, print)
    assert not list((tmp_path / "b").iterdir())
    first.release()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    both = Claim({"run.dir": tmp_path / "a", "checkpoint.dir": tmp_path / "link"}, None, 0, print)  # one folder
    both.release()


def test_one_of_many_at_once_gets_it(tmp_path: Path) -> None:
    """However a clean end, which removes the file, falls together with another job's start."""
    context = multiprocessing.get_context("fork")
    held, most = context.Value("i", 0), context.Value("i", 0)

    def work() -> None:
        got = 0
        while got < 25:
            try:
                claim = claimed(tmp_path)
            except UsageError:
                continue
            with held.get_lock():
                held.value += 1
                most.value = max(most.value, held.value)
            time.sleep(0.001)
            with held.get_lock():
                held.value -= 1
            claim.release()
            got += 1

    workers = [context.Process(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert most.value == 1
    assert not list(tmp_path.iterdir())


def test_a_file_that_its_owner_removed_before_it_was_locked_is_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clean end falls between the opening and the locking: the lock is one of a file that nobody else sees."""
    first, lock = claimed(tmp_path), fcntl.flock

    def late(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.release()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    second = claimed(tmp_path)
    assert (tmp_path / FILE).exists()
    with pytest.raises(UsageError, match="in use"):
        claimed(tmp_path)
    second.release()
    assert not list(tmp_path.iterdir())


def test_an_end_leaves_the_file_of_who_took_the_folder_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "BEAT_S", 600.0)  # the first one ends before it looks
    first = claimed(tmp_path)
    (tmp_path / FILE).unlink()
    second = claimed(tmp_path)
    first.release()
    assert (tmp_path / FILE).exists()
    with pytest.raises(UsageError, match="in use"):
        claimed(tmp_path)
    second.release()
    assert not list(tmp_path.iterdir())


class TestWithoutLocks:
    """On a file system that refuses locks the owner's signs of life tell."""

    @pytest.fixture(autouse=True, params=[errno.ENOLCK, errno.EOPNOTSUPP])
    def no_locks(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(handle: int, how: int) -> None:
            raise OSError(request.param, os.strerror(request.param))

        monkeypatch.setattr(fcntl, "flock", refuse)

    def test_a_living_owner_is_seen(self, tmp_path: Path) -> None:
        said: list[str] = []
        first = claimed(tmp_path, say=said.append)
        assert [line for line in said if "has no locks: signs of life" in line] == said
        assert len(said) == 1
        check_free({"run.dir": tmp_path}, None)  # leaves it to those who take it
        with pytest.raises(UsageError, match=f"in use by another job: process {os.getpid()} on"):
            claimed(tmp_path)
        first.release()
        claimed(tmp_path).release()

    def test_a_dead_owner_is_followed(self, tmp_path: Path) -> None:
        written(tmp_path)
        claim = claimed(tmp_path)
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
        claim.release()

    def test_of_two_that_begin_at_once_one_gets_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each finds the file empty and writes its name into it: the last one has it."""
        both, write = threading.Barrier(2, timeout=60), Claim._write

        def together(claim: Claim, handle: int) -> None:
            begins = not claim._beats
            if begins:
                both.wait()
            write(claim, handle)
            if begins:
                both.wait()

        monkeypatch.setattr(Claim, "_write", together)
        monkeypatch.setattr(owner, "SILENCE_S", 10.0)
        with ThreadPoolExecutor(2) as threads:
            begun = [threads.submit(claimed, tmp_path) for _ in range(2)]
        (refused,) = (error for one in begun if (error := one.exception()))
        assert isinstance(refused, UsageError)
        assert "in use by another job" in str(refused)
        (got,) = (one.result() for one in begun if not one.exception())
        got.release()
        assert not list(tmp_path.iterdir())


@contextmanager
def signs_of_life(folder: Path, write: Callable[[int], None]) -> Iterator[None]:
    """Another host's owner, which a lock of this host does not keep out."""
    write(3)
    done = threading.Event()

    def beats() -> None:
        count = 3
        while not done.wait(0.05):
            count += 1
            write(count)

    thread = threading.Thread(target=beats)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_lock_that_other_hosts_do_not_see_is_not_believed(tmp_path: Path) -> None:
    """A file system that locks within a host alone: the owner on another host still gives signs of life."""
    with (
        signs_of_life(tmp_path, lambda count: written(tmp_path, beats=count)),
        pytest.raises(UsageError, match=r"in use by another job: process 7 on far, since 2026-01-01 00:00:00 UTC"),
    ):
        claimed(tmp_path)
    claimed(tmp_path).release()


def test_a_sign_of_life_that_is_read_before_its_end_counts(tmp_path: Path) -> None:
    """What names nobody is watched as well: it may be half of what an owner writes now, or what a lost one left."""

    path = tmp_path / FILE
    path.touch()

    def half(count: int) -> None:
        with path.open("r+b", buffering=0) as file:
            file.write(f'{{"host": "far", "pid": 7, "beats": {count:04}'.encode())

    with (
        signs_of_life(tmp_path, half),
        pytest.raises(UsageError, match="in use by another job: a process that has yet to say its name"),
    ):
        claimed(tmp_path)
    claimed(tmp_path).release()


def test_a_folder_that_was_removed_is_claimed_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    claim = claimed(folder)
    (folder / FILE).unlink()
    folder.rmdir()
    time.sleep(0.3)
    assert not folder.exists()
    folder.mkdir()  # as a save does
    until = time.monotonic() + 10
    while not (folder / FILE).exists() and time.monotonic() < until:
        time.sleep(0.05)
    with pytest.raises(UsageError, match="in use"):
        claimed(folder)
    claim.release()


def test_a_job_whose_folder_was_taken_ends(tmp_path: Path, other: Callable[..., subprocess.Popen[str]]) -> None:
    """The folder was removed under it, and a new job began there before it looked."""
    folder = tmp_path
    program = HOLDS.replace("claim =", "import accordion.train.owner as o; o.BEAT_S = 0.5; claim =")
    words = [sys.executable, "-c", program, str(folder), ""]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "holds\n"
            (folder / FILE).unlink()
            claim = claimed(folder)
            told = first.communicate(timeout=60)[1]
        finally:
            first.kill()
    assert first.returncode == 1
    assert told.startswith(
        f"accordion: stopped: run.dir '{folder}' was taken from this job while it ran; it is in use by"
    )
    assert told.count("\n") == 1
    claim.release()


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(UsageError, match="which says whose the folder is, cannot be opened: Is a directory"):
        claimed(tmp_path)


def test_what_a_launcher_calls_a_job() -> None:
    assert job_of({}) is None
    assert job_of({"TORCHELASTIC_RUN_ID": "none"}) is None
    assert job_of({"TORCHELASTIC_RUN_ID": "a"}) == "torchrun a"
    assert job_of({"SLURM_JOB_ID": "5"}) is None
    assert job_of({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}) == "srun 5.0"


def test_every_rank_hears_what_the_first_one_was_refused() -> None:
    store = HashStore()

    def refused() -> None:
        raise UsageError("it is in use")

    for rank in (0, 1, 2):
        place = RankPlace(rank=rank, world=3, local_rank=rank, local_world=3, starter="test", url="")
        with pytest.raises(UsageError, match="it is in use"):
            first_of_all(place, store, refused if rank == 0 else lambda: pytest.fail("the first rank alone"))
