"""The memory of this rank's shards: flat buffers, of which the local tensors of sharded parameters are views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accordion.engine.layout import Cut, Message, message

if TYPE_CHECKING:
    from accordion.engine.streams import Transfer

Allocate = Callable[[int, torch.dtype], Tensor]
"""Function (numel, dtype) -> a new tensor of zeros, of shape (numel,)."""

NO_VERSION = -1
"""Version of a copy of shards that is empty or may be old. Versions of shards are 0 or more, and grow with each write."""


class ShardBuffer:
    """This rank's shards of one group of parameters: gathers read them, and optimizers step them. A subclass, or the code that
    makes the object, sets the attributes. The methods do nothing, as for shards on the device; subclasses override them.

    `padded`: each shard as 1-D, padded to an equal size on all ranks, for gathers; `dtype` is theirs, None if they differ.
    `locals`: the shards without padding, in the parameters' own dims, for optimizers. `pack_row`: small shards and the tag as one
    1-D tensor to send, None if they are not contiguous. `tag`: 1-D tensor of the group's `tag`, derived from the unit's index,
    which is sent to check that all ranks gather the same unit. `flats`: the memory of all of these.
    """

    off_device = False  # True if gathers first copy to the device
    is_memory_of_locals = True  # `padded` and `locals` share memory
    dtype: torch.dtype | None
    padded: list[Tensor]
    locals: list[Tensor]
    pack_row: Tensor | None
    tag: Tensor
    flats: list[Tensor]

    @property
    def caches(self) -> list[Tensor]:
        """The copies of shards on the device, which the next gather after `mark_stale` fills again."""
        return []

    def refresh(self, version: int) -> Transfer | None:
        """Before a gather, begin to bring the memory that it reads to `version` of the shards. Return the transfer to the
        device that this call starts; None if the memory has that version, or the gather copies to the device (`off_device`)."""
        return None

    def read_by(self, transfer: Transfer) -> None:
        """Record that `transfer` reads this buffer, so that later writes wait for it."""

    def ready(self) -> None:
        """Let the host wait for an optimizer step of these shards that runs on another thread; called before a gather."""

    def synchronize(self) -> None:
        """Let the host wait for all running optimizer steps and copies, after which the caller may read and write shards."""

    def mark_stale(self) -> None:
        """Make later gathers read the shards again, because they may have been written without a new version."""

    def put(
        self,
        chosen: Sequence[int],
        rows: Sequence[Tensor | None],
        adding: Sequence[bool],
        after: Transfer | None = None,
    ) -> tuple[Sequence[Tensor | None], Transfer | None]:
        """Begin to move reduced gradients `rows` to host or disk, if gradients are stored there; by default move nothing.

        Returns (tensors that will have the rows, in that memory or `rows` themselves; copy under way or None). `rows`: None if
        no rank has a gradient, which stays None. `chosen`: index of the parameter of each of `rows`. `adding`: True for rows
        that the caller adds to an existing `.grad`, and then drops. `after`: the transfer, if any, that makes the rows.
        """
        return rows, None


class FlatShards(ShardBuffer):
    """Shards in flat buffers, one per dtype, in the order of `msg`. `dtypes`: the dtype of each shard. If all are equal,
    gathers need not pack small shards."""

    def __init__(self, msg: Message, rank: int, dtypes: Sequence[torch.dtype], allocate: Allocate) -> None:
        self.dtype = dtypes[0] if len(set(dtypes)) == 1 else None
        self.padded = [torch.empty(0, device="cpu")] * len(dtypes)
        self.pack_row, self.flats = None, []
        self._cuts, self._rank = msg.cuts, rank
        self._places = [(0, 0)] * len(dtypes)  # (index of the flat buffer, offset in it) of each shard
        for dtype, chosen, part in flats_of(msg, dtypes):
            flat = allocate(part.shard_numel, dtype)
            if self.dtype is not None:
                self.pack_row = flat[msg.pack_start : msg.pack_start + msg.row_numel]
            for i, at in zip(chosen, part.shard_offsets, strict=True):
                self.padded[i] = flat[at : at + msg.cuts[i].shard_numel]
                self._places[i] = len(self.flats), at
            self.flats.append(flat)
        self.locals = self.locals_in(self.flats)
        row = allocate(msg.num_flags, dtypes[0]) if self.pack_row is None else self.pack_row
        self.tag = row[row.numel() - msg.num_flags :]

    def locals_in(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return each shard, without padding and with its own storage, over the memory of `flats`: `self.flats`, or copies."""
        shards = zip(self._places, self._cuts, strict=True)
        views = [local_view(flats[at][start : start + c.shard_numel], c, self._rank) for (at, start), c in shards]
        return [own_storage(view) for view in views]


ShardBufferMaker = Callable[[int, Message, int, Sequence[torch.dtype], torch.dtype], ShardBuffer]
"""Function (index of a unit, layout of its shards, rank, dtype of each shard, gathered dtype) -> the shard buffer of a group."""


def on_device(device: torch.device) -> ShardBufferMaker:
    """Return a `ShardBufferMaker` for shards that stay on `device`."""
    return lambda unit, msg, rank, dtypes, gathered: FlatShards(msg, rank, dtypes, zeros_on(device))


def zeros_on(device: torch.device) -> Allocate:
    return lambda numel, dtype: torch.zeros(numel, dtype=dtype, device=device)


def flats_of(msg: Message, dtypes: Sequence[torch.dtype]) -> list[tuple[torch.dtype, list[int], Message]]:
    """Divide shards of layout `msg` by dtype (`dtypes`, one per shard). Return (dtype, indices of shards, layout) for each."""
    result = []
    for dtype in dict.fromkeys(dtypes):
        chosen = [i for i, d in enumerate(dtypes) if d == dtype]
        part = msg if len(chosen) == len(dtypes) else message([msg.cuts[i] for i in chosen], dtype.itemsize)
        result.append((dtype, chosen, part))
    return result


def local_view(padded: Tensor, c: Cut, rank: int) -> Tensor:
    """Return a view of `padded`, the padded 1-D shard of `rank`, with the tensor's own dims and without padding."""
    # A shard is stored with its cut dim first, so that its rows are dense: fused optimizers read memory in order.
    if c.dim is None:
        return padded.view(c.shape)
    rows = padded[: c.rows_of(rank) * c.row_numel]
    return rows.view(c.rows_of(rank), *c.row_shape).movedim(0, c.dim)


def own_storage(view: Tensor) -> Tensor:
    """Return a tensor over the memory of `view` whose storage has that memory alone; a fake or meta tensor stays as it is."""
    # With the buffer's storage, `copy.deepcopy` and `torch.save` would copy the whole buffer, or read it at a wrong offset.
    if view.untyped_storage().device.type == "meta":  # a fake tensor has no address to be wrong about
        return view
    start = view.storage_offset() * view.itemsize
    part = view.untyped_storage()[start : start + view.numel() * view.itemsize]
    return view.new_empty(0).set_(part, 0, view.shape, view.stride())
