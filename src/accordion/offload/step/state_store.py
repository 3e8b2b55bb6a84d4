"""Stores the optimizer states that are stepped chunk by chunk, on disk or in memory that `wrap_optimizer` allocates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from accordion.config import DEVICE, Offload, folder_of
from accordion.engine.streams import SideStream
from accordion.offload.arena import ALIGN_BYTES, Arena, ArenaMaker
from accordion.offload.host_shards import OffDeviceShards
from accordion.offload.step.chunks import Chunk, Memory, ParamStep, StateBlock, StatePlace, chunk_numel
from accordion.offload.step.optimizer_copy import Entry, OptimizerCopy, local_of, write_back
from accordion.offload.step.pipelines import NUM_BUFFERS, NUM_DEVICE_BUFFERS, DevicePipeline, DiskPipeline, HostPipeline
from accordion.offload.swap_file import FileRange, SwapFile, aligned_buffer

log = logging.getLogger("accordion")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A parameter that is stepped chunk by chunk and needs memory for its states."""

    unit: int
    offload: Offload
    group: int
    param: Tensor
    local: Tensor
    shard_buffer: tuple[OffDeviceShards, int] | None  # (shard buffer, index in it); None if it is on the device


class States:
    """The states of one optimizer that are stepped chunk by chunk: their memory or files, and the buffers of the steps."""

    def __init__(
        self,
        device: torch.device,
        pool: Callable[[], Any],
        side_streams: tuple[SideStream, SideStream],
        checksums: bool,
        make_arena: ArenaMaker,
    ) -> None:
        self._device, self._pool, self._side_streams, self._checksums = device, pool, side_streams, checksums
        self._make_arena = make_arena
        self._places: dict[int, tuple[Tensor, StatePlace, Wanted]] = {}  # by id of the parameter, which it keeps alive
        self.files: list[SwapFile] = []
        self._buffers: list[Tensor] = []
        self.host_pipeline = HostPipeline(pool(), [])  # for chunks that are stepped on the host
        self.host_bytes = 0  # host memory allocated for states
        self._device_buffers: list[Tensor] = []
        self._pinned: Arena | None = None
        self._total = 0  # elements of the first parameters, which determine the chunk size also for later ones
        self.is_exposed = False  # the caller has had access to states, and may have written them

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)

    @property
    def block_bytes(self) -> int:
        """Bytes of the largest single read or write of states in a file."""
        blocks = [place.block for _, place, _ in self._places.values() if isinstance(place.block.store, SwapFile)]
        return max((min(a.max_numel, a.numel) * max(d.itemsize for d in a.keys.values()) for a in blocks), default=0)

    def cover(self, wanted: Sequence[Wanted], optimizer_copy: OptimizerCopy) -> None:
        """Allocate the states of parameters that have none yet. Raise `OffloadError` or `UsageError` if there is no room."""
        by_block: dict[tuple[str, int, int, torch.dtype], list[Wanted]] = {}
        for w in wanted:
            if id(w.param) not in self._places and w.local.numel():
                by_block.setdefault((w.offload.optimizer, w.unit, w.group, w.local.dtype), []).append(w)
        by_place: dict[str, list[list[Wanted]]] = {}
        for (place, *_), members in by_block.items():
            by_place.setdefault(place, []).append(members)
        self._total = self._total or sum(w.local.numel() for members in by_block.values() for w in members)
        probed: dict[tuple[int, torch.dtype, torch.device], dict[str, torch.dtype]] = {}
        for place, blocks in by_place.items():
            planned = []
            for members in blocks:
                first = members[0]
                on = self._device if first.offload.stepped_on == DEVICE else torch.device("cpu")
                key = first.group, first.local.dtype, on
                if key not in probed:
                    probed[key] = optimizer_copy.shaped_states(*key)
                planned.append((members, probed[key]))
            self._cover(place, planned)
        if by_place:
            self._size_buffers()
            log.info(
                "offload: optimizer states take %d bytes of host memory and %d bytes on disk, their buffers %d bytes on the "
                "host and %d on the device",
                self.host_bytes, sum(file.num_bytes for file in self.files), self.buffer_bytes,
                sum(buffer.numel() for buffer in self._device_buffers),
            )  # fmt: skip

    def _cover(self, place: str, blocks: Sequence[tuple[list[Wanted], dict[str, torch.dtype]]]) -> None:
        """Allocate the states of one tier: a block for the parameters and states (name -> dtype) of each item of `blocks`."""
        planned, total = [], 0
        for members, keys in blocks:
            smallest, disk_bytes, total_bytes = _element_bytes(members)
            itemsize = min([smallest, *(d.itemsize for d in keys.values())])
            starts, numel, step = [], 0, ALIGN_BYTES // itemsize
            for w in members:
                starts.append(numel)
                numel += -(-w.local.numel() // step) * step
            planned.append((members, starts, numel, keys, itemsize, (disk_bytes, total_bytes), total))
            total += sum(d.itemsize for d in keys.values()) * numel
        store = self._store(place, total)
        for members, starts, numel, keys, itemsize, element_bytes, base in planned:
            bases = {}
            for key, dtype in keys.items():
                bases[key] = base
                base += numel * dtype.itemsize
            block = StateBlock(store, numel, keys, bases, itemsize, chunk_numel(itemsize, self._total), *element_bytes)
            for w, start in zip(members, starts, strict=True):
                shown = {}
                for key, dtype in keys.items():
                    flat = store.mapped(bases[key] + start * dtype.itemsize, w.local.numel(), dtype)
                    shown[key] = flat.as_strided(w.local.shape, w.local.stride())
                self._places[id(w.param)] = (w.param, StatePlace(block, start, shown), w)

    def _store(self, place: str, num_bytes: int) -> SwapFile | Memory:
        folder = folder_of(place)
        if folder is not None:
            self.files.append(SwapFile(folder, num_bytes, checksums=self._checksums))
            return self.files[-1]
        if place == DEVICE:
            return Memory(torch.zeros(num_bytes, dtype=torch.uint8, device=self._device))
        arena = self._make_arena(num_bytes, self._device)
        self.host_bytes += num_bytes
        return Memory(arena.take(num_bytes, torch.uint8), arena)

    def _size_buffers(self) -> None:
        pairs = [(place.block, w.offload.stepped_on == DEVICE) for _, place, w in self._places.values()]
        # Chunks stepped on the host are limited by the number of buffers, also if nothing of them is in a file.
        least = {True: 0, False: ALIGN_BYTES}
        largest = max(block.buffer_bytes(on_device=False) or least[is_on_device] for block, is_on_device in pairs)
        over = max((block.buffer_bytes(on_device=True) for block, is_on_device in pairs if is_on_device), default=0)
        if largest and (not self._buffers or self._buffers[0].numel() < largest):
            if over and self._device.type != "cpu":
                self._pinned = self._make_arena(NUM_BUFFERS * largest, self._device)
                self._buffers = [self._pinned.take(largest, torch.uint8) for _ in range(NUM_BUFFERS)]
            else:
                self._buffers = [aligned_buffer(largest) for _ in range(NUM_BUFFERS)]
            self.host_pipeline = HostPipeline(self._pool(), self._buffers)
        if over and (not self._device_buffers or self._device_buffers[0].numel() < over):
            self._device_buffers = [
                torch.empty(over, dtype=torch.uint8, device=self._device) for _ in range(NUM_DEVICE_BUFFERS)
            ]

    def adopt(self, state: Any) -> None:
        """Copy states that a load has put into `state`, the optimizer's, to this store, and put views of the store there."""
        for p, place, _ in self._places.values():
            for key in place.shown if p in state else ():
                value = state[p].get(key)
                if isinstance(value, Tensor) and local_of(value).data_ptr() != place.shown[key].data_ptr():
                    place.shown[key].copy_(local_of(value))
                    write_back(state[p], {key: place.shown[key]}, p, local_of(p))
                    self.is_exposed = True

    def flush(self) -> None:
        """Write changes that a caller made to the states to their files."""
        for file in self.files:
            file.flush()
        self.is_exposed = False

    def todo(self, entries: Sequence[Entry]) -> list[ParamStep]:
        """Return the steps of the `entries` that are stepped chunk by chunk and have elements on this rank."""
        steps = []
        for entry in entries:
            if id(entry.param) in self._places:
                _, place, w = self._places[id(entry.param)]
                if w.shard_buffer is not None:
                    w.shard_buffer[0].grads.slots[w.shard_buffer[1]].settle()
                present = frozenset(place.shown).intersection(entry.state)
                steps.append(ParamStep(entry, place, present, w.shard_buffer))
        return steps

    def over_device(self, chunks: Sequence[Chunk]) -> DevicePipeline:
        """Return a pipeline that steps `chunks` on the device. First waits for chunks on the host, which use the same buffers."""
        self.host_pipeline.drain()
        disk_pipeline = DiskPipeline(chunks, self._pool(), self._buffers)
        return DevicePipeline(disk_pipeline, len(chunks), self._device_buffers, self._side_streams)


def _element_bytes(members: Sequence[Wanted]) -> tuple[int, int, int]:
    """Return (smallest itemsize, bytes per element on disk, bytes per element) of parameter, gradient and row, at most."""
    smallest, on_disk, in_all = [], [], []
    for w in members:
        num_bytes, (shard_buffer, i) = w.local.dtype.itemsize, w.shard_buffer or (None, 0)
        row = None if shard_buffer is None else shard_buffer.row(i)
        itemsizes = [num_bytes, num_bytes] + ([] if row is None else [row.dtype.itemsize])
        is_in_file = [
            shard_buffer is not None and shard_buffer.shard_range(i) is not None,
            shard_buffer is not None and shard_buffer.grads.slots[i].file_range is not None,
            isinstance(row, FileRange),
        ]
        smallest.append(min(itemsizes))
        on_disk.append(sum(compress(itemsizes, is_in_file)))
        in_all.append(sum(itemsizes))
    return min(smallest), max(on_disk), max(in_all)
