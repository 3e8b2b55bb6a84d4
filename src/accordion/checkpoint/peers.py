"""Whether the other ranks of a save in the background live: a connection of each to the first one, which its end closes."""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from contextlib import suppress

from accordion.checkpoint.collective import Team
from accordion.safety.party_line import own_address

DONE = b"."  # said by who ends because all is done, or because all know of the failure
CONNECT_S = 5.0
GREET_S = 0.01  # between two looks for who else has connected
GREETING_BYTES = 40  # the word of this save, 32 letters, and the rank, 8 digits: a stranger does not count
REASON_BYTES = 4096


class Peers:
    """Owns this rank's sockets for the time of one save.

    Where an address cannot be reached, nothing is known of that rank, and a time-out decides.
    """

    def __init__(self, word: str) -> None:
        self._word = word
        self._selector = selectors.DefaultSelector()
        self._server: socket.socket | None = None

    @classmethod
    def meet(cls, team: Team) -> Peers:
        """Connect all ranks of `team` with the first. A collective.

        When it returns on the first rank, all that could connect have done so: it may be the first to end the connections, and
        one that came later would wait for somebody who has left.
        """
        peers = cls(secrets.token_hex(16) if team.leads else "")
        if len(team.ranks) < 2:
            return peers
        own = ""
        if team.leads:
            with suppress(OSError):
                own = f"{peers._word} {peers._listen(len(team.ranks))}"
        said, is_connected = team.shared(own)[0], False
        if said and not team.leads:
            word, port, host = said.split(" ", 2)
            with suppress(OSError):
                peers._connect(host, int(port), f"{word}{team.index:08d}".encode())
                is_connected = True
        num_connected = sum(team.gathered(is_connected))
        if team.leads:
            peers._greet(num_connected)
        return peers

    def _listen(self, num_ranks: int) -> str:
        family, host = own_address()
        self._server = socket.create_server((host, 0), family=family, backlog=num_ranks)
        self._server.setblocking(False)
        return f"{self._server.getsockname()[1]} {host}"

    def _connect(self, host: str, port: int, greeting: bytes) -> None:
        first = socket.create_connection((host, port), CONNECT_S)
        first.sendall(greeting)
        self._watch(first, "rank 0")

    def _watch(self, peer: socket.socket, name: str) -> None:
        peer.setblocking(False)
        self._selector.register(peer, selectors.EVENT_READ, name)

    def _accept(self) -> None:
        with suppress(OSError):  # nobody else is there
            while self._server is not None:
                self._watch(self._server.accept()[0], "")

    def _greet(self, num_ranks: int) -> None:
        """Hear of so many ranks who they are; what they have sent is on its way."""
        deadline, num_heard = time.monotonic() + CONNECT_S, 0
        while num_heard < num_ranks and time.monotonic() < deadline:
            self._accept()
            for key, _ in self._selector.select(GREET_S):
                if not key.data:
                    num_heard += self._hear_name(key)

    def _hear_name(self, key: selectors.SelectorKey) -> bool:
        """Whether it is a rank of this save; a stranger is sent away."""
        peer = key.fileobj
        assert isinstance(peer, socket.socket)
        try:
            said = peer.recv(GREETING_BYTES)
        except OSError:
            said = b""
        if is_rank := said[:32] == self._word.encode():
            self._selector.modify(peer, selectors.EVENT_READ, f"rank {int(said[32:])}")
        else:
            self._selector.unregister(peer)
            peer.close()
        return is_rank

    def lost(self) -> str | None:
        """Why it is of no use to wait any longer, as far as is known; None if nothing is. Does not wait."""
        self._accept()
        for key, _ in self._selector.select(0):
            peer, name = key.fileobj, key.data
            assert isinstance(peer, socket.socket)
            if not name:
                self._hear_name(key)
                continue
            try:
                said = peer.recv(REASON_BYTES)
            except OSError:
                said = b""
            self._selector.unregister(peer)
            peer.close()
            if said != DONE:
                return said.decode(errors="replace") or f"{name} has ended"
        return None

    def close(self, reason: str = "") -> None:
        """End the connections, telling the others why where this is not the end of a save."""
        for key in list(self._selector.get_map().values()):
            peer = key.fileobj
            assert isinstance(peer, socket.socket)
            with suppress(OSError):
                peer.sendall(reason.encode(errors="backslashreplace")[:REASON_BYTES] or DONE)
                peer.shutdown(socket.SHUT_RDWR)  # a forked child may hold it too
            peer.close()
        self._selector.close()
        if self._server is not None:
            self._server.close()
