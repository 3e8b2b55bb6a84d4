"""A run folder has one job at a time: others are refused with the owner's name, and files of a dead job block nobody."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import HashStore

from accordion.errors import UsageError
from accordion.train import owner
from accordion.train.launch import first_does, job_of
from accordion.train.owner import FILE, check_free, claim
from tests.e2e.jobs import until
from tests.support import forked


def holds(words: list[str]) -> None:
    """Own a folder as a job."""
    owned = claim({"run.dir": Path(words[0])}, words[1] or None, 0, print)
    print("holds", flush=True)
    time.sleep(600)
    owned.close()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "EXIT_S", 0.3)
    monkeypatch.setattr(owner, "POLL_S", 0.02)


Other = Callable[..., forked.Job]


@pytest.fixture
def other(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Other]:
    """Start another process that owns `tmp_path`."""
    with ExitStack() as stack:

        def start(job: str = "") -> forked.Job:
            out = tmp_path_factory.mktemp("out") / "out"
            started = stack.enter_context(forked.Job(holds, [str(tmp_path), job], out))
            until(lambda: out.exists() and out.read_text() == "holds\n", "the folder")
            return started

        yield start


def claimed(folder: Path, job: str | None = None, wait_s: float = 0.0, say: Callable[[str], None] = print) -> ExitStack:
    return claim({"run.dir": folder}, job, wait_s, say)


def test_a_second_job_is_refused_until_the_first_is_killed(tmp_path: Path, other: Other) -> None:
    holder = other()
    expected = f"run.dir '{tmp_path}' is in use by another job: process {holder.pid} on {os.uname().nodename}, since 20"
    for ask in (claimed, lambda folder: check_free({"run.dir": folder}, None)):
        with pytest.raises(UsageError) as refused:
            ask(tmp_path)
        assert str(refused.value).startswith(expected)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / FILE).exists()
    check_free({"run.dir": tmp_path}, None)
    owned = claimed(tmp_path)
    assert (tmp_path / FILE).read_text().startswith(f"process {os.getpid()} on ")
    owned.close()
    check_free({"run.dir": tmp_path}, None)
    assert not list(tmp_path.iterdir())


def test_a_restart_waits_for_the_earlier_start_of_its_job(tmp_path: Path, other: Other) -> None:
    holder, said = other("torchrun 5"), list[str]()
    check_free({"run.dir": tmp_path}, "torchrun 5")
    with pytest.raises(UsageError, match="in use"):
        check_free({"run.dir": tmp_path}, "torchrun 6")
    with pytest.raises(UsageError, match="in use"):
        claimed(tmp_path, "torchrun 5", wait_s=0.6, say=said.append)
    assert len(said) == 1
    assert f"process {holder.pid} on" in said[0]
    os.kill(holder.pid, signal.SIGKILL)
    claimed(tmp_path, "torchrun 5", wait_s=60).close()


def test_the_checkpoints_of_a_run_are_claimed_too(tmp_path: Path) -> None:
    for name in ("a", "b", "kept"):
        (tmp_path / name).mkdir()
    first = claim({"run.dir": tmp_path / "a", "checkpoint.dir": tmp_path / "kept"}, None, 0, print)
    with pytest.raises(UsageError, match=r"checkpoint\.dir .*kept' is in use by another job"):
        claim({"run.dir": tmp_path / "b", "checkpoint.dir": tmp_path / "kept"}, None, 0, print)
    assert not list((tmp_path / "b").iterdir())
    first.close()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    both = claim({"run.dir": tmp_path / "a", "checkpoint.dir": tmp_path / "link"}, None, 0, print)  # one folder
    both.close()


def test_one_of_many_concurrent_claims_succeeds(tmp_path: Path) -> None:
    """However a clean end, which removes the file, coincides with the start of another job."""
    context = multiprocessing.get_context("fork")
    held, most = context.Value("i", 0), context.Value("i", 0)

    def work() -> None:
        got = 0
        while got < 25:
            try:
                owned = claimed(tmp_path)
            except UsageError:
                continue
            with held.get_lock():
                held.value += 1
                most.value = max(most.value, held.value)
            time.sleep(0.001)
            with held.get_lock():
                held.value -= 1
            owned.close()
            got += 1

    workers = [context.Process(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert most.value == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
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
        with pytest.raises(UsageError, match="it is in use"):
            first_does(rank == 0, store, "claim", refused if rank == 0 else lambda: pytest.fail("the first rank alone"))
