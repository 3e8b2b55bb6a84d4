"""The TCP connections over which ranks report failures: between the first rank and each other one, and a thread that reads."""

from __future__ import annotations

import errno
import faulthandler
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from accordion import _torch
from accordion.errors import DivergenceError
from accordion.safety.liveness.messages import HasEnded, HubMessage, decoded, encoded
from accordion.safety.liveness.wording import LOST_END, end_of, numbers

CONNECT_S = 5.0  # for one greeting, and for sending a few hundred bytes
CONNECT_ALL_S = 60.0  # for all ranks to connect; then the listening socket is closed
GREETING_BYTES = 40  # 32 letters that only ranks of this hub know, and the rank in 8 digits
READ_BYTES = 1 << 16
CHECK_S = 1.0  # between two checks that the main thread runs
CRASH_LINES = 200
BEFORE_S = 8.0  # before the job's timeout, so that waiting ranks learn which rank is gone before their backend fails
PROBES = 20
LONGEST_PROBE_S = 32_000  # Linux takes no more
_wishes: list[bool] = []  # not empty if crashes are to be reported
LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


def report_crashes() -> None:
    """Have `faulthandler` send the stacks of a crash to the other ranks of a model, so that their errors name the line that
    crashed. Call this before `shard`; `accordion run` does. It has no effect if the program has enabled `faulthandler` itself."""
    _wishes.append(True)


def limit_s_of(timeout_s: float) -> float:
    """Return the seconds without an answer after which a connection fails, if collectives fail after `timeout_s`."""
    return max(timeout_s / 2, timeout_s - BEFORE_S)


def give_up(connection: socket.socket, timeout_s: float) -> None:
    """Make a TCP connection fail if its other end does not answer for `limit_s_of(timeout_s)`; on Linux only. A machine that is
    gone closes no connection, and by default Linux tries for a quarter of an hour."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    limit_s = limit_s_of(timeout_s)
    pause_s = min(max(1, round(limit_s / PROBES)), LONGEST_PROBE_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connection.setsockopt(socket.IPPROTO_TCP, option, pause_s)
    # RFC 5482; with it Linux counts time instead of probes (tcp(7)).
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(limit_s * 1000))


class HubLinks:
    """The connections of this rank: if it is the first of `ranks`, to all others, otherwise to the first. `Hub.of_job` creates
    it and calls `connect`, then `start`; afterwards `send` and `close` are called. If a process ends in any way, the system
    closes its connections. `peers`: rank at the other end -> socket of an open connection."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks, self.rank, self.leads = list(ranks), rank, rank == ranks[0]
        self.closed = False
        self.timeout_s = _torch.timeout_s_of_job()
        self.peers: dict[int, socket.socket] = {}
        self._unfinished: dict[int, bytes] = {}  # by rank, the beginning of a line
        self._crashes: dict[int, list[str]] = {}  # by rank, the lines that `faulthandler` wrote
        self._crash_fd: int | None = None  # the descriptor to which Python writes if this process crashes
        self._selector = selectors.DefaultSelector()
        self._sending = threading.Lock()

    def connect(self, store: Any, key: str) -> None:
        """Connect all ranks with the first one, which puts its address into `store` under `key`. A collective. Raises
        `DivergenceError` on the first rank if a rank does not connect, and on a rank that cannot connect."""
        if self.leads:
            with _server(len(self.ranks)) as server:
                nonce = secrets.token_hex(16)
                host, port = server.getsockname()[:2]
                store.set(key, f"{nonce} {port} {host}")
                self._accept_all(server, nonce.encode())
            return
        nonce, port, host = store.get(key).decode().split(" ", 2)
        try:
            first = socket.create_connection((host, int(port)), CONNECT_S)
            first.sendall(f"{nonce}{self.rank:08d}".encode())
        except OSError as error:
            raise DivergenceError(
                f"rank {self.rank} cannot connect to rank {self.ranks[0]} at {host} port {port} ({error}); ranks report failures "
                "over such connections. Allow connections between the machines of a job on all ports, which gloo and NCCL need "
                "too."
            ) from error
        self._add(self.ranks[0], first)

    def _accept_all(self, server: socket.socket, nonce: bytes) -> None:
        limit_s = min(CONNECT_ALL_S, self.timeout_s)
        deadline = time.monotonic() + limit_s
        while missing := [rank for rank in self.ranks[1:] if rank not in self.peers]:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                peer = server.accept()[0]
            except TimeoutError:
                raise DivergenceError(
                    f"rank {numbers(missing)} did not connect to rank {self.rank} within {limit_s:g} s; all ranks must shard "
                    "the model together."
                ) from None
            greeting = b""
            with suppress(OSError):
                peer.settimeout(CONNECT_S)
                while len(greeting) < GREETING_BYTES and (data := peer.recv(GREETING_BYTES - len(greeting))):
                    greeting += data
            if greeting[:-8] == nonce:
                self._add(int(greeting[-8:]), peer)
            else:  # not a rank of this hub
                peer.close()

    def _add(self, rank: int, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.settimeout(CONNECT_S)
        give_up(peer, self.timeout_s)
        self.peers[rank], self._unfinished[rank] = peer, b""
        self._selector.register(peer, selectors.EVENT_READ, rank)
        if _wishes and not faulthandler.is_enabled():
            self._crash_fd = os.dup(peer.fileno())
            faulthandler.enable(self._crash_fd)

    def start(self, receive: Callable[[HubMessage], None], check: Callable[[], None]) -> None:
        """Start the daemon thread that calls `receive(message)` for each message, and `check()` at least once a second until
        `close`. A forked process has no such thread, and its copies of the connections are closed."""
        reference = weakref.ref(self)

        def forked() -> None:
            # A connection stays open as long as any process has it, and the rank would seem to be alive.
            links = reference()
            if links is not None:
                links.closed = True
                links._aim_crash()
                for peer in links.peers.values():
                    peer.close()

        os.register_at_fork(after_in_child=forked)
        threading.Thread(target=self._listen, args=(receive, check), name="accordion-hub", daemon=True).start()

    def send(self, message: HubMessage, to: int | None = None, but: int | None = None) -> None:
        """Send a message to rank `to`, by default to all peers except `but`. Ignores socket errors. Does nothing after `close`,
        or if `to` is not one of `peers`: only the first rank reaches all others."""
        line = encoded(message)
        for rank, peer in list(self.peers.items()):
            if rank != but and to in (None, rank) and not self.closed:
                with self._sending, suppress(OSError):
                    peer.sendall(line)

    def close(self) -> None:
        """Stop sending. The thread ends after the other ranks have closed their side too, so that all sent messages arrive; or
        after `CONNECT_S` without a message."""
        self.closed = True
        self._aim_crash()
        for peer in list(self.peers.values()):
            with suppress(OSError):
                peer.shutdown(socket.SHUT_WR)

    def _aim_crash(self) -> None:
        """If `report_crashes` took effect, have `faulthandler` write a crash to a connected rank, or else the null device."""
        if self._crash_fd is None:
            return
        peer = None if self.closed else next(iter(self.peers.values()), None)
        target = os.open(os.devnull, os.O_WRONLY) if peer is None else os.dup(peer.fileno())
        os.dup2(target, self._crash_fd, inheritable=False)
        os.close(target)

    # -- the thread

    def _listen(self, receive: Callable[[HubMessage], None], check: Callable[[], None]) -> None:
        while self.peers:
            events = self._selector.select(CONNECT_S if self.closed else CHECK_S)
            if self.closed and not events:
                break
            check()
            for key, _ in events:
                self._read(key.data, key.fileobj, receive)
        for peer in list(self.peers.values()):
            peer.close()
        self._selector.close()

    def _read(self, rank: int, peer: Any, receive: Callable[[HubMessage], None]) -> None:
        """Read from the connection to `rank`, and pass complete messages to `receive`. If the connection has ended, close it and
        pass a `HasEnded`, unless this side is closed. A line that is no message is stored as output of a crash."""
        is_lost = False
        try:
            data = peer.recv(READ_BYTES)
        except OSError as error:
            if error.errno is None:  # a timeout: there is nothing to read
                return
            data, is_lost = b"", error.errno in LOST
        if not data:
            self._selector.unregister(peer)
            del self.peers[rank]
            self._aim_crash()
            peer.close()
            if not self.closed:
                text = LOST_END.format(limit_s_of(self.timeout_s)) if is_lost else end_of(self._crashes.get(rank, []))
                receive(HasEnded(rank=rank, text=text, closed=True))
            return
        *lines, self._unfinished[rank] = (self._unfinished[rank] + data).split(b"\n")
        for line in lines:
            if (message := decoded(line)) is not None:
                receive(message)
            elif len(crash := self._crashes.setdefault(rank, [])) < CRASH_LINES:
                crash.append(line.decode(errors="replace"))


def _server(num_ranks: int) -> socket.socket:
    """Return a listening socket at the address from which this machine reaches the job's store, so that other machines reach it;
    at 127.0.0.1 if this machine has no network. `num_ranks`: connections that may wait to be accepted."""
    store = _torch.default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = (store.host, store.port) if isinstance(store, TCPStore) else (socket.gethostname(), 1)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # sends nothing
            probe.connect(address)
            local = str(probe.getsockname()[0])
    except OSError:  # a machine without a network, so all ranks run on it
        family, local = socket.AF_INET, "127.0.0.1"
    return socket.create_server((local, 0), family=family, backlog=num_ranks)
