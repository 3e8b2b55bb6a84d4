"""A model of torch's caching allocator on CUDA: replay a log to compute how many bytes of GPU memory a step reserves.

The model follows c10/cuda/CUDACachingAllocator.cpp of torch 2.13. Each stream has two pools, one for blocks up to 1 MiB and one
for larger blocks. Sizes are rounded up to 512 bytes. An allocation takes the smallest free block of its pool that is large
enough, and the rest of the block is split off. If there is none, memory is reserved: a segment of 2 MiB, of 20 MiB, or of the
size rounded up to 2 MiB; with `expandable_segments`, as many pages (2 MiB, 20 MiB) as are missing at the end of the pool's one
segment. Free neighbours are merged. Reserved memory is never released; torch does so only if memory runs out, which is slow.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from accordion.plan.events import Alloc, Free, Log

MIB = 1 << 20
ROUND, SMALL, SMALL_SEGMENT, LARGE_SEGMENT, LARGE_ROUND = 512, MIB, 2 * MIB, 20 * MIB, 2 * MIB
MIN_LARGE = 10 * MIB
BITS = 48  # of an address


@dataclass(slots=True)
class _Pool:
    """Free blocks of one stream, for small or for large allocations. They are integers, which makes a search much faster."""

    small: bool
    by_size: list[int] = field(default_factory=list)  # `size << BITS | start` of each block, sorted
    by_start: dict[int, int] = field(default_factory=dict)  # size of each block by its start
    by_end: dict[int, int] = field(default_factory=dict)  # start of each block by its end
    # The address after the last segment. An expandable pool is one segment; others have gaps, so that segments never merge.
    top: int = 0

    def add(self, start: int, size: int) -> None:
        insort(self.by_size, size << BITS | start)
        self.by_start[start] = size
        self.by_end[start + size] = start

    def remove(self, start: int, size: int) -> None:
        del self.by_size[bisect_left(self.by_size, size << BITS | start)]
        del self.by_start[start]
        del self.by_end[start + size]

    def take_fitting(self, size: int) -> tuple[int, int] | None:
        """Remove the smallest block of `size` bytes or more, and return its (start, size); None if there is none. If that block
        is at the end of the pool, take the next larger one if there is one, since the last block can grow."""
        i, last = bisect_left(self.by_size, size << BITS), len(self.by_size) - 1
        if i > last:
            return None
        if i < last and (self.by_size[i] & (1 << BITS) - 1) + (self.by_size[i] >> BITS) == self.top:
            i += 1
        block = self.by_size.pop(i)
        start, size = block & (1 << BITS) - 1, block >> BITS
        del self.by_start[start], self.by_end[start + size]
        return start, size


class Allocator:
    """A model of torch's allocator: call `take` for each allocation and `give` for each free, then read `reserved_bytes`."""

    def __init__(self, *, expandable: bool) -> None:
        self._expandable = expandable
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._used: dict[int, tuple[_Pool, int, int]] = {}  # by number: pool, start, size
        self.reserved_bytes = 0

    def take(self, number: int, num_bytes: int, stream: str) -> None:
        size = max(ROUND, -(-num_bytes // ROUND) * ROUND)
        small = size <= SMALL
        pool = self._pools.get((stream, small)) or self._pools.setdefault((stream, small), _Pool(small))
        start, room = pool.take_fitting(size) or self._grown(pool, size)
        rest = room - size
        if rest >= ROUND if (small or self._expandable) else rest > SMALL:
            pool.add(start + size, rest)
            room = size
        self._used[number] = pool, start, room

    def give(self, number: int) -> None:
        pool, start, size = self._used.pop(number)
        after, before = pool.by_start.get(start + size), pool.by_end.get(start)
        if after is not None:
            pool.remove(start + size, after)
            size += after
        if before is not None:
            pool.remove(before, start - before)
            start, size = before, size + start - before
        pool.add(start, size)

    def _grown(self, pool: _Pool, size: int) -> tuple[int, int]:
        """Reserve memory in `pool`; return (start, size) of a block of `size` bytes or more, which is not listed as free."""
        start = pool.top
        if self._expandable:
            start = pool.by_end.get(pool.top, start)
            if start < pool.top:
                pool.remove(start, pool.top - start)
            more = _up(size - (pool.top - start), SMALL_SEGMENT if pool.small else LARGE_SEGMENT)
            pool.top += more
            block = start, pool.top - start
        else:
            more = SMALL_SEGMENT if pool.small else LARGE_SEGMENT if size < MIN_LARGE else _up(size, LARGE_ROUND)
            pool.top += more + 1
            block = start, more
        self.reserved_bytes += more
        return block


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def reserved_bytes(log: Log, *, expandable: bool) -> int:
    """Return the bytes that torch has reserved after two runs of the step in `log`, with or without expandable segments."""
    allocator = Allocator(expandable=expandable)
    for alloc, _ in log.held:
        allocator.take(alloc.number, alloc.num_bytes, alloc.stream)
    changes = [event for event in log.events if isinstance(event, (Alloc, Free))]
    for _ in range(2):
        for event in changes:
            if type(event) is Alloc:
                allocator.take(event.number, event.num_bytes, event.stream)
            else:
                allocator.give(event.number)
    return allocator.reserved_bytes
