"""Where the gradients of one group rest off the device: a slot for each, in host memory or on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import cast

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.shards import own_storage
from accordion.engine.streams import SideStream, Transfer
from accordion.offload.arena import page_aligned
from accordion.offload.swap_file import FileRange


class Gradients:
    """Owns the slots of one group's gradients, and the part of the `landing` into which they come first.

    What a device adds to others lands there and is added from there; what rests on disk is written from there. All shard buffers
    share the landing, so what lands is waited for before the next unit's gradients come.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        landing: Tensor,
        locals_: Sequence[Tensor],
        side_stream: SideStream,
        pool: Callable[[], ThreadPoolExecutor],
    ) -> None:
        self.slots, self._locals, self._side_stream, self._pool = slots, locals_, side_stream, pool
        self.comes_from_device = side_stream.sleeps  # else what is added to others is added from where it is
        self._landing: list[Tensor] = []  # for each parameter its part, bytes
        at = 0
        for local in locals_:
            num_bytes = page_aligned(local.nbytes)
            self._landing.append(landing[at : at + num_bytes])
            at += num_bytes

    def put(
        self,
        chosen: Sequence[int],
        rows: Sequence[Tensor | None],
        adding: Sequence[bool],
        after: Transfer | None,
    ) -> tuple[Sequence[Tensor | None], Transfer | None]:
        """See `ShardBuffer.put`."""
        to: list[Tensor] = []
        source: list[Tensor] = []
        result: list[Tensor | None] = []
        writes: list[tuple[Slot, Tensor]] = []
        for i, row, is_added in zip(chosen, rows, adding, strict=True):
            if row is None:
                result.append(None)
                continue
            if is_added and not self.comes_from_device:
                result.append(row)
                continue
            landed = self._landing[i][: row.nbytes].view(row.dtype).as_strided(row.shape, self._locals[i].stride())
            target = given = landed if is_added else self.slots[i].take()
            if not is_added and self.slots[i].lies_at(given):
                target = landed
                if row.numel():
                    writes.append((self.slots[i], self._landing[i]))
            to.append(target)
            source.append(row)
            result.append(given)
        if not to:
            return result, None
        copies = partial(_torch.foreach_copy_, to, source, non_blocking=True)
        transfer = self._side_stream.copy(copies, source, "copies gradients to the host", after)
        if writes:
            transfer = cast(Transfer, Written(transfer, writes, None if self._side_stream.late else self._pool()))
        return result, transfer

    def file_range(self, i: int, grad: Tensor) -> FileRange | None:
        """Where `grad`, of parameter `i`, is on disk; None where it is in memory."""
        return self.slots[i].file_range if self.slots[i].lies_at(grad) else None


class Slot:
    """Owns the memory, or the place on disk, in which one gradient rests, and gives it out while nobody else has it.

    `rest`: the gradient as the outside sees it, mapped where it lies at a `file_range`.
    """

    def __init__(self, rest: Tensor, file_range: FileRange | None = None) -> None:
        self._rest, self.file_range = own_storage(rest), file_range
        self.num_holders = _torch.holders_of_memory(self._rest)  # while nobody has a gradient that lies here

    def take(self) -> Tensor:
        """A tensor over the slot; over new memory where a gradient that was given out before is still held."""
        if _torch.holders_of_memory(self._rest) > self.num_holders:
            return torch.empty_like(self._rest)
        return self._rest.detach()

    def lies_at(self, grad: Tensor) -> bool:
        return self.file_range is not None and grad.data_ptr() == self._rest.data_ptr()

    def write(self, landed: Tensor) -> None:
        assert self.file_range is not None, "only what lies on disk is written there"
        self.file_range.file.write(self.file_range.offset, landed)

    def settle(self) -> None:
        """What a caller wrote into the gradient is on disk."""
        if self.file_range is not None and self._rest.numel():
            self.file_range.file.settle(self.file_range.offset, page_aligned(self._rest.nbytes))


class Written:
    """Gradients on their way to the host and from there to the disk; answers as the `Transfer` of their copy does."""

    def __init__(self, transfer: Transfer, writes: list[tuple[Slot, Tensor]], pool: ThreadPoolExecutor | None) -> None:
        self._transfer, self._writes = transfer, writes
        self._started: Future[list[Future[None]]] | None = None
        if pool is not None:  # else nothing has arrived before it is waited for
            self._started = pool.submit(self._start, pool)

    def _start(self, pool: ThreadPoolExecutor) -> list[Future[None]]:
        """Once they are on the host: one thread waits for all, the others have work meanwhile."""
        self._transfer.block()
        return [pool.submit(slot.write, landed) for slot, landed in self._writes]

    def synchronize(self) -> None:
        self._transfer.synchronize()
        if self._started is not None:
            for future in self._started.result():
                future.result()
        else:
            for slot, landed in self._writes:
                slot.write(landed)
        self._started, self._writes = None, []
