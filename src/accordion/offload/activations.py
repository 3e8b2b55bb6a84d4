"""Copies the inputs of recomputed units to host memory or to a file during the forward, and back for the backward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from accordion.config import folder_of
from accordion.engine.communicator import Communicator, Pending
from accordion.engine.streams import Steps, Transfer
from accordion.errors import OffloadError, UsageError
from accordion.offload.arena import ALIGN_BYTES, Arena, page_aligned
from accordion.offload.host_shards import Resources
from accordion.offload.swap_file import CopyToDisk, DiskCalls, SwapFile, in_chunks

GROWTH = 8  # a buffer that replaces a smaller one is larger than requested by 1 / GROWTH
NUM_STAGES = 3  # host buffers for a file: one is copied into, one is written or read, one waits
STORES, FETCHES = "copies activations to the host", "copies activations to the device"


class ActivationOffload:
    """Copies inputs of recomputed units of one model into stores on the host or on disk, which are created at the first use.
    `offload` copies an input away, and returns an `OffloadedInput`, whose `tensor` copies it back."""

    def __init__(self, resources: Resources) -> None:
        self.resources = resources
        self._stores: dict[str, HostActivationStore | DiskActivationStore] = {}
        self._last: weakref.ref[OffloadedInput] | None = None
        self._storing: tuple[Transfer | CopyToDisk, Tensor, int] | None = None  # copy under way, input and its version

    def offload(self, tensor: Tensor, place: str) -> OffloadedInput:
        """Start copying `tensor`, the input of a unit, to `place`, "host" or "disk:FOLDER". Return an object that copies it
        back.

        First calls `finish_store` for the previous input, so that the device memory of that one can be freed. Raises
        `UsageError` if host memory is lacking, and `OffloadError` if the disk has no room or an earlier write failed.
        """
        self.finish_store()
        if place not in self._stores:
            folder, resources = folder_of(place), self.resources
            self._stores[place] = (
                HostActivationStore(resources) if folder is None else DiskActivationStore(folder, resources)
            )
        slot = self._stores[place].take(room_for(tensor.nbytes))
        offloaded = OffloadedInput(self, tensor, slot, self._last)
        self._last, self._storing = weakref.ref(offloaded), (offloaded.storing, tensor, tensor._version)
        return offloaded

    def finish_store(self) -> None:
        """Make the compute stream wait for the last started copy to a store, and drop the reference to its input. Do nothing if
        no copy was started since the last call. Raise `UsageError` if the input was changed in place meanwhile."""
        storing, self._storing = self._storing, None
        if storing is not None:
            move, tensor, version = storing
            move.land()
            if tensor._version != version:
                raise UsageError(
                    f"the input {tuple(tensor.shape)} of a recomputed unit was changed in place while it was copied "
                    "to the host; change a clone of it, or leave out Offload(activations=...)."
                )


class OffloadedInput:
    """An input of a recomputed unit that is stored in `slot`; deleting this object frees the slot. The constructor starts the
    copy. Call `leave` when the unit's forward ends, and `tensor` in the backward. `before`: the offloaded input before this one
    in the forward, which the backward needs next; None for the first."""

    def __init__(
        self,
        activation_offload: ActivationOffload,
        tensor: Tensor,
        slot: HostSlot | DiskSlot,
        before: weakref.ref[OffloadedInput] | None,
    ) -> None:
        self._owner, self._slot, self._before = activation_offload, slot, before
        self._fetched: tuple[Transfer, Tensor] | None = None
        self._live: Tensor | None = tensor  # until the unit's forward has ended
        self._like = torch.empty_like(tensor, device="meta")  # its shape and dtype, and its strides if it is dense
        self.storing = slot.store(tensor, self._like)

    def leave(self) -> None:
        """Drop the reference to the input on the device: `tensor` then returns a copy. Call it when the unit's forward ends."""
        self._live = None

    def fetch(self) -> None:
        """Start copying the input back to the device. Do nothing before `leave`, or if that copy was started already."""
        if self._live is None and self._fetched is None:
            self._owner.finish_store()
            tensor = torch.empty_strided(
                self._like.shape, self._like.stride(), dtype=self._like.dtype, device=self._owner.resources.device
            )
            self._fetched = self._slot.fetch(tensor), tensor

    def tensor(self) -> Tensor:
        """Return the input itself before `leave`. After `leave`, return a copy on the device, a leaf that requires a gradient,
        and start fetching `before`. An `OffloadError` is reported to the other ranks and raised."""
        if self._live is not None:
            return self._live
        self._owner._last = None  # a backward runs: the next offloaded input is the first one of a new forward
        try:
            with torch.no_grad():
                self.fetch()
                before = None if self._before is None else self._before()  # the backward needs it next
                if before is not None:
                    before.fetch()
                assert self._fetched is not None, "fetch() was called"
                move, tensor = self._fetched
                move.land()
        except OffloadError as error:  # the other ranks may be waiting for this rank in the backward
            self._owner.resources.fetch_stream.waiter.tell(f"failed: {type(error).__name__}: {error}")
            raise
        self._fetched = None
        return tensor.requires_grad_()

    def __del__(self) -> None:
        self._slot.free(None if self._fetched is None else self._fetched[0])


class HostActivationStore:
    """Host memory for inputs of recomputed units: one buffer for each input, which a later input reuses after it is freed."""

    def __init__(self, resources: Resources) -> None:
        self.resources = resources
        self.host_bytes = 0
        self.free: list[Arena] = []  # buffers without an input; slots put theirs back, on any thread

    def take(self, num_bytes: int) -> HostSlot:
        """Return a slot of at least `num_bytes`, in the smallest free buffer that fits, or else in a new one. If there are only
        smaller free buffers, the new one replaces the largest of them. Raises `UsageError` if memory is lacking."""
        fits = [buffer for buffer in self.free if buffer.num_bytes >= num_bytes]
        if fits:
            buffer = min(fits, key=lambda buffer: buffer.num_bytes)
            self.free.remove(buffer)
            return HostSlot(self, buffer)
        if self.free:  # inputs have grown: replace the largest free buffer by a larger one
            largest = max(self.free, key=lambda buffer: buffer.num_bytes)
            self.free.remove(largest)
            self.host_bytes -= largest.num_bytes
            del largest
            # Larger than requested: if lengths grew a little in each step, each step would pin new memory and wait for it.
            num_bytes = page_aligned(num_bytes + num_bytes // GROWTH)
        buffer = self.resources.make_arena(num_bytes, self.resources.device)
        self.host_bytes += num_bytes
        return HostSlot(self, buffer)


class HostSlot:
    """The place of one input in host memory, a `buffer` of `store`, made by `HostActivationStore.take`. Call `store` first,
    `fetch` for the backward, and `free` at the end."""

    def __init__(self, store: HostActivationStore, buffer: Arena) -> None:
        self._store, self._buffer = store, buffer

    def store(self, tensor: Tensor, like: Tensor) -> Transfer:
        """Start copying `tensor`, the input, to the host, and return the transfer. `like`: a tensor with its shape and dtype,
        and the strides with which it is stored."""
        return self._store.resources.store_stream.copy(
            partial(_copy, shaped(self._buffer.memory, like), tensor), [tensor], STORES
        )

    def fetch(self, into: Tensor) -> Transfer:
        """Start copying the input to `into`, a device tensor with the stored shape, dtype and strides. Return the transfer."""
        copy = partial(_copy, into, shaped(self._buffer.memory, into))
        return self._store.resources.fetch_stream.copy(copy, [into], FETCHES)

    def free(self, fetch: Transfer | None) -> None:
        """Free the buffer; callable on any thread. `fetch`: a copy to the device that may not have ended, or None."""
        # The host must not wait for the copy: the device may be waiting for ranks that never arrive. Later stores wait for it.
        if fetch is not None:
            fetch.join(self._store.resources.store_stream)
            fetch.land()
        self._store.free.append(self._buffer)


class DiskActivationStore:
    """A file for inputs of recomputed units, which are written and read through `NUM_STAGES` host buffers. The file grows if no
    free range is large enough: in the first forwards, and when inputs get larger. `DiskSlot.free` adds to `released`."""

    def __init__(self, folder: Path, resources: Resources) -> None:
        self.resources, self.file = resources, SwapFile(folder, 0)
        self._free: list[tuple[int, int]] = []  # (start, stop) in bytes of free ranges, sorted, adjacent ones joined
        # Ranges to which slots add on any thread; each is free when its reads and writes have ended.
        self.released: deque[tuple[int, int, list[DiskCalls]]] = deque()
        self._stages = [Stage() for _ in range(NUM_STAGES)]  # the least recently used first

    def take(self, num_bytes: int) -> DiskSlot:
        """Return a slot of `num_bytes`, a multiple of the page size: in the smallest free range that fits, or else at the end
        of the file, which grows. First waits for reads and writes of freed ranges. Raises `OffloadError` without room."""
        self._collect()
        fits = [(stop - start, start, stop) for start, stop in self._free if stop - start >= num_bytes]
        if fits:
            _, start, stop = min(fits)
            self._free.remove((start, stop))
            if start + num_bytes < stop:
                self._free = joined([*self._free, (start + num_bytes, stop)])
            return DiskSlot(self, start, num_bytes)
        end = self.file.num_bytes
        start = self._free[-1][0] if self._free and self._free[-1][1] == end else end
        self.file.grow(start + num_bytes - end)
        if start < end:
            self._free.pop()
        return DiskSlot(self, start, num_bytes)

    def _collect(self) -> None:
        while self.released:
            start, stop, moves = self.released.popleft()
            for move in moves:
                move.settle()
            self._free.append((start, stop))
        self._free = joined(self._free)

    def stage(self, num_bytes: int) -> Stage:
        """Return the least recently used stage, with a buffer of at least `num_bytes`; a smaller buffer is replaced. First
        waits for the uses of that stage, and raises the error of a failed one."""
        self._stages.append(self._stages.pop(0))
        stage = self._stages[-1]
        stage.content = None
        while stage.uses:  # an error is raised once
            stage.uses.pop(0)()
        if stage.buffer is None or stage.buffer.num_bytes < num_bytes:
            stage.buffer = None  # free the smaller one before allocating
            stage.buffer = self.resources.make_arena(num_bytes, self.resources.device)
        return stage


@dataclass(eq=False, slots=True)
class Stage:
    """A buffer of host memory through which inputs are copied between the device and the file, one at a time. The slot that
    gets a stage by `DiskActivationStore.stage` sets `content` and adds to `uses`."""

    buffer: Arena | None = None
    content: DiskSlot | None = None  # whose input is in the buffer
    uses: list[Callable[[], None]] = field(default_factory=list)  # each waits for one use of the buffer

    def memory(self, num_bytes: int) -> Tensor:
        assert self.buffer is not None, "stage() has allocated it"
        return self.buffer.memory[:num_bytes]


class DiskSlot:
    """Place of one input in the file, `num_bytes` from byte `start` on, with the reads and writes of it that are under way.
    Made by `DiskActivationStore.take`, and used like a `HostSlot`."""

    def __init__(self, store: DiskActivationStore, start: int, num_bytes: int) -> None:
        self.activation_store, self.start, self.num_bytes = store, start, num_bytes
        self._stage: Stage | None = None
        self._stored: CopyToDisk | None = None
        self._reads: DiskCalls | None = None
        self._is_wanted = True

    def store(self, tensor: Tensor, like: Tensor) -> CopyToDisk:
        """Start copying `tensor` to a host buffer and then writing it to the file; return the copy. `like`: a tensor with its
        shape and dtype, and the strides with which it is stored."""
        store, resources = self.activation_store, self.activation_store.resources
        self._stage = stage = store.stage(self.num_bytes)
        memory, stage.content = stage.memory(self.num_bytes), self
        copy = resources.store_stream.copy(partial(_copy, shaped(memory, like), tensor), [tensor], STORES)
        writes = in_chunks(store.file.write, self.start, memory)
        self._stored = CopyToDisk(copy, writes, resources.pool(), late=resources.store_stream.late)
        stage.uses.append(partial(self._end, self._stored.synchronize))
        return self._stored

    def fetch(self, into: Tensor) -> Transfer:
        """Start copying the input to `into`, on the device, and return the transfer. The source is the host buffer through
        which the input was stored. If another input has that buffer now, the source is the file; then raises `OffloadError` if
        writing the input failed."""
        assert self._stage is not None, "an input is stored before it is fetched"
        assert self._stored is not None, "an input is stored before it is fetched"
        store, stage, reads = self.activation_store, self._stage, None
        if stage.content is not self:
            self._stored.synchronize()  # the write has ended, because its buffer was reused: this raises its error
            stage = store.stage(self.num_bytes)
            calls = in_chunks(store.file.read, self.start, stage.memory(self.num_bytes))
            reads = DiskCalls(store.resources.pool(), calls)
        memory, self._reads = shaped(stage.memory(self.num_bytes), into), reads

        def steps() -> Steps:  # on a device the copy waits for compute work that was started before the reads only
            if reads is not None:
                yield Pending(Communicator(None, torch.device("cpu")), [reads])
            into.copy_(memory, non_blocking=True)

        transfer = store.resources.fetch_stream.start(steps(), [into], FETCHES)
        stage.uses.append(partial(self._end, transfer.synchronize))
        return transfer

    def _end(self, wait: Callable[[], None]) -> None:
        """Call `wait`. Ignore an `OffloadError` that it raises if `free` was called before."""
        try:
            wait()
        except OffloadError:
            if self._is_wanted:
                raise

    def free(self, fetch: Transfer | None) -> None:
        """Free the range, and cancel writes not begun. Callable on any thread. `fetch`: a copy that may not have ended."""
        self._is_wanted = False
        moves = [] if self._stored is None else self._stored.cancel()
        if fetch is not None:
            self._end(fetch.land)  # the next use of the stage waits for the copy
        if self._reads is not None:
            moves.append(self._reads)
        self.activation_store.released.append((self.start, self.start + self.num_bytes, moves))


def joined(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges `parts`, each (start, stop), sorted and with adjacent ones joined."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(parts):
        if result and result[-1][1] == start:
            start = result.pop()[0]
        result.append((start, stop))
    return result


def shaped(memory: Tensor, like: Tensor) -> Tensor:
    """Return a view of the first bytes of `memory`, 1-D uint8, with dtype, shape and strides of the dense tensor `like`."""
    return memory[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source.detach(), non_blocking=True)


def room_for(num_bytes: int) -> int:
    """Return the bytes that an input of `num_bytes` takes in a store: whole pages, at least one."""
    return max(page_aligned(num_bytes), ALIGN_BYTES)
