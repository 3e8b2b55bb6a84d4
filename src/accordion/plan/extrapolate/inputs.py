"""Bytes of offloaded inputs of recomputed units on the host."""

from __future__ import annotations

from accordion.offload.activations import room_for
from accordion.plan.events import STORE, Enter, Log, Op, begins

COPIED = 2  # a copy reads and writes


def inputs_of(log: Log) -> list[int]:
    """Return the bytes of each offloaded input of a micro-batch, rounded up to whole pages; of several, the largest one's."""
    batches: list[list[int]] = [[]]
    for event in log.events:
        if isinstance(event, Enter) and begins(event.place):
            batches.append([])
        elif isinstance(event, Op) and event.stream == STORE:
            batches[-1].append(room_for(event.num_bytes // COPIED))
    return max(batches, key=sum)
