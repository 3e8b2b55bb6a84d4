"""Hubs (the objects by which ranks report failures to each other) in one process, which deliver messages without sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accordion.safety.liveness.hub import Hub
from accordion.safety.liveness.links import HubLinks
from accordion.safety.liveness.messages import HubMessage, decoded, encoded


class DirectLinks(HubLinks):
    """Connections of a hub to those in `hubs`, by rank: `send` encodes and decodes a message and delivers it on this thread."""

    def __init__(self, ranks: Sequence[int], rank: int, hubs: dict[int, Hub]) -> None:
        super().__init__(ranks, rank)
        self._hubs = hubs

    def send(self, message: HubMessage, to: int | None = None, but: int | None = None) -> None:
        peers = self.ranks[1:] if self.leads else self.ranks[:1]
        for rank in peers:
            received: Any = decoded(encoded(message).rstrip(b"\n"))
            if rank in self._hubs and rank != but and to in (None, rank):
                self._hubs[rank].receive(received)


def hubs_of(num_ranks: int) -> list[Hub]:
    """Return a hub for each of `num_ranks` ranks, all connected."""
    hubs: dict[int, Hub] = {}
    for rank in range(num_ranks):
        hubs[rank] = Hub(DirectLinks(range(num_ranks), rank, hubs))
    return list(hubs.values())


def hub_of(rank: int, num_ranks: int) -> Hub:
    """Return the hub of one rank of `num_ranks`; the other ranks never answer."""
    return Hub(DirectLinks(range(num_ranks), rank, {}))
