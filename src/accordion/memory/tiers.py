"""Where each unit's shards rest, as `Offload` says: the maker of homes that `shard` hands to the engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from accordion.config import DEVICE, Offload
from accordion.engine.group import Wiring
from accordion.engine.home import Home, on_device
from accordion.engine.layout import Message
from accordion.engine.streams import Lane
from accordion.memory.arena import Arena
from accordion.memory.budget import Shape, arena_bytes
from accordion.memory.disk import check_folder
from accordion.memory.host import HostHome, landing_bytes
from accordion.memory.states import NUM_BUFFERS, DiskStates

log = logging.getLogger("accordion")


class Tiers:
    """Owns the host memory of a model and the streams that copy from it and to it; called by each group for its home.

    `offloads`, `shapes`: of each unit. All that will ever be taken is counted and allocated now.
    """

    def __init__(self, offloads: Sequence[Offload], shapes: Sequence[Sequence[Shape]], wiring: Wiring) -> None:
        self._offloads, self._wiring = offloads, wiring
        self.late = wiring.gather_lane.late
        self._store_lane = Lane(wiring.device, wiring.watch, self.late)
        self.states: WeakKeyDictionary[Optimizer, DiskStates] = WeakKeyDictionary()
        for folder in {offload.folder for offload in offloads if offload.folder is not None}:
            check_folder(folder)
        homes, landing = arena_bytes(offloads, shapes)
        self.arena = Arena(homes + landing, wiring.device)
        self._landing = self.arena.take(landing, torch.uint8)
        self._landed: dict[int, int] = {}  # bytes of the landing that groups of a unit have, by unit
        kind = "pinned" if wiring.device.type != "cpu" else "ordinary"
        counts = [sum(map(test, offloads)) for test in (lambda o: o.offloads, lambda o: o.folder is not None)]
        log.info(
            "offload: %d bytes of %s host memory for %d of %d units, the optimizer's states of %d on disk",
            homes + landing, kind, counts[0], len(offloads), counts[1],
        )  # fmt: skip

    def folder_of(self, unit: int) -> Path | None:
        """Where the optimizer's states of a unit rest on disk; None where they do not."""
        return self._offloads[unit].folder

    def states_of(self, optimizer: Optimizer) -> DiskStates:
        """What an optimizer has on disk, made at the first use."""
        if optimizer not in self.states:
            self.states[optimizer] = DiskStates(any(offload.checksums for offload in self._offloads))
        return self.states[optimizer]

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """The threads that read and write files, a piece each."""
        return ThreadPoolExecutor(NUM_BUFFERS, thread_name_prefix="accordion-disk")

    @cached_property
    def stepper(self) -> ThreadPoolExecutor:
        """The thread on which units are stepped, one after the other: the kernels of a step have threads of their own."""
        return ThreadPoolExecutor(1, thread_name_prefix="accordion-step")

    def __call__(
        self, unit: int, msg: Message, rank: int, dtypes: Sequence[torch.dtype], gathered: torch.dtype
    ) -> Home:
        offload = self._offloads[unit]
        if not offload.offloads:
            return on_device(self._wiring.device)(unit, msg, rank, dtypes, gathered)
        start = self._landed.get(unit, 0)
        self._landed[unit] = stop = start + landing_bytes(msg, dtypes)
        return HostHome(
            msg,
            rank,
            dtypes,
            gathered,
            allocate=self.arena.take,
            landing=self._landing[start:stop],
            keeps=offload.params == DEVICE,
            device=self._wiring.device,
            fetch_lane=self._wiring.fetch_lane,
            store_lane=self._store_lane,
        )
