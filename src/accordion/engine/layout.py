"""Compute which rows of each tensor a rank keeps and their offsets in buffers: integer arithmetic without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from math import gcd, prod

KIB = 1024
ALIGN_BYTES = 256  # alignment of each full parameter, for vectorized kernels and NCCL
PACK_LIMIT_BYTES = 256 * KIB  # smaller parameters travel packed in one message
LARGE_PACK_LIMIT_BYTES = 4096 * KIB  # the limit for backends that launch each tensor separately: docs/design.md
LEAST_QUANTISED = 4096  # elements of the smallest tensor whose optimizer states torchao and bitsandbytes quantise
PADDING_SHARE, PADDING_BYTES = 0.05, 64 * KIB  # padding above both limits: cut another dim, or keep the tensor whole


@dataclass(frozen=True)
class Cut:
    """The division of one tensor over ranks: rank r keeps rows [r * chunk, (r + 1) * chunk) of dimension `dim`. With `dim` None
    every rank keeps the whole tensor, as one row. Derived numbers are cached, because every step reads them."""

    shape: tuple[int, ...]
    dim: int | None
    num_ranks: int

    @cached_property
    def rows(self) -> int:
        return 1 if self.dim is None else self.shape[self.dim]

    @cached_property
    def chunk(self) -> int:
        """The number of rows of each rank's shard; the last ranks may have fewer rows, padded to this number."""
        return 1 if self.dim is None else -(-self.rows // self.num_ranks)

    @cached_property
    def row_numel(self) -> int:
        return prod(self.row_shape)

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """`shape` without the dimension `dim`; all of `shape` if `dim` is None."""
        return self.shape if self.dim is None else (*self.shape[: self.dim], *self.shape[self.dim + 1 :])

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def shard_numel(self) -> int:
        """The number of elements in one rank's shard, padding included."""
        return self.chunk * self.row_numel

    @cached_property
    def padded_numel(self) -> int:
        return self.numel if self.dim is None else self.shard_numel * self.num_ranks

    def rows_of(self, rank: int) -> int:
        """Return the number of rows that `rank` keeps, without padding; 0 if there are too few rows."""
        return self.rows if self.dim is None else max(0, min(self.chunk, self.rows - rank * self.chunk))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.rows_of(rank), *self.shape[self.dim + 1 :])


def cut(shape: Sequence[int], num_ranks: int, itemsize: int, state_block: int = 1, num_replicas: int = 1) -> Cut:
    """Return how to divide a tensor over `num_ranks` ranks: on one dim, or not at all. `itemsize`: bytes per gathered element.

    `state_block`: elements that share a scale in low-bit optimizer states; 1 for other optimizers. A tensor of up to
    `PACK_LIMIT_BYTES` that such an optimizer quantises stays whole if a rank's rows would end inside a block, or if it would be
    divided on another dim than 0. `num_replicas`, only for this check: ranks that divide each rank's rows once more.
    """
    c = _least_padded(shape, num_ranks, itemsize)
    is_small = c.numel >= LEAST_QUANTISED and c.numel * itemsize <= PACK_LIMIT_BYTES
    if state_block == 1 or c.dim is None or not is_small or c.numel % state_block:
        return c
    return replace(c, dim=None) if c.dim or splits_blocks(c.shape, (num_ranks, num_replicas), state_block) else c


def rows_per_block(shape: Sequence[int], block: int) -> int:
    """Return the least number of rows of dim 0 whose elements make whole blocks: for `shape` (n, 6) and `block` 4 it is 2."""
    return block // gcd(prod(shape[1:]), block)


def splits_blocks(shape: Sequence[int], splits: Sequence[int], block: int) -> bool:
    """Return True if some rank's rows end inside a block of `block` elements. `splits`: numbers of ranks; rows of dim 0 are
    divided over the first number, and each part over the next one."""
    unit, counts = rows_per_block(shape, block), {shape[0]}
    for num_ranks in splits if unit > 1 else ():
        counts = {Cut((rows,), 0, num_ranks).rows_of(rank) for rows in counts for rank in range(num_ranks)}
    return unit > 1 and any(rows % unit for rows in counts)


def _least_padded(shape: Sequence[int], num_ranks: int, itemsize: int) -> Cut:
    """Return how to divide a tensor over ranks: by rows of dim 0, or on the dim with the least padding if rows need much padding,
    as for fused experts (8, ...) on 64 ranks. 0-d tensors, and small ones that need much padding on every dim, stay whole."""
    by_dim = [Cut(tuple(shape), dim, num_ranks) for dim in range(len(shape))]

    def padding(c: Cut) -> int:
        return c.padded_numel - c.numel

    def bearable(c: Cut) -> bool:
        return padding(c) <= PADDING_SHARE * c.numel or padding(c) * itemsize <= PADDING_BYTES

    best = by_dim[0] if by_dim and bearable(by_dim[0]) else min(by_dim, key=padding, default=None)
    if best is None or (not bearable(best) and best.numel * itemsize <= PACK_LIMIT_BYTES):
        return Cut(tuple(shape), None, num_ranks)
    return best


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows [start, stop) of each rank's shard of a tensor that `cut` divides on dim 0, in the order of ranks."""

    cut: Cut
    start: int
    stop: int

    @property
    def height(self) -> int:
        """The number of rows of one rank, padding included."""
        return self.stop - self.start

    def rows_of(self, rank: int) -> int:
        """Return the number of rows of `rank`, without padding."""
        return max(0, min(self.stop, self.cut.rows_of(rank)) - self.start)

    @property
    def num_rows(self) -> int:
        """The number of rows of all ranks, without padding. Padding comes last: only the last ranks have fewer rows."""
        return sum(map(self.rows_of, range(self.cut.num_ranks)))


@dataclass(frozen=True, slots=True)
class Message:
    """The layout of a group's tensors in this rank's shard buffer and in collectives. Offsets and numels are in elements.

    Indices into `cuts`: `direct`, large tensors that are sent from their own memory; `packed`, small ones that are copied into
    one message; `whole`, those that are not divided. The shard buffer, `shard_numel` elements, has in this order: the direct
    shards; at `pack_start` this rank's row of the message, `pack_numel` elements and `num_flags` extra ones; whole tensors.
    `shard_offsets`: offset of each tensor. Shards are padded to `Cut.chunk` rows.
    """

    cuts: tuple[Cut, ...]
    direct: tuple[int, ...]
    packed: tuple[int, ...]
    whole: tuple[int, ...]
    shard_offsets: tuple[int, ...]
    pack_start: int
    pack_numel: int
    num_flags: int
    shard_numel: int

    @property
    def row_numel(self) -> int:
        return self.pack_numel + self.num_flags


def message(
    cuts: Sequence[Cut],
    itemsize: int,
    *,
    even_only: bool = False,
    num_flags: int = 0,
    pack_limit_bytes: int | None = None,
) -> Message:
    """Return the layout of tensors divided as `cuts`: large ones cut on dim 0 are sent directly, other cut ones are packed.

    `even_only`: pack tensors whose rows do not divide evenly (reduce-scatter has no split sizes). `num_flags`: extra elements
    of the packed message. `pack_limit_bytes`, by default `PACK_LIMIT_BYTES`: on several ranks, smaller tensors are packed.
    """
    limit = PACK_LIMIT_BYTES if pack_limit_bytes is None else pack_limit_bytes
    direct, packed, whole = [], [], []
    for i, c in enumerate(cuts):
        is_even = c.dim == 0 and not (even_only and c.rows % c.num_ranks)
        if c.dim is None:
            whole.append(i)
        elif is_even and (c.num_ranks == 1 or c.padded_numel * itemsize >= limit):
            direct.append(i)
        else:
            packed.append(i)
    offsets, offset = [0] * len(cuts), 0
    for i in direct:
        offsets[i] = offset
        offset += aligned(cuts[i].shard_numel, itemsize)
    start = offset
    for i in packed:
        offsets[i] = offset
        offset += cuts[i].shard_numel
    pack_numel = offset - start
    offset += num_flags
    for i in whole:
        offset = aligned(offset, itemsize)
        offsets[i] = offset
        offset += cuts[i].numel
    return Message(
        tuple(cuts), tuple(direct), tuple(packed), tuple(whole), tuple(offsets), start, pack_numel, num_flags, offset
    )


def aligned(numel: int, itemsize: int) -> int:
    """Return `numel` rounded up so that its bytes are a multiple of `ALIGN_BYTES`."""
    step = max(1, ALIGN_BYTES // itemsize)
    return -(-numel // step) * step


def full_offsets(cuts: Sequence[Cut], itemsize: int) -> tuple[tuple[int, ...], int]:
    """Return (aligned offset of each full parameter, size of the buffer) in elements; parameters cut on dim 0 are padded."""
    numels = [aligned(c.padded_numel if c.dim == 0 else c.numel, itemsize) for c in cuts]
    *offsets, end = accumulate(numels, initial=0)
    return tuple(offsets), end


def columns(numels: Sequence[int], most: int) -> list[list[tuple[int, int, int]]]:
    """Divide tensors of `numels` elements into pieces of at most `most` elements, and return the pieces: lists of (index of a
    tensor, start, stop). A tensor that fits into the last piece joins it. [2, 1], 3 -> [[(0, 0, 2), (1, 0, 1)]]."""
    pieces, left = list[list[tuple[int, int, int]]](), 0
    for i, numel in enumerate(numels):
        if pieces and numel <= left:
            pieces[-1].append((i, 0, numel))
            left -= numel
            continue
        pieces += [[(i, at, min(at + most, numel))] for at in range(0, numel, most)]
        left = most - (numel - 1) % most - 1
    return pieces


def runs(indices: Sequence[int]) -> list[slice]:
    """Return ascending `indices` as slices of consecutive ones: [1, 2, 5] -> [1:3, 5:6]."""
    consecutive = [[i for _, i in run] for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    return [slice(run[0], run[-1] + 1) for run in consecutive]
