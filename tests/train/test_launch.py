"""The launcher of a process, and the devices it may use, are determined by its environment alone."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from accordion.devices import Devices
from accordion.errors import AccordionError, UsageError
from accordion.train import launch
from accordion.train.config import LaunchConfig
from accordion.train.launch import Forwarding, NothingStartedError, RankPlace, choose, first_host, place_of
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
        (
            LaunchConfig(device="cuda"),
            None,
            0,
            "launch.device is 'cuda' and this machine has no accelerator; take 'auto' or 'cpu'",
        ),
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


def test_each_start_has_its_own_keys_in_the_store() -> None:
    """Also if a rank of the earlier start had written its word and nobody answered."""
    store = torch.distributed.HashStore()
    store.set("accordion/start/1", "left by a rank that is gone")
    for start in ("first", "second"):
        with ThreadPoolExecutor(3) as pool:
            stores = list(
                pool.map(lambda rank: launch.of_this_start(store, replace(PLACE, rank=rank, world=3)), range(3))
            )
        assert not any(own.check(["where"]) for own in stores)
        stores[2].set("where", start)
        assert [own.get("where").decode() for own in stores] == [start] * 3


def test_ranks_that_start_twice_share_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks begin their second start while rank 0 still answers in the first."""
    poll, store = launch.poll, torch.distributed.HashStore()

    def slowly(is_over: Callable[[], bool], *limits: Any) -> bool:
        return poll(lambda: time.sleep(0.1) is None and is_over(), *limits)

    monkeypatch.setattr(launch, "START_S", 5.0)
    monkeypatch.setattr(launch, "poll", slowly)
    with ThreadPoolExecutor(3) as pool:
        places = [replace(PLACE, rank=rank, world=3) for rank in range(3)]
        by_rank = list(pool.map(lambda place: [launch.of_this_start(store, place) for _ in range(2)], places))
    for number, stores in enumerate(zip(*by_rank, strict=True)):
        stores[0].set("number", str(number))
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
