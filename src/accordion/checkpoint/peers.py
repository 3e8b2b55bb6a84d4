"""Whether the other ranks of a save in the background live: a connection of each to the first one, which its end closes."""

from __future__ import annotations

import secrets
import selectors
import socket
from contextlib import suppress

from accordion.checkpoint.collective import Team
from accordion.safety.party_line import own_address

DONE = b"."  # said by who ends because all is done, or because all know of the failure
CONNECT_S = 5.0
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
        """Connect all ranks of `team` with the first. A collective; when it returns on a rank, that rank can be missed."""
        peers = cls(secrets.token_hex(16) if team.leads else "")
        if len(team.ranks) < 2:
            return peers
        own = ""
        if team.leads:
            with suppress(OSError):
                own = f"{peers._word} {peers._listen(len(team.ranks))}"
        said = team.shared(own)[0]
        if said and not team.leads:
            word, port, host = said.split(" ", 2)
            with suppress(OSError):
                peers._connect(host, int(port), f"{word}{team.index:08d}".encode())
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

    def lost(self) -> str | None:
        """Why it is of no use to wait any longer, as far as is known; None if nothing is. Does not wait."""
        with suppress(OSError):
            while self._server is not None:
                self._watch(self._server.accept()[0], "")
        for key, _ in self._selector.select(0):
            peer, name = key.fileobj, key.data
            assert isinstance(peer, socket.socket)
            try:
                said = peer.recv(REASON_BYTES if name else GREETING_BYTES)
            except OSError:
                said = b""
            if not name and said[:32] == self._word.encode():
                self._selector.modify(peer, selectors.EVENT_READ, f"rank {int(said[32:])}")
                continue
            self._selector.unregister(peer)
            peer.close()
            if name and said != DONE:
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
