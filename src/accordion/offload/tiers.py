"""Where each unit's shards rest, as `Offload` says: the maker of shard buffers that `shard` hands to the engine."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from accordion import _torch
from accordion.config import DEVICE, Offload, folder_of
from accordion.engine.context import ShardingContext
from accordion.engine.engine import Engine
from accordion.engine.layout import Message
from accordion.engine.order import BACKWARD, FORWARD, UnitOrder
from accordion.engine.shards import ShardBuffer, on_device
from accordion.engine.streams import SideStream
from accordion.engine.unit import Unit
from accordion.offload.activations.offload import ActivationOffload, OffloadedInput
from accordion.offload.arena import Arena, ArenaMaker
from accordion.offload.budget import NUM_STAGING_BUFFERS, Shape, host_needs, on_disk
from accordion.offload.disk_shards import DiskShards, StagingBuffer
from accordion.offload.host_shards import HostShards, Means, OffDeviceShards, paged_bytes
from accordion.offload.step.pipelines import NUM_BUFFERS
from accordion.offload.step.state_store import States
from accordion.offload.step.step_in_backward import InBackward
from accordion.offload.swap_file import FileAllocator, check_folder

log = logging.getLogger("accordion")


class Tiers:
    """Owns the host memory, the files of shards and gradients and the streams of a model; each group calls it for its buffer.

    `offloads`, `shapes`: of each unit. All that shards and gradients will ever take is counted and allocated now.
    """

    def __init__(
        self,
        offloads: Sequence[Offload],
        shapes: Sequence[Sequence[Shape]],
        context: ShardingContext,
        make_arena: ArenaMaker = Arena,
    ) -> None:
        self.offloads, self._context, self._make_arena = offloads, context, make_arena
        self.late = context.gather_stream.late
        self.store_stream = SideStream(context.device, context.waiter, self.late).for_threads()
        self._units: dict[int, weakref.ref[Unit]] = {}
        self._order = UnitOrder()  # in which the engine uses them
        self.in_backward: InBackward | None = None  # where some unit is stepped there
        self.waited_s = 0.0  # for which callers, forwards and backwards have stood still for a step
        self.states: WeakKeyDictionary[Optimizer, States] = WeakKeyDictionary()
        for folder in {folder_of(place) for o in offloads for place in (o.optimizer, o.activations)} - {None}:
            assert folder is not None
            check_folder(folder)
        self._checksums = any(offload.checksums for offload in offloads)
        self._shelves = {
            folder: FileAllocator(folder, num_bytes, checksums=self._checksums)
            for folder, num_bytes in on_disk(offloads, shapes).items()
        }
        _torch.settle_before_unscale()
        needs = host_needs(offloads, shapes)
        self.arena = make_arena(needs.total, context.device)
        self._landing = self.arena.take(needs.landing, torch.uint8, zeros=False)
        self._staging_buffers = [
            StagingBuffer(self.arena.take(num_bytes, torch.uint8)) for num_bytes in needs.staging_buffers
        ]
        self._landed: dict[int, int] = {}  # bytes of the landing that groups of a unit have, by unit
        self._staged: dict[int, int] = {}  # and of their staging buffer
        kind = "pinned" if context.device.type != "cpu" else "ordinary"
        counts = [sum(map(test, offloads)) for test in (lambda o: o.offloads, lambda o: o.folder is not None)]
        log.info(
            "offload: %d bytes of %s host memory for %d of %d units, the optimizer's states of %d on disk, %d bytes of "
            "parameters and gradients there",
            needs.total, kind, counts[0], len(offloads), counts[1],
            sum(allocator.file.num_bytes for allocator in self._shelves.values()),
        )  # fmt: skip

    @property
    def files(self) -> list[FileAllocator]:
        """Of parameters and gradients."""
        return list(self._shelves.values())

    def states_of(self, optimizer: Optimizer) -> States:
        """Where an optimizer's states rest whose step is streamed, made at the first use."""
        if optimizer not in self.states:
            side_streams = self._context.fetch_stream, self.store_stream
            self.states[optimizer] = States(
                self._context.device, lambda: self.pool, side_streams, self._checksums, self._make_arena
            )
        return self.states[optimizer]

    @cached_property
    def activation_offload(self) -> ActivationOffload:
        """Where inputs of recomputed units wait off the device."""
        side_streams = self._context.fetch_stream, self.store_stream
        return ActivationOffload(
            self._context.device, side_streams, lambda: self.pool, self._checksums, self._make_arena
        )

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """The threads that read and write files, a chunk each."""
        return self._made(NUM_BUFFERS, "accordion-disk")

    @cached_property
    def stepper(self) -> ThreadPoolExecutor:
        """The thread on which units are stepped, one after the other: the kernels of a step have threads of their own."""
        return self._made(1, "accordion-step")

    def _made(self, num_threads: int, name: str) -> ThreadPoolExecutor:
        """Threads that wait for events of this rank's device."""
        return ThreadPoolExecutor(num_threads, name, initializer=partial(_choose, self._context.device))

    def follow(self, unit: Unit, order: UnitOrder) -> None:
        """Know a unit by its index, and the order in which units are used, for what is read ahead."""
        self._units[unit.index], self._order = weakref.ref(unit), order

    def shard_buffer_of(self, unit: Unit, param: Tensor) -> tuple[OffDeviceShards, int] | None:
        """The shard buffer of a parameter and which of its shards it is; None where it rests on the device."""
        for group in unit.groups:
            for i, mine in enumerate(group.params):
                if mine.sharded is param:
                    return (group.shard_buffer, i) if isinstance(group.shard_buffer, OffDeviceShards) else None
        return None

    def read_ahead(self, index: int) -> None:
        """Begin to read the shards of the unit that is gathered after this one, where they rest on disk and stand still."""
        unit = self._units[index]() if index in self._units else None
        if unit is None:
            return
        phase = BACKWARD if _torch.is_in_backward() else FORWARD
        following = self._order.after(phase, index)
        if following is None or self._staging_buffer_of(following) is self._staging_buffer_of(index):
            return
        other = self._units[following]() if following in self._units else None
        for group in other.groups if other is not None else ():
            if isinstance(group.shard_buffer, DiskShards) and not group.shard_buffer.steps:
                group.shard_buffer.begin_read(group.version())

    def _staging_buffer_of(self, unit: int) -> StagingBuffer | None:
        return self._staging_buffers[unit % NUM_STAGING_BUFFERS] if self._staging_buffers else None

    def __call__(
        self, unit: int, msg: Message, rank: int, dtypes: Sequence[torch.dtype], gathered: torch.dtype
    ) -> ShardBuffer:
        offload = self.offloads[unit]
        if not offload.offloads:
            return on_device(self._context.device)(unit, msg, rank, dtypes, gathered)
        start = self._landed.get(unit, 0)
        self._landed[unit] = stop = start + paged_bytes(msg, dtypes)
        means = Means(
            allocate=self.arena.take,
            landing=self._landing[start:stop],
            grads=self._allocator(offload.rest_of_grads),
            device=self._context.device,
            fetch_stream=self._context.fetch_stream,
            store_stream=self.store_stream,
            pool=lambda: self.pool,
        )
        allocator, staging_buffer = self._allocator(offload.params), self._staging_buffer_of(unit)
        if allocator is None or staging_buffer is None:
            return HostShards(msg, rank, dtypes, gathered, means, keeps=offload.params == DEVICE)
        start = self._staged.get(unit, 0)
        self._staged[unit] = start + paged_bytes(msg, [gathered] * len(dtypes))
        tiers = weakref.ref(self)

        def ahead() -> None:
            alive = tiers()
            if alive is not None:
                alive.read_ahead(unit)

        return DiskShards(
            msg,
            rank,
            dtypes,
            gathered,
            means,
            allocator=allocator,
            staging_buffer=(staging_buffer, start),
            place=(unit, ahead),
        )

    def _allocator(self, place: str) -> FileAllocator | None:
        folder: Path | None = folder_of(place)
        return None if folder is None else self._shelves[folder]


def activation_offload_of(engine: Engine, unit: int) -> Callable[[Tensor], OffloadedInput] | None:
    """What takes the inputs of a recomputed unit off the device; None where they stay."""
    tiers = engine.context.shard_buffers
    if not isinstance(tiers, Tiers) or tiers.offloads[unit].activations == DEVICE:
        return None
    return partial(tiers.activation_offload.offload, place=tiers.offloads[unit].activations)


def _choose(device: torch.device) -> None:
    """A new thread is at the first device, where its events would make a context."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
