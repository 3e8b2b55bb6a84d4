"""Compute boxes, the rectangular blocks of a tensor that ranks hold, for any number of mesh axes: pure integer arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DimCut:
    """A split of a tensor along `dim` into `num_chunks` chunks, of which chunk `index` is kept. Chunks have the sizes of
    `torch.chunk`; if that makes fewer of them, the last ones are empty."""

    dim: int
    num_chunks: int
    index: int


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular block of a tensor: in each dim d, the indices from `offset[d]` to `offset[d] + shape[d] - 1`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices, one for each dim, that select this box in a tensor with the elements of the larger box `outer`."""
        starts = [a - b for a, b in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def box_of(shape: Sequence[int], cuts: Iterable[DimCut]) -> Box:
    """Return the box, possibly empty, that is kept of a tensor of `shape` after the splits `cuts`, one after the other."""
    offset, sizes = [0] * len(shape), list(shape)
    for cut in cuts:
        rows = sizes[cut.dim]
        chunk = -(-rows // cut.num_chunks)
        start = min(cut.index * chunk, rows)
        offset[cut.dim] += start
        sizes[cut.dim] = min(chunk, rows - start)
    return Box(tuple(offset), tuple(sizes))


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    offset = tuple(map(max, a.offset, b.offset))
    ends = [min(p + n, q + m) for p, n, q, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True)]
    sizes = tuple(end - start for start, end in zip(offset, ends, strict=True))
    return Box(offset, sizes) if all(size > 0 for size in sizes) else None
