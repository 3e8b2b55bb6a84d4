"""Where shards rest between uses: the flat buffers that back the local tensors of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from accordion.engine.layout import Cut, Message, message

if TYPE_CHECKING:
    from accordion.engine.streams import Transfer

Allocate = Callable[[int, torch.dtype], Tensor]
"""(numel, dtype) -> a 1-D tensor of zeros."""

NO_VERSION = -1
"""In place of a version, which is 0 or more: the buffer shows no shards, or maybe old ones."""


class ShardBuffer:
    """The shards of one group of parameters between uses: what gathers read, optimizers step and gradients come to.

    `padded`: this rank's rows of each parameter as 1-D tensors of equal parts, padding included, which gathers read; `dtype` is
    theirs, None if they differ. `locals`: its real rows in the parameter's own dims, which optimizers step. `pack_row`: the
    small ones of `padded` and the tag as one 1-D tensor, None if they lie apart. `tag` travels with them: every rank of a gather
    must show the same one. `flats`: the memory of all of it. If the buffer is `off_device`, gathers copy from it to the device.
    """

    off_device = False
    is_memory_of_locals = True  # what gathers read is what optimizers write
    dtype: torch.dtype | None
    padded: list[Tensor]
    locals: list[Tensor]
    pack_row: Tensor | None
    tag: Tensor
    flats: list[Tensor]

    def num_bytes(self) -> int:
        return sum(flat.nbytes for flat in self.flats)

    def refresh(self, version: int) -> Transfer | None:
        """Bring what gathers read up to shards of `version`, which grows with each write; None where no copy is under way."""
        return None

    def read_by(self, transfer: Transfer) -> None:
        """A copy that reads this shard buffer is under way: writes must wait for it."""

    def ready(self) -> None:
        """Let the host wait for an optimizer step of these shards that is under way."""

    def synchronize(self) -> None:
        """Let the host wait until shards may be read and written."""

    def mark_stale(self) -> None:
        """Shards may have been written without their version telling."""

    def put(
        self,
        chosen: Sequence[int],
        rows: Sequence[Tensor | None],
        adding: Sequence[bool],
        after: Transfer | None = None,
    ) -> tuple[Sequence[Tensor | None], Transfer | None]:
        """Take reduced gradients of the parameters `chosen` to where those rest: local rows there, and the copy under way.

        `adding`: which of them the caller only adds to others, and then drops. `after`: the transfer that makes the rows; None if
        the compute stream has changed them since.
        """
        return rows, None


class FlatShards(ShardBuffer):
    """Shards in flat memory that `allocate` gives, one buffer a dtype.

    Those of one dtype lie in the order of `message`, so that packed shards are already the row that travels.
    """

    def __init__(self, msg: Message, rank: int, dtypes: Sequence[torch.dtype], allocate: Allocate) -> None:
        self.dtype = dtypes[0] if len(set(dtypes)) == 1 else None
        self.padded = [torch.empty(0, device="cpu")] * len(dtypes)
        self.locals = list(self.padded)
        self.pack_row, self.flats = None, []
        for dtype, chosen, part in flats_of(msg, dtypes):
            flat = allocate(part.shard_numel, dtype)
            self.flats.append(flat)
            if self.dtype is not None:
                self.pack_row = flat[msg.pack_start : msg.pack_start + msg.row_numel]
            for i, at in zip(chosen, part.shard_offsets, strict=True):
                self.padded[i] = flat[at : at + msg.cuts[i].shard_numel]
                self.locals[i] = own_storage(local_view(self.padded[i], msg.cuts[i], rank))
        self.tag = (
            allocate(msg.num_flags, dtypes[0])
            if self.pack_row is None
            else self.pack_row[msg.row_numel - msg.num_flags :]
        )


class ShardBufferMaker(Protocol):
    """What makes the shard buffer of a group: `unit` is the index of its unit, `gathered` the dtype in which it is gathered."""

    def __call__(
        self, unit: int, msg: Message, rank: int, dtypes: Sequence[torch.dtype], gathered: torch.dtype
    ) -> ShardBuffer: ...


def on_device(device: torch.device) -> ShardBufferMaker:
    """Buffers whose shards lie where the model computes."""

    def make(unit: int, msg: Message, rank: int, dtypes: Sequence[torch.dtype], gathered: torch.dtype) -> ShardBuffer:
        return FlatShards(msg, rank, dtypes, zeros_on(device))

    return make


def zeros_on(device: torch.device) -> Allocate:
    def allocate(numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    return allocate


def flats_of(msg: Message, dtypes: Sequence[torch.dtype]) -> list[tuple[torch.dtype, list[int], Message]]:
    """The buffers of a shard buffer: dtype, the shards in it by index, and how they lie."""
    result = []
    for dtype in dict.fromkeys(dtypes):
        chosen = [i for i, d in enumerate(dtypes) if d == dtype]
        part = msg if len(chosen) == len(dtypes) else message([msg.cuts[i] for i in chosen], dtype.itemsize)
        result.append((dtype, chosen, part))
    return result


def local_view(padded: Tensor, c: Cut, rank: int) -> Tensor:
    """The real rows of rank's padded 1-D shard, in the tensor's own number of dims.

    A shard lies with its cut dim first, so that real rows are a dense prefix whatever the dim: fused optimizers walk memory.
    """
    if c.dim is None:
        return padded.view(c.shape)
    rows = padded[: c.rows_of(rank) * c.row_numel]
    return rows.view(c.rows_of(rank), *c.row_shape).movedim(0, c.dim)


def own_storage(view: Tensor) -> Tensor:
    """The same memory behind a storage that begins with the view.

    A DTensor around a view with an offset reports that offset as its address, and `copy.deepcopy` and `torch.save` of a state
    dict take it for memory, or drag the whole buffer along.
    """
    if view.untyped_storage().device.type == "meta":  # a fake tensor has no address to be wrong about
        return view
    start = view.storage_offset() * view.itemsize
    part = view.untyped_storage()[start : start + view.numel() * view.itemsize]
    return view.new_empty(0).set_(part, 0, view.shape, view.stride())
