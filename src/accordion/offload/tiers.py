"""Memory tiers (device, host, disk) of a model: create its shard buffers in the tiers that `Offload` names, for the engine."""

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
from accordion.offload.activations import ActivationOffload, OffloadedInput
from accordion.offload.arena import Arena, ArenaMaker
from accordion.offload.budget import NUM_STAGING_BUFFERS, Shape, host_needs, on_disk
from accordion.offload.disk_shards import DiskPlace, DiskShards, StagingBuffer
from accordion.offload.host_shards import HostShards, OffDeviceShards, OffloadedGroup, Resources, paged_bytes
from accordion.offload.step.pipelines import NUM_BUFFERS
from accordion.offload.step.state_store import States
from accordion.offload.swap_file import FileAllocator, check_folder

log = logging.getLogger("accordion")


class Tiers:
    """Memory tiers of one model on one rank. Call this object to create the shard buffer of a group of parameters. It also owns
    the model's threads, optimizer states and activation stores, which are created at their first use.

    The constructor allocates the host memory and the files for the shards and gradients of all offloaded units. It also changes
    how `GradScaler.unscale_` handles offloaded gradients in this process. Raises `UsageError` or `OffloadError` if memory or
    disk space is lacking. `offloads`, `shapes`: one entry per unit, by index: its tiers, with budgets applied, and its groups.
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
        self._order = UnitOrder()  # the order in which the engine uses the units
        self.waited_s = 0.0  # time that callers, forwards and backwards have waited for optimizer steps
        self.states: WeakKeyDictionary[Optimizer, States] = WeakKeyDictionary()
        for folder in {folder_of(place) for o in offloads for place in (o.optimizer, o.activations)} - {None}:
            assert folder is not None
            check_folder(folder)
        file_bytes = on_disk(offloads, shapes)
        # Of the files that hold parameters and gradients, by folder; `get(None)` is None.
        self.allocators: dict[Path | None, FileAllocator] = {
            folder: FileAllocator(folder, num_bytes) for folder, num_bytes in file_bytes.items()
        }
        _torch.settle_before_unscale()
        needs = host_needs(offloads, shapes)
        self.arena = make_arena(needs.total, context.device)
        self._landing = self.arena.take(needs.landing, torch.uint8, zeros=False)
        self._staging_buffers = [StagingBuffer(self.arena.take(n, torch.uint8)) for n in needs.staging_buffers]
        self._landing_used: dict[int, int] = {}  # unit -> bytes of the landing buffer that its groups have taken
        self._staging_used: dict[int, int] = {}  # unit -> bytes of its staging buffer that its groups have taken
        log.info(
            "offload: parameters and gradients take %d bytes on the host and %d on disk",
            needs.total, sum(file_bytes.values()),
        )  # fmt: skip

    def states_of(self, optimizer: Optimizer) -> States:
        """Return the store for those states of `optimizer` that are stepped chunk by chunk. The first call creates it."""
        if optimizer not in self.states:
            self.states[optimizer] = States(self._resources())
        return self.states[optimizer]

    @cached_property
    def activation_offload(self) -> ActivationOffload:
        return ActivationOffload(self._resources())

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """Threads that read and write files, one chunk each at a time, and step such chunks. Created at the first use."""
        return self._thread_pool(NUM_BUFFERS, "accordion-disk")

    @cached_property
    def stepper(self) -> ThreadPoolExecutor:
        """One thread that steps units one after the other; the kernels of a step start threads of their own."""
        return self._thread_pool(1, "accordion-step")

    def _thread_pool(self, num_threads: int, name: str) -> ThreadPoolExecutor:
        # The current device of a new thread is the first one, and its events would create a context there.
        device = self._context.device
        initializer = None if device.type == "cpu" else partial(torch.get_device_module(device).set_device, device)
        return ThreadPoolExecutor(num_threads, name, initializer=initializer)

    def follow(self, unit: Unit, order: UnitOrder) -> None:
        """Register `unit`, by a weak reference, and the `order` in which the engine uses units. `read_ahead` needs both."""
        self._units[unit.index], self._order = weakref.ref(unit), order

    def shard_buffer_of(self, unit: Unit, param: Tensor) -> tuple[OffDeviceShards, int] | None:
        """Return (shard buffer of the parameter `param`, its index there); None if it is on the device, or not in `unit`."""
        for group in unit.groups:
            for i, candidate in enumerate(group.params):
                if candidate.sharded is param:
                    return (group.shard_buffer, i) if isinstance(group.shard_buffer, OffDeviceShards) else None
        return None

    def read_ahead(self, index: int) -> None:
        """Start reading the shards of the next unit, which is gathered after unit `index`, from disk into its staging buffer,
        on threads. Shards that are being stepped are not read. First wait for earlier uses of that buffer. Do nothing if the
        next unit is not known, or has the same buffer as unit `index`."""
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
        """Create and return the shard buffer of one group of parameters, on the device unless its unit is offloaded.

        Args: `unit`: index of the unit; `msg`: layout of the shards; `rank`: this rank's index among the group's ranks;
        `dtypes`: dtype in which each shard of `msg` is stepped; `gathered`: dtype in which all are gathered.
        """
        offload = self.offloads[unit]
        if not offload.offloads:
            return on_device(self._context.device)(unit, msg, rank, dtypes, gathered)
        start = self._landing_used.get(unit, 0)
        self._landing_used[unit] = stop = start + paged_bytes(msg, dtypes)
        group = OffloadedGroup(
            msg=msg,
            rank=rank,
            dtypes=dtypes,
            gathered=gathered,
            allocate=self.arena.take,
            landing=self._landing[start:stop],
            grads=self.allocators.get(folder_of(offload.rest_of_grads)),
            resources=self._resources(),
        )
        allocator, staging_buffer = self.allocators.get(folder_of(offload.params)), self._staging_buffer_of(unit)
        if allocator is None or staging_buffer is None:
            return HostShards(group, keeps=offload.params == DEVICE)
        start = self._staging_used.get(unit, 0)
        self._staging_used[unit] = start + paged_bytes(msg, [gathered] * len(dtypes))
        read_ahead = partial(self.read_ahead, unit)
        place = DiskPlace(
            unit=unit, allocator=allocator, staging_buffer=staging_buffer, start=start, read_ahead=read_ahead
        )
        return DiskShards(group, place)

    def _resources(self) -> Resources:
        return Resources(
            device=self._context.device,
            fetch_stream=self._context.fetch_stream,
            store_stream=self.store_stream,
            pool=lambda: self.pool,
            make_arena=self._make_arena,
        )


def activation_offload_of(engine: Engine, unit: int) -> Callable[[Tensor], OffloadedInput] | None:
    """Return the function (input) -> `OffloadedInput` for the unit with index `unit`; None if inputs stay on the device."""
    tiers = engine.context.shard_buffers
    if not isinstance(tiers, Tiers) or tiers.offloads[unit].activations == DEVICE:
        return None
    return partial(tiers.activation_offload.offload, place=tiers.offloads[unit].activations)
