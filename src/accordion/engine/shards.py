"""The memory of shards between uses: flat buffers of which the local tensors of sharded parameters are views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from accordion.engine.layout import Cut, Message, message

if TYPE_CHECKING:
    from accordion.engine.streams import Transfer

Allocate = Callable[[int, torch.dtype], Tensor]
"""(numel, dtype) -> a tensor (numel,) of zeros."""

NO_VERSION = -1
"""Version of a buffer that has no values of the shards, or possibly old ones; versions of shards are 0 or more."""


class ShardBuffer:
    """The shards of one group: gathers read them, optimizers step them, and reduced gradients are stored with them.

    `padded`: this rank's shard of each parameter as 1-D, padded to its chunk, for gathers; `dtype` is theirs, None if they
    differ. `locals`: the real rows in the parameter's own dims, for optimizers. `pack_row`: the packed shards and the tag as
    one 1-D tensor, None if not contiguous. `tag` (num_flags,): equal on all ranks of a gather. `flats`: the memory of these.
    """

    off_device = False  # True if gathers first copy to the device
    is_memory_of_locals = True  # `padded` and `locals` share memory
    dtype: torch.dtype | None
    padded: list[Tensor]
    locals: list[Tensor]
    pack_row: Tensor | None
    tag: Tensor
    flats: list[Tensor]

    def num_bytes(self) -> int:
        return sum(flat.nbytes for flat in self.flats)

    def refresh(self, version: int) -> Transfer | None:
        """Update the memory that gathers read to `version`, which grows with each write; return the copy under way, or None."""
        return None

    def read_by(self, transfer: Transfer) -> None:
        """Record that `transfer` reads this buffer, so that later writes wait for it."""

    def ready(self) -> None:
        """Let the host wait for an optimizer step of these shards that is under way."""

    def synchronize(self) -> None:
        """Let the host wait until shards may be read and written."""

    def mark_stale(self) -> None:
        """Record that shards may have been written although their version did not change."""

    def put(
        self,
        chosen: Sequence[int],
        rows: Sequence[Tensor | None],
        adding: Sequence[bool],
        after: Transfer | None = None,
    ) -> tuple[Sequence[Tensor | None], Transfer | None]:
        """Move reduced gradients `rows` of the parameters `chosen` to their tier; return them there, and the copy or None.

        `adding`: True for rows that the caller only adds to a gradient and then drops. `after`: the transfer that makes the
        rows; None if the compute stream has changed them since.
        """
        return rows, None


class FlatShards(ShardBuffer):
    """Shards in flat buffers from `allocate`, one per dtype.

    Each buffer is in the order of `message`, so that the packed shards already are the row to send.
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
    """Callback that makes the shard buffer of a group: `unit` is the unit's index, `gathered` the dtype of its gathers."""

    def __call__(
        self, unit: int, msg: Message, rank: int, dtypes: Sequence[torch.dtype], gathered: torch.dtype
    ) -> ShardBuffer: ...


def on_device(device: torch.device) -> ShardBufferMaker:
    """Return a `ShardBufferMaker` for shards that stay on `device`."""

    def make(unit: int, msg: Message, rank: int, dtypes: Sequence[torch.dtype], gathered: torch.dtype) -> ShardBuffer:
        return FlatShards(msg, rank, dtypes, zeros_on(device))

    return make


def zeros_on(device: torch.device) -> Allocate:
    def allocate(numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    return allocate


def flats_of(msg: Message, dtypes: Sequence[torch.dtype]) -> list[tuple[torch.dtype, list[int], Message]]:
    """Return (dtype, indices of its shards, their layout) for each flat buffer of a shard buffer."""
    result = []
    for dtype in dict.fromkeys(dtypes):
        chosen = [i for i, d in enumerate(dtypes) if d == dtype]
        part = msg if len(chosen) == len(dtypes) else message([msg.cuts[i] for i in chosen], dtype.itemsize)
        result.append((dtype, chosen, part))
    return result


def local_view(padded: Tensor, c: Cut, rank: int) -> Tensor:
    """Return the real rows of a rank's padded 1-D shard as a view with the tensor's own dims.

    A shard is stored with its cut dim first, so that real rows are a dense prefix: fused optimizers read memory in order.
    """
    if c.dim is None:
        return padded.view(c.shape)
    rows = padded[: c.rows_of(rank) * c.row_numel]
    return rows.view(c.rows_of(rank), *c.row_shape).movedim(0, c.dim)


def own_storage(view: Tensor) -> Tensor:
    """Return `view` with a storage of its own that begins at the view's first element; the memory is shared.

    A DTensor around a view with an offset would report the offset as its address, which `copy.deepcopy` and `torch.save` of a
    state dict take for memory; or they would copy the whole buffer.
    """
    if view.untyped_storage().device.type == "meta":  # a fake tensor has no address to be wrong about
        return view
    start = view.storage_offset() * view.itemsize
    part = view.untyped_storage()[start : start + view.numel() * view.itemsize]
    return view.new_empty(0).set_(part, 0, view.shape, view.stride())
