"""Ranks that accordion starts: the first that fails ends the others, and its traceback is the one shown."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore

import accordion as acc
from accordion.devices import num_cores
from accordion.errors import DivergenceError, UsageError
from accordion.train import launch
from accordion.train.launch import RankPlace
from tests.support import forked
from tests.support.sample import sampled

WITHIN_S = 10.0


def join(place: RankPlace, store: Store) -> None:
    dist.init_process_group("gloo", store=PrefixStore("test", store), rank=place.rank, world_size=place.world)
    dist.all_reduce(torch.ones(1))


def fails(place: RankPlace, store: Store, kind: str, mark: str) -> None:
    """Rank 1 fails in its own way, while rank 0 waits for it in a collective."""
    join(place, store)
    if place.rank == 1:
        with open(mark, "w") as file:
            file.write(str(time.time()))
        if kind == "raises":
            raise ZeroDivisionError("planted in rank 1")
        if kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "refuses":
            raise UsageError("planted,\nin rank 1")
        if kind == "parts":
            raise DivergenceError("planted in rank 1")
        if kind == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
    dist.all_reduce(torch.ones(1))
    time.sleep(600)


def trains(place: RankPlace, store: Store, number: int, mark: str) -> None:
    """A signal comes to rank 1 in its third step."""
    join(place, store)
    torch.manual_seed(0)
    model = acc.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    for step in range(6):
        if place.rank == 1 and step == 3:
            with open(mark, "w") as file:
                file.write(str(time.time()))
            os.kill(os.getpid(), number)
        model(torch.ones(2, 4)).sum().backward()


def hangs(place: RankPlace, store: Store, mark: str) -> None:
    """Rank 1 raises while rank 0 is not in a collective and would not notice by itself."""
    fails(place, store, "raises" if place.rank == 1 else "sleeps", mark) if place.rank == 1 else _sleep(place, store)


def _sleep(place: RankPlace, store: Store) -> None:
    join(place, store)
    time.sleep(600)


def ended_within(mark: str) -> bool:
    with open(mark) as file:
        return time.time() - float(file.read()) < WITHIN_S


EXPECTED = {
    "raises": (1, "ZeroDivisionError: planted in rank 1"),
    "parts": (3, "accordion: planted in rank 1\n"),
    "interrupted": (130, "accordion: rank 1 was interrupted; the others were stopped.\n"),
    "dies": (137, "accordion: rank 1 was ended by SIGKILL; the others were stopped.\n"),
    "refuses": (2, "accordion: planted, in rank 1\n"),
}


@pytest.mark.parametrize("kind", sampled(EXPECTED, {"raises", "dies"}.__contains__))
def test_a_failing_rank_ends_the_others(
    kind: str, tmp_path: os.PathLike[str], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    mark = os.path.join(tmp_path, "mark")
    code, message = EXPECTED[kind]
    assert forked.launched(fails, (kind, mark), 2) == code
    assert ended_within(mark)
    assert not [r.getMessage() for r in caplog.records if r.levelname != "INFO"]  # which torch would show
    told = capfd.readouterr().err
    assert message in told
    if kind == "raises":
        assert told.startswith("accordion: rank 1 failed in the task's code:\nTraceback")
        assert told.count("Traceback") == 1
        assert "raise ZeroDivisionError" in told
    else:
        assert told == message


@pytest.mark.parametrize("number", sampled([signal.SIGKILL, signal.SIGINT], signal.SIGKILL.__eq__))
def test_no_echo_comes_before_the_cause(
    number: int, tmp_path: os.PathLike[str], capfd: pytest.CaptureFixture[str]
) -> None:
    mark = os.path.join(tmp_path, "mark")
    assert forked.launched(trains, (number, mark), 2) == 128 + number
    assert ended_within(mark)
    how = "interrupted" if number == signal.SIGINT else "ended by SIGKILL"
    assert capfd.readouterr().err == f"accordion: rank 1 was {how}; the others were stopped.\n"


def test_a_rank_that_does_not_communicate_is_ended_too(
    tmp_path: os.PathLike[str], capfd: pytest.CaptureFixture[str]
) -> None:
    mark = os.path.join(tmp_path, "mark")
    assert forked.launched(hangs, (mark,), 2) == 1
    assert ended_within(mark)
    assert "ZeroDivisionError: planted in rank 1" in capfd.readouterr().err


def asks_its_launcher(place: RankPlace, store: Store, launcher: int) -> None:
    if place.rank == 0:
        os.kill(launcher, signal.SIGTERM)
    _sleep(place, store)


def test_ranks_that_handle_no_signals_are_ended_by_one(capfd: pytest.CaptureFixture[str]) -> None:
    """No word of steps or saves: `accordion generate` has none."""
    assert forked.launched(asks_its_launcher, (os.getpid(),), 2) == 128 + signal.SIGTERM
    assert capfd.readouterr().err == "accordion: ended by SIGTERM\n"


def succeeds(place: RankPlace, store: Store, folder: str) -> None:
    join(place, store)
    answer = launch.once_per_host(place, store, lambda: place.rank)
    with open(os.path.join(folder, str(place.rank)), "w") as file:
        file.write(f"{place.world} {answer} {torch.get_num_threads()}")
    dist.destroy_process_group()


@pytest.mark.parametrize("start", [forked.start, pytest.param(launch.start, marks=pytest.mark.slow)])
def test_ranks_share_the_cores(
    start: Callable[..., int], tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert start(succeeds, (str(tmp_path),), 2) == 0
    threads = max(1, num_cores() // 2)
    for rank in range(2):
        with open(os.path.join(tmp_path, str(rank))) as file:
            assert file.read() == f"2 {rank} {threads}"


def prepares(place: RankPlace, store: Store) -> None:
    def do() -> None:
        raise UsageError("the first rank of the host refuses")

    launch.once_per_host(place, store, do)


def test_what_the_first_rank_refuses_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert forked.launched(prepares, (), 2) == 2
    assert capfd.readouterr().err == "accordion: the first rank of the host refuses\n"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system cannot be told when to give up")
def test_connections_to_a_store_whose_machine_is_gone_are_given_up() -> None:
    """Those of the job's store alone, 8 s before collectives would time out."""
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_connection(other.getsockname()) as stranger:
        own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        launch.give_up_store(PrefixStore("job", own), 20.0)
        limits = []
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError, TypeError, IndexError), socket.socket(fileno=os.dup(int(name))) as connection:
                if own.port in (connection.getpeername()[1], connection.getsockname()[1]):
                    limits.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        assert 12_000 in limits
        assert set(limits) <= {0, 12_000}, "the store's own end is left alone"
        assert stranger.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        launch.give_up_store(dist.HashStore(), 20.0)
