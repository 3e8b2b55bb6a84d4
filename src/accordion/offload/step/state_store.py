"""Store the optimizer states that are stepped chunk by chunk, on disk or in memory that `wrap_optimizer` allocates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accordion._torch import local_or_same
from accordion.config import DEVICE, Offload, folder_of
from accordion.engine.shards import own_storage, zeros_on
from accordion.offload.arena import ALIGN_BYTES, Arena, aligned_buffer, page_aligned
from accordion.offload.host_shards import OffDeviceShards, Resources
from accordion.offload.step.chunks import Chunk, ParamStep, StateBlock, StatePlace, chunk_numel, chunks_of
from accordion.offload.step.optimizer_copy import Entry, OptimizerCopy, write_back
from accordion.offload.step.pipelines import NUM_BUFFERS, NUM_DEVICE_BUFFERS, DevicePipeline, HostPipeline
from accordion.offload.swap_file import FileAllocator, FileRange, SwapFile, Values

log = logging.getLogger("accordion")


@dataclass(frozen=True, slots=True)
class StateRequest:
    """A parameter that is stepped chunk by chunk and needs memory for states, which `States.cover` allocates."""

    unit: int  # index of its unit
    offload: Offload
    group: int  # index of its param group
    param: Tensor
    local: Tensor  # its shard
    shard_buffer: tuple[OffDeviceShards, int] | None  # (shard buffer, index in it); None if it is on the device


class States:
    """The states of one optimizer that are stepped chunk by chunk: their memory or files, and the buffers of the steps. First
    `cover` allocates states. Before a step, if `is_exposed`, which `expose` sets, `adopt` takes over states of a load, and
    `flush` writes a caller's changes to the files. Then `todo` returns the steps, for `host_pipeline` or `step_on_device`."""

    def __init__(self, resources: Resources) -> None:
        self._resources, self._device = resources, resources.device
        self._places: dict[int, StatePlace] = {}  # by id of the parameter, which the place keeps alive
        self.blocks: list[StateBlock] = []
        self._arenas: list[Arena] = []  # which keep memory of states pinned
        self.files: list[SwapFile] = []
        self._buffers: list[Tensor] = []
        self.host_pipeline = HostPipeline(resources.pool(), [])  # for chunks that are stepped on the host
        self.host_bytes = 0  # host memory allocated for states
        self._device_buffers: list[Tensor] = []
        self._pinned: Arena | None = None
        self._total = 0  # elements of the first parameters, which determine the chunk size also for later ones
        self.is_exposed = False  # the caller has had access to states, and may have written them

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)

    def cover(self, requests: Sequence[StateRequest], optimizer_copy: OptimizerCopy) -> None:
        """Allocate states for those of the parameters `requests` that have none yet, and larger buffers for the steps if needed.
        `optimizer_copy` steps a small tensor to find which states exist. Raise `OffloadError` or `UsageError` without room."""
        by_block: dict[tuple[str, int, int, torch.dtype], list[StateRequest]] = {}
        for w in requests:
            if id(w.param) not in self._places and w.local.numel():
                by_block.setdefault((w.offload.optimizer, w.unit, w.group, w.local.dtype), []).append(w)
        if not by_block:
            return
        self._total = self._total or sum(w.local.numel() for members in by_block.values() for w in members)
        by_place: dict[str, list[tuple[StateBlock, list[StateRequest], dict[str, torch.dtype]]]] = {}
        for (place, _, group, dtype), members in by_block.items():
            on = self._device if members[0].offload.stepped_on == DEVICE else torch.device("cpu")
            dtypes = optimizer_copy.shaped_states(group, dtype, on)
            block = _unallocated_block(members, dtypes.values(), self._total)
            by_place.setdefault(place, []).append((block, members, dtypes))
        for place, blocks in by_place.items():
            num_bytes = sum(block.numel * dtype.itemsize for block, _, dtypes in blocks for dtype in dtypes.values())
            allocate = self._allocator(place, num_bytes)
            for block, members, dtypes in blocks:
                runs = {key: allocate(block.numel, dtype) for key, dtype in dtypes.items()}
                self._add(replace(block, runs=runs), members)
        self._size_buffers()
        log.info(
            "offload: optimizer states take %d bytes of host memory and %d bytes on disk, their buffers %d bytes on the "
            "host and %d on the device",
            self.host_bytes, sum(file.num_bytes for file in self.files), self.buffer_bytes,
            sum(buffer.numel() for buffer in self._device_buffers),
        )  # fmt: skip

    def _allocator(self, place: str, num_bytes: int) -> Callable[[int, torch.dtype], Values]:
        """Return a function (numel, dtype) -> new elements in the tier `place`. If that is the host or disk, allocate
        `num_bytes` for all of them now."""
        folder = folder_of(place)
        if folder is not None:
            allocator = FileAllocator(folder, num_bytes)
            self.files.append(allocator.file)
            return allocator.take
        if place == DEVICE:
            return zeros_on(self._device)
        self._arenas.append(self._resources.make_arena(num_bytes, self._device))
        self.host_bytes += num_bytes
        return self._arenas[-1].take

    def _add(self, block: StateBlock, members: Sequence[StateRequest]) -> None:
        """Add `block`, and record the place of the states of each of `members`, one parameter after the other."""
        self.blocks.append(block)
        start = 0
        for w in members:
            shown = {}
            for key, run in block.runs.items():
                own = run[start : start + w.local.numel()]
                flat = own.mapped() if isinstance(own, FileRange) else own_storage(own)
                shown[key] = flat.as_strided(w.local.shape, w.local.stride())
            self._places[id(w.param)] = StatePlace(w.param, block, start, shown, w.shard_buffer)
            start += page_aligned(w.local.numel() * block.itemsize) // block.itemsize

    def _size_buffers(self) -> None:
        # Chunks stepped on the host are limited by the number of buffers, also if nothing of them is in a file.
        largest = max(b.buffer_bytes(on_device=False) or (0 if b.steps_on_device else ALIGN_BYTES) for b in self.blocks)
        over = max((b.buffer_bytes(on_device=True) for b in self.blocks if b.steps_on_device), default=0)
        if largest and (not self._buffers or self._buffers[0].numel() < largest):
            if over and self._device.type != "cpu":
                self._pinned = self._resources.make_arena(NUM_BUFFERS * largest, self._device)
                self._buffers = [self._pinned.take(largest, torch.uint8) for _ in range(NUM_BUFFERS)]
            else:
                self._buffers = [aligned_buffer(largest) for _ in range(NUM_BUFFERS)]
            self.host_pipeline = HostPipeline(self._resources.pool(), self._buffers)
        if over and (not self._device_buffers or self._device_buffers[0].numel() < over):
            self._device_buffers = [
                torch.empty(over, dtype=torch.uint8, device=self._device) for _ in range(NUM_DEVICE_BUFFERS)
            ]

    def adopt(self, state: Any) -> None:
        """Copy states that a load has put into `state` (`optimizer.state`) to this store, and replace them there by views of
        the store. If there were any, set `is_exposed`, so that the next step flushes them to their files."""
        for place in self._places.values():
            p = place.param
            for key in place.shown if p in state else ():
                value = state[p].get(key)
                if isinstance(value, Tensor) and local_or_same(value).data_ptr() != place.shown[key].data_ptr():
                    place.shown[key].copy_(local_or_same(value))
                    write_back(state[p], {key: place.shown[key]}, p)
                    self.is_exposed = True

    def flush(self) -> None:
        """Write changes that a caller made to the states to their files, and set `is_exposed` to False."""
        for file in self.files:
            file.flush()
        self.is_exposed = False

    def todo(self, entries: Sequence[Entry]) -> list[ParamStep]:
        """Return the steps of those `entries` that are stepped chunk by chunk and have elements on this rank. First write
        changes that a caller made to gradients on disk to their files."""
        steps = []
        for entry in entries:
            place = self._places.get(id(entry.param))
            if place is not None:
                if place.shard_buffer is not None:
                    shard_buffer, i = place.shard_buffer
                    shard_buffer.slots[i].settle()
                steps.append(ParamStep(entry, place))
        return steps

    def step_on_device(self, todos: Sequence[ParamStep], step: Callable[[Chunk, list[Tensor]], None]) -> None:
        """Call `step(chunk, views)` for each chunk of `todos` on the device, after chunks that are stepped on the host. Wait
        until all chunks are copied back and written, and write the new states into `optimizer.state`."""
        self.host_pipeline.drain()  # chunks on the host use the same buffers
        pipeline = DevicePipeline(chunks_of(todos), self._resources, self._buffers, self._device_buffers)
        with torch.no_grad():
            pipeline.run(step)
        for todo in todos:
            write_back(todo.entry.state, todo.states, todo.entry.param)


def _unallocated_block(members: Sequence[StateRequest], dtypes: Iterable[torch.dtype], total: int) -> StateBlock:
    """Return a block for the states of the parameters `members`, with all sizes but with empty `runs`, for which the caller
    allocates memory. `dtypes`: dtypes of the states. `total`: elements of all parameters that are stepped chunk by chunk, which
    determine the size of chunks."""
    itemsizes = {dtype.itemsize for dtype in dtypes}
    disk_bytes = total_bytes = 0
    for w in members:
        values: list[Values] = [w.local, w.local]  # parameter and gradient
        if w.shard_buffer is not None:
            shard_buffer, i = w.shard_buffer
            values = shard_buffer.stored(i)
        itemsizes |= {v.dtype.itemsize for v in values}
        total_bytes = max(total_bytes, sum(v.dtype.itemsize for v in values))
        disk_bytes = max(disk_bytes, sum(v.dtype.itemsize for v in values if isinstance(v, FileRange)))
    itemsize = min(itemsizes)
    return StateBlock(
        runs={},
        numel=sum(page_aligned(w.local.numel() * itemsize) for w in members) // itemsize,
        itemsize=itemsize,
        max_numel=chunk_numel(itemsize, total),
        steps_on_device=members[0].offload.stepped_on == DEVICE,
        disk_bytes=disk_bytes,
        total_bytes=total_bytes,
    )
