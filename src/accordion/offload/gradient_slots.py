"""Stores the gradients of one group off the device: a slot for each parameter, in host memory or on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.shards import own_storage
from accordion.engine.streams import SideStream, Transfer
from accordion.offload.arena import page_aligned
from accordion.offload.swap_file import CopyToDisk, FileRange


class Gradients:
    """Copies the reduced gradients of one group from the device into `slots` in host memory or in a file.

    A gradient that is added to an earlier one, or whose slot is on disk, is first copied into `landing`, the group's part of
    the landing buffer, 1-D uint8, and added or written from there. All units share the landing buffer, so the engine waits for
    its copies before the next unit's gradients are reduced.
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
        self.comes_from_device = side_stream.sleeps  # on the CPU gradients are added without a copy
        self._landing: list[Tensor] = []  # for each parameter its part of the landing buffer, uint8
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
        """Start copying `rows`, gradients of the parameters with the indices `chosen`, off the device.

        Returns (for each row the tensor that will have its values, None if the row is None; the transfer, None if there is
        nothing to copy). `adding`: True for rows that the caller only adds to a gradient and then drops. `after`: the transfer
        that makes the rows; None if the compute stream has changed them since.
        """
        to: list[Tensor] = []
        source: list[Tensor] = []
        result: list[Tensor | None] = []
        writes: list[Callable[[], None]] = []
        for i, row, is_added in zip(chosen, rows, adding, strict=True):
            if row is None:
                result.append(None)
                continue
            if is_added and not self.comes_from_device:
                result.append(row)
                continue
            landing = self._landing[i][: row.nbytes].view(row.dtype).as_strided(row.shape, self._locals[i].stride())
            target = grad = landing if is_added else self.slots[i].take()
            if not is_added and (file_range := self.slots[i].file_range_of(grad)) is not None:
                target = landing
                if row.numel():
                    writes.append(partial(file_range.file.write, file_range.offset, self._landing[i]))
            to.append(target)
            source.append(row)
            result.append(grad)
        if not to:
            return result, None
        copies = partial(_torch.foreach_copy_, to, source, non_blocking=True)
        transfer = self._side_stream.copy(copies, source, "copies gradients to the host", after)
        if writes:
            transfer = cast(Transfer, CopyToDisk(transfer, writes, self._pool(), late=self._side_stream.late))
        return result, transfer


class Slot:
    """Memory for the gradient of one parameter, used in every step. `memory`: a tensor of the shape and dtype of the shard,
    mapped from `file_range` if the slot is on disk."""

    def __init__(self, memory: Tensor, file_range: FileRange | None = None) -> None:
        self._memory, self.file_range = own_storage(memory), file_range
        self.num_holders = _torch.holders_of_memory(self._memory)  # references while no gradient uses the slot

    def take(self) -> Tensor:
        """Return a tensor that shares the slot's memory, or new memory if a gradient of an earlier step still uses the slot."""
        if _torch.holders_of_memory(self._memory) > self.num_holders:
            return torch.empty_like(self._memory)
        return self._memory.detach()

    def file_range_of(self, grad: Tensor) -> FileRange | None:
        """Return the place of `grad` in the file; None if the slot is in memory, or if `grad` has other memory than the slot."""
        return None if self.file_range is None or grad.data_ptr() != self._memory.data_ptr() else self.file_range

    def settle(self) -> None:
        """If the slot is on disk, write changes that a caller made to the gradient to the file. Otherwise do nothing."""
        if self.file_range is not None and self._memory.numel():
            self.file_range.file.settle(self.file_range.offset, page_aligned(self._memory.nbytes))
