"""A run folder has one job at a time: others are refused with the owner's name, and files of a dead job block nobody."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import HashStore

from accordion.errors import UsageError
from accordion.train import owner
from accordion.train.launch import RankPlace, first_of_all
from accordion.train.owner import FILE, LEASE, Claim, check_free, job_of
from tests.e2e.jobs import until
from tests.support import forked


def holds(words: list[str]) -> None:
    """Own a folder as a job, with so many seconds between two refreshes."""
    folder, job, owner.REFRESH_S = Path(words[0]), words[1] or None, float(words[2])
    owner.EXPIRY_S = 0.6
    claim = Claim({"run.dir": folder}, job, 0, print)
    print("holds", flush=True)
    time.sleep(600)
    claim.release()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EXIT_S": 0.3, "REFRESH_S": 0.1, "EXPIRY_S": 0.6, "POLL_S": 0.02}.items():
        monkeypatch.setattr(owner, name, value)


Other = Callable[..., forked.Job]


@pytest.fixture
def other(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Other]:
    """Start another process that owns `tmp_path`."""
    with ExitStack() as stack:

        def start(job: str = "", err: Path | None = None, beat_s: float = 0.1) -> forked.Job:
            out = tmp_path_factory.mktemp("out") / "out"
            started = stack.enter_context(forked.Job(holds, [str(tmp_path), job, str(beat_s)], out, err))
            until(lambda: out.exists() and out.read_text() == "holds\n", "the folder")
            return started

        yield start


def claimed(folder: Path, job: str | None = None, wait_s: float = 0.0, say: Callable[[str], None] = print) -> Claim:
    return Claim({"run.dir": folder}, job, wait_s, say)


def far(folder: Path, *, beats: bool) -> threading.Event:
    """An owner on another host; `beats`: it refreshes its lease until the event is set."""
    ended, text = threading.Event(), "filelock/2\npid=7\nhost=far\nmode=lease\ntoken=t\nduration=0.6\n"
    (folder / LEASE).write_text(text)
    (folder / FILE).write_text('{"host": "far", "pid": 7, "since": "2026-01-01 00:00:00 UTC", "job": null}')

    def refresh() -> None:
        while not ended.wait(0.05):
            os.utime(folder / LEASE)

    if beats:
        threading.Thread(target=refresh, daemon=True).start()
    return ended


def test_a_second_job_is_refused_with_the_owners_name(tmp_path: Path, other: Other) -> None:
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


def test_a_kill_leaves_no_lock(tmp_path: Path, other: Other) -> None:
    holder = other()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / FILE).exists()
    check_free({"run.dir": tmp_path}, None)
    claim = claimed(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    claim.release()
    assert not list(tmp_path.iterdir())


def test_a_restart_waits_for_the_earlier_start_of_its_job(tmp_path: Path, other: Other) -> None:
    holder, said = other("torchrun 5"), list[str]()
    check_free({"run.dir": tmp_path}, "torchrun 5")
    with pytest.raises(UsageError, match="in use"):
        check_free({"run.dir": tmp_path}, "torchrun 6")
    with pytest.raises(UsageError, match="in use"):
        claimed(tmp_path, "torchrun 5", wait_s=0.6, say=said.append)
    assert said == [line for line in said if f"process {holder.pid} on" in line]
    assert len(said) == 1
    os.kill(holder.pid, signal.SIGKILL)
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


def test_one_of_many_concurrent_claims_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a clean end, which removes the file, coincides with the start of another job."""
    monkeypatch.setattr(owner, "EXPIRY_S", 20.0)  # none is silent for so long on a busy machine
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


def test_a_release_keeps_the_file_of_a_later_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "REFRESH_S", 0.5)  # the first one ends before it looks
    first = claimed(tmp_path)
    (tmp_path / LEASE).unlink()
    second = claimed(tmp_path, "another")
    first.release()
    assert (tmp_path / FILE).exists()
    with pytest.raises(UsageError, match="in use"):
        claimed(tmp_path)
    second.release()
    assert not list(tmp_path.iterdir())


def test_a_live_owner_on_another_host_keeps_the_folder(tmp_path: Path) -> None:
    ended = far(tmp_path, beats=True)
    for ask in (claimed, lambda folder: check_free({"run.dir": folder}, None)):
        with pytest.raises(UsageError, match=r"in use by another job: process 7 on far, since 2026-01-01 00:00:00 UTC"):
            ask(tmp_path)
    ended.set()
    claimed(tmp_path).release()


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_a_dead_owner_on_another_host_is_replaced(tmp_path: Path, hours: int) -> None:
    """However wrong the clock of its host was."""
    far(tmp_path, beats=False)
    os.utime(tmp_path / LEASE, (time.time() + 3600 * hours,) * 2)
    claim = claimed(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    claim.release()


def test_an_owner_without_a_name_keeps_the_folder(tmp_path: Path) -> None:
    ended = far(tmp_path, beats=True)
    (tmp_path / FILE).write_text('{"host": "far", "pid"')
    with pytest.raises(UsageError, match="in use by another job: a process that has not written its name yet"):
        claimed(tmp_path)
    ended.set()


def test_a_folder_that_was_removed_is_claimed_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    claim = claimed(folder)
    for name in (FILE, LEASE):
        (folder / name).unlink()
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


def test_a_job_whose_folder_was_taken_ends(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, other: Other
) -> None:
    """The folder was removed, and a new job started there before the owner's next refresh."""
    err = tmp_path_factory.mktemp("err") / "err"
    first = other(err=err, beat_s=0.4)
    (tmp_path / LEASE).unlink()
    claim = claimed(tmp_path)
    assert first.wait(60) == 1
    told = err.read_text()
    assert told.startswith(
        f"accordion: stopped: run.dir '{tmp_path}' was taken from this job while it ran; it is in use by"
    )
    assert told.count("\n") == 1
    claim.release()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / LEASE).mkdir()
    with pytest.raises(UsageError, match="which names the folder's owner, cannot be opened: Is a directory"):
        claimed(tmp_path)


def test_the_launchers_name_of_a_job() -> None:
    assert job_of({}) is None
    assert job_of({"TORCHELASTIC_RUN_ID": "none"}) is None
    assert job_of({"TORCHELASTIC_RUN_ID": "a"}) == "torchrun a"
    assert job_of({"SLURM_JOB_ID": "5"}) is None
    assert job_of({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}) == "srun 5.0"


def test_a_usage_error_of_the_first_rank_is_raised_on_every_rank() -> None:
    store = HashStore()

    def refused() -> None:
        raise UsageError("it is in use")

    for rank in (0, 1, 2):
        place = RankPlace(rank=rank, world=3, local_rank=rank, local_world=3, starter="test", url="")
        with pytest.raises(UsageError, match="it is in use"):
            first_of_all(place, store, refused if rank == 0 else lambda: pytest.fail("the first rank alone"))
