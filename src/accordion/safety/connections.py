"""Connections whose other end is gone without a word: the system gives them up as soon as the job would.

A machine that is switched off, or cut off from the network, closes nothing. Linux sends what is unanswered again for a quarter of
an hour, and who waits for an answer waits as long, as torch's client of the job's store does.
"""

from __future__ import annotations

import math
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import get_ident
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

BEFORE_S = 8.0  # the job's time-out: who waits is told which rank is gone before its backend tells that time is over
PROBES = 20  # in the time that is left, where nothing else is sent
LARGEST_S = 32_000  # that the system takes for the time between two probes


def limit_s_of(timeout_s: float) -> float:
    """Seconds without an answer after which a connection is given up, in a job whose collectives fail after `timeout_s`."""
    return max(timeout_s / 2, timeout_s - BEFORE_S)


def give_up(connection: socket.socket, timeout_s: float) -> None:
    """Have reads and writes of a TCP connection fail once its other end has answered nothing for `limit_s_of(timeout_s)`."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux alone has it
        return
    limit_s = limit_s_of(timeout_s)
    pause_s = min(max(1, round(limit_s / PROBES)), LARGEST_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connection.setsockopt(socket.IPPROTO_TCP, option, pause_s)
    # RFC 5482; with it Linux counts time, and no probes (tcp(7)).
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(limit_s * 1000))


class AskedStore:
    """The job's store, where no answer is waited for longer than a collective is.

    A machine that is gone the system finds. A process that is stopped still answers the system: of that a thread has to `look`.
    """

    def __init__(self, store: Any, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._asked_at: dict[int, float] = {}  # by thread, when its question under way was asked
        self.is_lost = False
        for connection in self._connections():
            give_up(connection, timeout_s)

    def look(self) -> None:
        """For a thread that asks nothing: has a question that is not answered fail, in torch's words."""
        first = min(list(self._asked_at.values()), default=math.inf)
        if time.monotonic() - first > limit_s_of(self._timeout_s):
            self.is_lost = True
            for connection in self._connections():
                connection.shutdown(socket.SHUT_RDWR)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(self._store.check, keys))

    def get(self, key: str) -> bytes:
        return bytes(self._ask(self._store.get, key))

    def set(self, key: str, value: str) -> None:
        self._ask(self._store.set, key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(self._store.add, key, amount))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(self._store.delete_key, key))

    def lost(self) -> str:
        """What happened to it, as a sentence's end; empty while it answers."""
        if not self.is_lost:
            return ""
        return (
            f"the job's store has not answered for {limit_s_of(self._timeout_s):g} s: the process that keeps it (mostly rank 0 "
            "or its launcher) is stopped, or its machine hangs"
        )

    def _ask(self, ask: Callable[..., Any], *args: Any) -> Any:
        thread = get_ident()
        self._asked_at[thread] = time.monotonic()
        try:
            return ask(*args)
        finally:
            self._asked_at.pop(thread, None)

    def _connections(self) -> Iterator[socket.socket]:
        """Each connection that this process has to it, as one more handle; torch shows none of them, the system does."""
        store = self._store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            return
        with suppress(OSError):
            addresses = {each[4][0] for each in socket.getaddrinfo(store.host, store.port, type=socket.SOCK_STREAM)}
            for number in map(int, os.listdir("/proc/self/fd")):
                with suppress(OSError):  # of the listing itself, or closed since
                    if stat.S_ISSOCK(os.fstat(number).st_mode):
                        with socket.socket(fileno=os.dup(number)) as found:
                            if _goes_to(found, addresses, store.port):
                                yield found


def _goes_to(connection: socket.socket, addresses: set[Any], port: int) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    host, found, *_ = connection.getpeername()
    return found == port and host.removeprefix("::ffff:") in {str(each).removeprefix("::ffff:") for each in addresses}
