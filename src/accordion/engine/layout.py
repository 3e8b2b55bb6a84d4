"""Where every parameter's rows live: pure integer arithmetic, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

KIB = 1024
ALIGN_BYTES = 256  # start of each full parameter: what vectorised kernels and NCCL ask for
PACK_LIMIT_BYTES = 256 * KIB  # below this a parameter travels packed with others: 65,536 float32 in the first probes
LARGE_PACK_LIMIT_BYTES = 4096 * KIB  # the same where each tensor is a launch of its own: docs/design.md
PADDING_SHARE, PADDING_BYTES = 0.05, 64 * KIB  # padding on dim 0 beyond both: cut another dim, or keep whole


@dataclass(frozen=True)
class Cut:
    """One tensor of `shape` over `num_ranks`: rank r keeps rows [r * chunk, (r + 1) * chunk) of `dim`; None keeps it whole.

    The numbers that follow from these are worked out once: every step asks for them.
    """

    shape: tuple[int, ...]
    dim: int | None
    num_ranks: int

    @cached_property
    def rows(self) -> int:
        return 1 if self.dim is None else self.shape[self.dim]

    @cached_property
    def chunk(self) -> int:
        """Rows of each rank, the last ones padded."""
        return 1 if self.dim is None else -(-self.rows // self.num_ranks)

    @cached_property
    def row_numel(self) -> int:
        return prod(self.row_shape)

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row: the tensor's without the dim that is cut."""
        return self.shape if self.dim is None else (*self.shape[: self.dim], *self.shape[self.dim + 1 :])

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one rank's padded shard."""
        return self.chunk * self.row_numel

    @cached_property
    def padded_numel(self) -> int:
        return self.numel if self.dim is None else self.shard_numel * self.num_ranks

    def rows_of(self, rank: int) -> int:
        """Real rows of a rank, padding not counted."""
        return self.rows if self.dim is None else max(0, min(self.chunk, self.rows - rank * self.chunk))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.rows_of(rank), *self.shape[self.dim + 1 :])


def cut(shape: Sequence[int], num_ranks: int, itemsize: int) -> Cut:
    """Choose the dim: 0, unless its padding is large (fused experts (8, ...) on 64 ranks); then the dim with the least, or none.

    A 0-d tensor and a small one that no dim suits are kept whole.
    """
    shape = tuple(shape)

    def padding(dim: int) -> int:
        return Cut(shape, dim, num_ranks).padded_numel - prod(shape)

    def bearable(dim: int) -> bool:
        return padding(dim) <= PADDING_SHARE * prod(shape) or padding(dim) * itemsize <= PADDING_BYTES

    if not shape:
        return Cut(shape, None, num_ranks)
    if bearable(0):
        return Cut(shape, 0, num_ranks)
    best = min(range(len(shape)), key=padding)
    if not bearable(best) and prod(shape) * itemsize <= PACK_LIMIT_BYTES:
        return Cut(shape, None, num_ranks)
    return Cut(shape, best, num_ranks)


@dataclass(frozen=True, slots=True)
class Message:
    """How the tensors of one group travel: `direct` ones in place, `packed` ones in one buffer, `whole` ones not cut at all.

    The indices are those of `cuts`. A shard buffer holds the direct shards and then the packed ones, each padded to
    its chunk, and then `num_flags` elements for what ranks tell each other beside the tensors: the packed part and the flags
    are one contiguous row of the packed message. `shard_offsets`, `pack_start` and the numels are in elements.
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
    """Sort tensors into direct, packed and whole, and give each shard its place; `num_flags` elements follow the packed ones.

    Direct are those cut on dim 0 that are large enough, or alone on their axis. `even_only`: a direct tensor must divide evenly
    (reduce-scatter has no split sizes). `pack_limit_bytes`: of the communicator, `PACK_LIMIT_BYTES` by default.
    """
    limit = PACK_LIMIT_BYTES if pack_limit_bytes is None else pack_limit_bytes
    direct, packed, whole = [], [], []
    for i, c in enumerate(cuts):
        if c.dim is None:
            whole.append(i)
        elif c.dim != 0 or (even_only and c.rows % c.num_ranks):
            packed.append(i)
        elif c.num_ranks == 1 or c.padded_numel * itemsize >= limit:
            direct.append(i)
        else:
            packed.append(i)
    offsets, at = [0] * len(cuts), 0
    for i in direct:
        offsets[i] = at
        at += aligned(cuts[i].shard_numel, itemsize)
    start = at
    for i in packed:
        offsets[i] = at
        at += cuts[i].shard_numel
    pack_numel = at - start
    at += num_flags
    for i in whole:
        at = aligned(at, itemsize)
        offsets[i] = at
        at += cuts[i].numel
    return Message(
        tuple(cuts), tuple(direct), tuple(packed), tuple(whole), tuple(offsets), start, pack_numel, num_flags, at
    )


def aligned(numel: int, itemsize: int) -> int:
    """`numel` elements rounded up to a multiple of `ALIGN_BYTES`."""
    step = max(1, ALIGN_BYTES // itemsize)
    return -(-numel // step) * step


def full_offsets(cuts: Sequence[Cut], itemsize: int) -> tuple[tuple[int, ...], int]:
    """Parameter-major places of the full parameters, each aligned and padded to chunk * num_ranks rows; and the total."""
    offsets, at = [], 0
    for c in cuts:
        offsets.append(at)
        at += aligned(c.padded_numel if c.dim == 0 else c.numel, itemsize)
    return tuple(offsets), at


def columns(numels: Sequence[int], most: int) -> list[list[tuple[int, int, int]]]:
    """Ranges as (index, start, stop), in pieces of at most `most` elements; what fits beside others is not cut."""
    pieces, left = list[list[tuple[int, int, int]]](), 0
    for i, numel in enumerate(numels):
        if pieces and numel <= left:
            pieces[-1].append((i, 0, numel))
            left -= numel
            continue
        pieces += [[(i, at, min(at + most, numel))] for at in range(0, numel, most)]
        left = most - (numel - 1) % most - 1
    return pieces
