"""The start of a job: its launcher and devices, the owner of its run folder, and equal data on all ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from accordion.devices import Devices
from accordion.errors import AccordionError, DivergenceError, UsageError
from accordion.train import build, launch, owner
from accordion.train.config import Config, LaunchConfig
from accordion.train.language_work import LanguageWork
from accordion.train.launch import (
    Forwarding,
    NothingStartedError,
    RankPlace,
    choose,
    first_does,
    first_host,
    job_of,
    place_of,
)
from accordion.train.owner import FILE, check_free, claim
from tests.e2e.jobs import until
from tests.support import forked

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "gpu7", "MASTER_PORT": "29400"}
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],login",
}


def test_places_of_launchers() -> None:
    place = RankPlace(rank=5, world=8, local_rank=1, local_world=4, starter="torchrun", address="gpu7:29400")
    assert place_of(TORCHRUN) == place
    assert place_of({**SRUN, **TORCHRUN}) == replace(place, job="srun 123456.0")
    in_slurm = replace(place, starter="srun", address="gpu03:23456", job="srun 123456.0")
    assert place_of(SRUN) == in_slurm
    assert place_of({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}) == replace(
        in_slurm, address="10.0.0.1:29500"
    )
    for environ in ({**TORCHRUN, "RANK": "x"}, {**SRUN, "MASTER_PORT": "x"}):
        with pytest.raises(UsageError, match=r"they are invalid: invalid literal for int\(\) with base 10: 'x'"):
            place_of(environ)
    with pytest.raises(UsageError, match="'MASTER_PORT' is not set"):
        place_of(without(TORCHRUN, "MASTER_PORT"))


def without(environ: dict[str, str], key: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name != key}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        without(SRUN, "SLURM_STEP_ID"),
        without(SRUN, "SLURM_PROCID"),
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
        {"RANK": "0"},
        {**SRUN, "SLURM_PTY_PORT": "34567", "SLURM_TASK_PID": "1"},
        {**SRUN, "SLURM_STEP_ID": "4294967290"},
    ],
    ids=["none", "batch script", "salloc", "one task", "rank alone", "shell of srun --pty", "shell of salloc"],
)
def test_a_process_that_starts_its_own_ranks(environ: dict[str, str]) -> None:
    assert place_of(environ) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[007,9]-ib,m", "n007-ib"), ("gpu-a[2,5-7]", "gpu-a2")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


PLACE = RankPlace(rank=3, world=8, local_rank=3, local_world=4, starter="torchrun", address="gpu7:29400")


@pytest.mark.parametrize(
    ("choice", "place", "gpus", "expected"),
    [
        (LaunchConfig(), None, 0, ("cpu", 2)),
        (LaunchConfig(), None, 8, ("xpu", 8)),
        (LaunchConfig(nproc=3), None, 0, ("cpu", 3)),
        (LaunchConfig(nproc=3, device="xpu"), None, 8, ("xpu", 3)),
        (LaunchConfig(device="cpu"), None, 8, ("cpu", 2)),
        (LaunchConfig(), PLACE, 4, ("xpu", 8)),
        (LaunchConfig(nproc=4), PLACE, 0, ("cpu", 8)),
    ],
)
def test_device_and_ranks(choice: LaunchConfig, place: RankPlace | None, gpus: int, expected: tuple[str, int]) -> None:
    assert choose(choice, place, Devices("xpu" if gpus else "cpu", gpus)) == expected


@pytest.mark.parametrize(
    ("choice", "place", "gpus", "message"),
    [
        (LaunchConfig(device="cuda"), None, 0, "'cuda' and this machine has no accelerator; take 'auto' or 'cpu'"),
        (LaunchConfig(device="cuda"), None, 2, "has 2 devices of type 'xpu'; take 'auto', 'cpu' or 'xpu'"),
        (LaunchConfig(device="gpu"), None, 1, "has 1 device of type 'xpu'"),
        (LaunchConfig(nproc=3), None, 2, "3 ranks are more than this machine has, 2 devices"),
        (LaunchConfig(), PLACE, 3, "4 ranks are more than this machine has, 3 devices"),
        (LaunchConfig(nproc=2), PLACE, 8, "torchrun started 4"),
    ],
)
def test_what_cannot_be_started_is_named(
    choice: LaunchConfig, place: RankPlace | None, gpus: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose(choice, place, Devices("xpu" if gpus else "cpu", gpus))


def test_a_waiting_rank_reports_how_many_have_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third of three ranks never starts."""
    monkeypatch.setattr(launch, "SLOW_S", 0.5)
    monkeypatch.setattr(launch, "START_S", 1.5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = [
        RankPlace(rank=r, world=3, local_rank=r, local_world=3, starter="srun", address=f"127.0.0.1:{port}")
        for r in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        first, _ = [pool.submit(launch.joined, place) for place in places]
        with pytest.raises(torch.distributed.DistStoreError, match="not all of 3 ranks have started"):
            first.result()
    said = capsys.readouterr().err
    assert "rank 0 has waited 0.5 s: 2 of 3 ranks have started that the variables of srun announce" in said
    assert "env -u SLURM_PROCID" in said


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        place = RankPlace(rank=0, world=2, local_rank=0, local_world=2, starter="srun", address=address)
        with pytest.raises(AccordionError, match=f"rank 0 cannot open the job's store at {address}: "):
            launch.joined(place)


def test_ranks_that_start_twice_share_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks begin their second start while rank 0 still answers in the first. A rank of an earlier start left its word."""
    poll, store = launch.poll, torch.distributed.HashStore()
    store.set("accordion/start/1", "left by a rank that is gone")

    def slowly(is_over: Callable[[], bool], *limits: Any) -> bool:
        return poll(lambda: time.sleep(0.1) is None and is_over(), *limits)

    monkeypatch.setattr(launch, "START_S", 5.0)
    monkeypatch.setattr(launch, "poll", slowly)
    with ThreadPoolExecutor(3) as pool:
        places = [replace(PLACE, rank=rank, world=3) for rank in range(3)]
        by_rank = list(pool.map(lambda place: [launch.of_this_start(store, place) for _ in range(2)], places))
    for number, stores in enumerate(zip(*by_rank, strict=True)):
        assert not any(own.check(["number"]) for own in stores)
        stores[2].set("number", str(number))
        assert [own.get("number").decode() for own in stores] == [str(number)] * 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_command_while_there_are_no_ranks(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    for starts in (False, True):
        signals = Forwarding()
        if starts:
            signals.ranks_start()
        with pytest.raises(NothingStartedError), signals:
            signal.raise_signal(number)
        assert signals.came
    assert signal.getsignal(number) == before


def is_interrupted(place: RankPlace, store: torch.distributed.Store) -> None:
    """Wait for other ranks in vain while a Ctrl-C is handled."""
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        raise RuntimeError("gloo: Connection closed by peer")


def test_a_backends_error_after_ctrl_c_is_reported_as_ctrl_c(capfd: pytest.CaptureFixture[str]) -> None:
    assert forked.start(is_interrupted, (), 1) == launch.INTERRUPTED
    assert capfd.readouterr().err == ""


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


@contextmanager
def owned_elsewhere(folder: Path, job: str = "") -> Iterator[forked.Job]:
    """Context manager in which another process owns `folder`."""
    out = folder.with_suffix(".out")
    with forked.Job(holds, [str(folder), job], out) as holder:
        until(lambda: out.exists() and out.read_text() == "holds\n", "the folder")
        yield holder


def claimed(folder: Path, job: str | None = None, wait_s: float = 0.0, say: Callable[[str], None] = print) -> ExitStack:
    return claim({"run.dir": folder}, job, wait_s, say)


def test_a_second_job_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    with owned_elsewhere(tmp_path) as holder:
        by_whom = f"process {holder.pid} on {os.uname().nodename}, since 20"
        for ask in (claimed, lambda folder: check_free({"run.dir": folder}, None)):
            with pytest.raises(UsageError) as refused:
                ask(tmp_path)
            assert str(refused.value).startswith(f"run.dir '{tmp_path}' is in use by another job: {by_whom}")
    assert (tmp_path / FILE).exists()
    check_free({"run.dir": tmp_path}, None)
    owned = claimed(tmp_path)
    assert (tmp_path / FILE).read_text().startswith(f"process {os.getpid()} on ")
    owned.close()
    check_free({"run.dir": tmp_path}, None)
    assert not list(tmp_path.iterdir())


def test_a_restart_waits_for_the_earlier_start_of_its_job(tmp_path: Path) -> None:
    messages = list[str]()
    with owned_elsewhere(tmp_path, "torchrun 5") as holder:
        check_free({"run.dir": tmp_path}, "torchrun 5")
        with pytest.raises(UsageError, match="in use"):
            check_free({"run.dir": tmp_path}, "torchrun 6")
        with pytest.raises(UsageError, match="in use"):
            claimed(tmp_path, "torchrun 5", wait_s=0.6, say=messages.append)
        assert [f"process {holder.pid} on" in message for message in messages] == [True]
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
    claim({"run.dir": tmp_path / "a", "checkpoint.dir": tmp_path / "link"}, None, 0, print).close()  # one folder


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


SAME = {"num_train": 1000, "digest": "d" * 64, "tokenizer_digest": "t" * 64, "resume": None}
DIFFERENT = {
    "training tokens: rank 0 has 1,000 (dddddddddddd), rank 1 has 999 (dddddddddddd)": {"num_train": 999},
    "training tokens: rank 0 has 1,000 (dddddddddddd), rank 1 has 1,000 (eeeeeeeeeeee)": {"digest": "e" * 64},
    "a tokenizer: rank 0 has tttttttttttt, rank 1 has uuuuuuuuuuuu": {"tokenizer_digest": "u" * 64},
    "the checkpoint to resume from: rank 0 has None, rank 1 has c/step-3": {"resume": "c/step-3"},
}


def agreed(mesh: object, cases: list[dict[str, Any]]) -> list[str]:
    """Return the error for each of `cases`, what rank 1 has in place of `SAME`; empty if ranks agree."""
    rank, errors = dist.get_rank(), []
    place = RankPlace(rank=rank, world=4, local_rank=rank, local_world=4, starter="test")
    for others in cases:
        facts = {**SAME, **(others if rank == 1 else {})}
        resume = facts.pop("resume")
        work = LanguageWork(config=Config(), files=SimpleNamespace(**facts), generation={}, spec="")
        try:
            build.agree(SimpleNamespace(config=Config(), work=work, resume=resume), place)
            errors.append("")
        except DivergenceError as error:
            errors.append(str(error))
    return errors


def test_ranks_with_different_data_raise_on_all_ranks(world: Any) -> None:
    for same, *errors in world.run(4, agreed, [{}, *DIFFERENT.values()]):
        assert not same
        for message, error in zip(DIFFERENT, errors, strict=True):
            assert message in error
            assert "give every machine the same data.path and checkpoint.dir" in error
