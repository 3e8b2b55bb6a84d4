"""Ranks that accordion starts: the first that fails ends the others, and its traceback is the one shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousParameters

import accordion as acc
from accordion.devices import num_cores
from accordion.errors import DivergenceError, UsageError
from accordion.train import launch
from accordion.train.launch import RankPlace
from accordion.train.store_watchdog import watched_store
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
        assert told.startswith("accordion: rank 1 failed in the task's own code:\nTraceback")
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


def test_ranks_share_the_cores(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch.start(succeeds, (str(tmp_path),), 3) == 0
    threads = max(1, num_cores() // 3)
    for rank in range(3):
        with open(os.path.join(tmp_path, str(rank))) as file:
            assert file.read() == f"3 {rank} {threads}"


def prepares(place: RankPlace, store: Store) -> None:
    def do() -> None:
        raise UsageError("the first rank of the host refuses")

    launch.once_per_host(place, store, do)


def test_what_the_first_rank_refuses_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert forked.launched(prepares, (), 2) == 2
    assert capfd.readouterr().err == "accordion: the first rank of the host refuses\n"


KEEPS_STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""
WATCHES = """
import sys, time
from torch.distributed import PrefixStore, TCPStore
from accordion.train.store_watchdog import watched_store
with watched_store(PrefixStore("job", TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)), 3, 1.0):
    print("watches", flush=True)
    time.sleep(600)
"""


@contextmanager
def killed(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the test."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_rank_whose_store_falls_silent_ends_by_itself() -> None:
    """As a machine behind a link that is cut: the connection stands and nothing comes."""
    with killed([sys.executable, "-c", KEEPS_STORE]) as keeper:
        assert keeper.stdout is not None
        with killed([sys.executable, "-c", WATCHES, keeper.stdout.readline().strip()]) as rank:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "watches\n"
            keeper.send_signal(signal.SIGSTOP)
            said = rank.communicate(timeout=60)[1]
    assert rank.returncode == 1
    assert "accordion: rank 3 stopped: the job's store at 127.0.0.1:" in said
    assert "has not answered for 1 s (launch.timeout_s)" in said


def test_no_thread_asks_the_store_when_python_ends() -> None:
    """One that was inside of torch then aborted the process: 4 of 12 that asked without a pause."""
    own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with watched_store(own, 0, 600.0):
        asks = [thread for thread in threading.enumerate() if thread.name == "accordion-store-watchdog"]
        assert len(asks) == 2
    assert not any(thread.is_alive() for thread in asks)


def test_an_agent_whose_store_falls_silent_ends_in_time() -> None:
    """`torchrun --rdzv-backend accordion`, whose own client of the store would wait for a quarter of an hour."""
    (found,) = (point for point in entry_points(group="torchrun.handlers") if point.name == "accordion")
    words = {"run_id": "job", "min_nodes": 1, "max_nodes": 1, "local_addr": "127.0.0.1", "is_host": "0"}
    with killed([sys.executable, "-c", KEEPS_STORE]) as keeper:
        assert keeper.stdout is not None
        endpoint = f"127.0.0.1:{keeper.stdout.readline().strip()}"
        handler = found.load()()(RendezvousParameters("accordion", endpoint, read_timeout="2", **words))
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size, handler.num_nodes_waiting()) == (0, 1, 0)
        keeper.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(RendezvousConnectionError, match=f"rendezvous at {endpoint} has not answered for 2 s"):
            any(iter(handler.num_nodes_waiting, -1))  # what it heard within the last second it does not ask again
        assert handler.shutdown() is False  # at once, not for two seconds more each
        assert time.monotonic() - start < WITHIN_S
    for thread in threading.enumerate():
        if thread.name == "accordion-rendezvous":
            thread.join()  # its store is gone now; inside of torch it would abort this process, if that ended first


def test_torchrun_learns_of_the_rendezvous_without_the_package() -> None:
    """torch imports it in every program that imports torch's own."""
    words = "import sys, accordion_rendezvous as a; assert callable(a.handler()); print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "accordion"} & set(told)
