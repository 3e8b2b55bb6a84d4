"""A model of torch's caching allocator on CUDA, to which a log is replayed: how much of the card a step reserves.

Read in torch 2.13's c10/cuda/CUDACachingAllocator.cpp. Every stream has pools of its own, one for blocks up to 1 MiB and one
for larger ones. Sizes are rounded up to 512 bytes. A free block of the pool serves if it is large enough, the smallest one
first; else memory is taken from the device: segments of 2 MiB, 20 MiB or the size rounded up to 2 MiB, or, with
`expandable_segments`, as many pages (2 MiB, 20 MiB) as the end of the pool's one segment lacks. What a block leaves is split
off, and free neighbours are joined. Nothing is given back: a step that is short of memory would, and is then slow.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from accordion.plan.events import Alloc, Free, Log

MIB = 1 << 20
ROUND, SMALL, SMALL_SEGMENT, LARGE_SEGMENT, LARGE_ROUND = 512, MIB, 2 * MIB, 20 * MIB, 2 * MIB
MIN_LARGE = 10 * MIB


@dataclass(slots=True, eq=False)
class _Block:
    start: int
    size: int
    free: bool = True
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True)
class _Pool:
    """Owns the free blocks of one stream and kind, by (size, start)."""

    small: bool
    blocks: list[tuple[int, int, _Block]] = field(default_factory=list)
    top: int = 0
    end: _Block | None = None  # the last block of an expandable segment

    def add(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self.blocks, (block.size, block.start, block))  # no two start alike

    def remove(self, block: _Block) -> None:
        del self.blocks[bisect.bisect_left(self.blocks, (block.size, block.start))]

    def fitting(self, size: int, last: _Block | None) -> _Block | None:
        """The smallest free block that is large enough; `last` only where there is no other."""
        i = bisect.bisect_left(self.blocks, (size, -1))
        if i + 1 < len(self.blocks) and self.blocks[i][2] is last:
            i += 1
        return self.blocks[i][2] if i < len(self.blocks) else None


class Allocator:
    """Owns the pools and what they have reserved."""

    def __init__(self, *, expandable: bool) -> None:
        self._expandable = expandable
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._used: dict[int, tuple[_Block, _Pool]] = {}
        self.reserved_bytes = 0

    def take(self, number: int, num_bytes: int, stream: str) -> None:
        size = max(ROUND, -(-num_bytes // ROUND) * ROUND)
        small = size <= SMALL
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = pool.fitting(size, pool.end if self._expandable else None) or self._grown(pool, size)
        pool.remove(block)
        rest = block.size - size
        if rest >= ROUND if (small or self._expandable) else rest > SMALL:
            self._split(pool, block, size)
        block.free = False
        self._used[number] = block, pool

    def give(self, number: int) -> None:
        block, pool = self._used.pop(number)
        for other in (block.before, block.after):
            if other is not None and other.free:
                pool.remove(other)
                block = self._joined(pool, *sorted((other, block), key=lambda b: b.start))
        pool.add(block)

    def _grown(self, pool: _Pool, size: int) -> _Block:
        """A free block of new memory, large enough."""
        if not self._expandable:
            segment = SMALL_SEGMENT if pool.small else LARGE_SEGMENT if size < MIN_LARGE else _up(size, LARGE_ROUND)
            block = _Block(pool.top, segment)
            pool.top += segment + 1  # segments are no neighbours
            self.reserved_bytes += segment
            pool.add(block)
            return block
        page, end = SMALL_SEGMENT if pool.small else LARGE_SEGMENT, pool.end
        more = _up(size - (end.size if end is not None and end.free else 0), page)
        self.reserved_bytes += more
        new = _Block(pool.top, more, before=end)
        pool.top += more
        if end is not None:
            end.after = new
        pool.end = new
        if end is not None and end.free:
            pool.remove(end)
            new = self._joined(pool, end, new)
        pool.add(new)
        return new

    def _split(self, pool: _Pool, block: _Block, size: int) -> None:
        rest = _Block(block.start + size, block.size - size, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if pool.end is block:
            pool.end = rest
        pool.add(rest)

    @staticmethod
    def _joined(pool: _Pool, low: _Block, high: _Block) -> _Block:
        low.size += high.size
        low.after = high.after
        if high.after is not None:
            high.after.before = low
        if pool.end is high:
            pool.end = low
        return low


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def reserved_bytes(log: Log, *, expandable: bool) -> int:
    """What the allocator has reserved after steps like this one: the second is replayed too, for what the first left behind."""
    allocator = Allocator(expandable=expandable)
    for alloc, _ in log.held:
        allocator.take(alloc.number, alloc.num_bytes, alloc.stream)
    for _ in range(2):
        for event in log.events:
            if isinstance(event, Alloc):
                allocator.take(event.number, event.num_bytes, event.stream)
            elif isinstance(event, Free):
                allocator.give(event.number)
    return allocator.reserved_bytes
