"""The job's store is not waited for without end: its machine is gone, or the process that keeps it is stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from accordion.safety.connections import AskedStore, give_up, limit_s_of

KEEPS_STORE = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""
TIMEOUT_S = 2.0


@pytest.fixture
def keeper() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A process that keeps a store, and its port."""
    with subprocess.Popen([sys.executable, "-c", KEEPS_STORE], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process
        finally:
            process.kill()


def test_a_question_to_a_stopped_store_ends(keeper: tuple[int, subprocess.Popen[str]]) -> None:
    port, process = keeper
    client = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    store = AskedStore(PrefixStore("job", client), TIMEOUT_S)
    store.set("key", "value")
    assert (store.get("key"), store.check(["other"]), store.add("n", 2), store.delete_key("key")) == (
        b"value",
        False,
        2,
        True,
    )
    assert store.lost() == ""
    process.send_signal(signal.SIGSTOP)
    ends = threading.Event()

    def look() -> None:
        while not ends.wait(0.05):
            store.look()

    thread = threading.Thread(target=look)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(RuntimeError):
            store.get("n")
    finally:
        ends.set()
        thread.join()
    assert time.monotonic() - began >= limit_s_of(TIMEOUT_S)
    assert "the job's store has not answered for 1 s" in store.lost()


def test_what_is_asked_in_time_is_left_alone(keeper: tuple[int, subprocess.Popen[str]]) -> None:
    port, _ = keeper
    store = AskedStore(TCPStore("127.0.0.1", port, is_master=False), 1e-6)
    store.look()  # nothing is asked
    assert not store.check(["key"])
    assert not store.is_lost


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system cannot be told when to give up")
def test_the_system_is_told_when_to_give_up(keeper: tuple[int, subprocess.Popen[str]]) -> None:
    """Of each connection to the store, and of no other one."""
    port, _ = keeper
    client = TCPStore("127.0.0.1", port, is_master=False)
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_connection(other.getsockname()) as stranger:
        AskedStore(client, 20.0)
        assert stranger.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        give_up(stranger, 20.0)
        assert stranger.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 12_000
    limits = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(number)) as found:
                if found.getpeername()[1] == port:
                    limits.append(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        except (OSError, TypeError, IndexError):  # no socket, or one of another family
            pass
    assert limits == [12_000]


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(2.0, 1.0), (20.0, 12.0), (600.0, 592.0)])
def test_connections_are_given_up_before_collectives(timeout_s: float, limit_s: float) -> None:
    assert limit_s_of(timeout_s) == limit_s
