"""Ranks that accordion starts: the first that fails ends the others, and its traceback is the one shown."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

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
    """Rank 1 fails in its own way, while rank 0 waits for it in a collective, or sleeps and would not notice by itself."""
    join(place, store)
    if kind.endswith("in a step"):
        trains(place, kind, mark)
    if place.rank == 1:
        ends(kind, mark)
    if kind != "raises to a sleeper":
        dist.all_reduce(torch.ones(1))
    time.sleep(600)


def ends(kind: str, mark: str) -> None:
    with open(mark, "w") as file:
        file.write(str(time.time()))
    if kind.startswith("raises"):
        raise ZeroDivisionError("planted in rank 1")
    if kind == "refuses":
        raise UsageError("planted,\nin rank 1")
    if kind == "parts":
        raise DivergenceError("planted in rank 1")
    os.kill(os.getpid(), signal.SIGKILL if kind.startswith("dies") else signal.SIGINT)
    time.sleep(5)


def trains(place: RankPlace, kind: str, mark: str) -> None:
    """Rank 1 ends in its third step."""
    torch.manual_seed(0)
    model = acc.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    for step in range(6):
        if place.rank == 1 and step == 3:
            ends(kind, mark)
        model(torch.ones(2, 4)).sum().backward()


RAISES = (1, "ZeroDivisionError: planted in rank 1")
INTERRUPTED = (130, "accordion: rank 1 was interrupted; the others were stopped.\n")
DIES = (137, "accordion: rank 1 was ended by SIGKILL; the others were stopped.\n")
EXPECTED = {
    "raises": RAISES,
    "raises to a sleeper": RAISES,
    "parts": (3, "accordion: planted in rank 1\n"),
    "interrupted": INTERRUPTED,
    "interrupted in a step": INTERRUPTED,
    "dies": DIES,
    "dies in a step": DIES,
    "refuses": (2, "accordion: planted, in rank 1\n"),
}


@pytest.mark.parametrize("kind", sampled(EXPECTED, lambda kind: kind.startswith(("raises", "dies"))))
def test_a_failing_rank_ends_the_others(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """No rank reports a secondary error before the cause."""
    mark = tmp_path / "mark"
    code, message = EXPECTED[kind]
    assert forked.launched(fails, (kind, str(mark)), 2) == code
    assert time.time() - float(mark.read_text()) < WITHIN_S
    assert not [r.getMessage() for r in caplog.records if r.levelname != "INFO"]  # which torch would show
    shown = capfd.readouterr().err
    assert message in shown
    if code == 1:
        assert shown.startswith("accordion: rank 1 failed in the task's code:\nTraceback")
        assert shown.count("Traceback") == 1
        assert "raise ZeroDivisionError" in shown
    else:
        assert shown == message


def asks_its_launcher(place: RankPlace, store: Store, launcher: int) -> None:
    join(place, store)
    if place.rank == 0:
        os.kill(launcher, signal.SIGTERM)
    time.sleep(600)


def test_ranks_that_handle_no_signals_are_ended_by_one(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a message about steps or saves, which `accordion generate` does not have."""
    assert forked.launched(asks_its_launcher, (os.getpid(),), 2) == 128 + signal.SIGTERM
    assert capfd.readouterr().err == "accordion: ended by SIGTERM\n"


def succeeds(place: RankPlace, store: Store, folder: Path) -> None:
    join(place, store)
    answer = launch.once_per_host(place, store, lambda: place.rank)
    (folder / str(place.rank)).write_text(f"{place.world} {answer} {torch.get_num_threads()}")
    dist.destroy_process_group()


@pytest.mark.parametrize("start", [forked.start, pytest.param(launch.start, marks=pytest.mark.slow)])
def test_ranks_share_the_cores(start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert start(succeeds, (tmp_path,), 2) == 0
    threads = max(1, num_cores() // 2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [f"2 {rank} {threads}" for rank in range(2)]


def prepares(place: RankPlace, store: Store) -> None:
    def do() -> None:
        raise UsageError("the first rank of the host refuses")

    launch.once_per_host(place, store, do)


def test_a_usage_error_of_the_first_rank_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
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
