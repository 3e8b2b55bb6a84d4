"""Extend the log of a model with few equal blocks to that of a deeper model, by repeating the events of the middle blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from accordion.plan.events import Alloc, Enter, Event, Free, Land, Launch, Log, Mark, Op, StepPart, StepPhase, Wait

HEAD, TAIL = 1, 2  # first and last blocks, which may differ from the others; a reduce ends one block after its start
PERIODS = 3  # periods in the middle: the second one is repeated if the first and the third are equal to it


def num_traced(num_blocks: int, period: int, later: int = 0) -> int:
    """Return the number of blocks to trace of a model with `num_blocks` equal blocks.

    Args:
        period: blocks at this distance have equal events; 2 if every second block is recomputed.
        later: in the backward, the end of a block's last transfer is waited for `1 + later` blocks later.
    """
    least = HEAD + PERIODS * period + TAIL + later
    return num_blocks if num_blocks <= least else least + (num_blocks - least) % period


@dataclass(slots=True)
class _Segment:
    """The events between two `Enter` events: one visit of the forward or backward of a unit."""

    place: StepPart
    block: int | None  # index of the equal block; None outside of them
    part: int  # index of the unit within its block
    events: list[Event]


@dataclass(frozen=True, slots=True)
class _Origin:
    """Position in a log of the event that created an allocation or a transfer."""

    phase: StepPhase
    block: int | None
    part: int
    visit: int  # how often this phase of this unit was entered before, with gradient accumulation
    at: int  # index in the segment


class IrregularError(Exception):
    """Raised if the events of the middle blocks do not repeat. The whole model must be traced then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """How a deep model was shortened for a trace. `period`, `later`: as in `num_traced`."""

    first_unit: int  # index of the first block's first unit
    traced: int  # blocks that were traced
    total: int  # blocks of the deep model
    period: int
    optimizer_scale: float  # elements that the optimizer steps: the deep model's, relative to the shortened model's
    each: int = 1  # units of one block
    later: int = 0


def extend(log: Log, short: Shortened) -> Log:
    """Return the log of the deep model. `log`: of the shortened model. Raises `IrregularError` if blocks do not repeat."""
    return log if short.traced == short.total else _Extension(log, short).log()


def _num_leaked(allocs: list[tuple[Alloc, int | None]], events: list[Event]) -> int:
    """Return the number of allocations live after a step, minus those live before (`allocs`). Raises `IrregularError` if the step
    frees memory that was not allocated."""
    live = {alloc.number for alloc, _ in allocs}
    for event in events:
        if isinstance(event, Alloc):
            live.add(event.number)
        elif isinstance(event, Free):
            if event.number not in live:
                raise IrregularError
            live.remove(event.number)
    return len(live) - len(allocs)


class _Extension:
    """Builds the deep model's log, with new numbers for the allocations and transfers of the repeated blocks."""

    def __init__(self, log: Log, short: Shortened) -> None:
        self._log, self._first, self._each = log, short.first_unit, short.each
        self._traced, self._total, self._period, self._later = short.traced, short.total, short.period, short.later
        self._scale = short.optimizer_scale
        self._end = short.first_unit + short.traced * short.each  # the first unit after the blocks
        self._start = HEAD + short.period  # the repeated blocks: [start, start + period)
        self._copies = 1 + (short.total - short.traced) // short.period
        self._segments = self._split()
        self._allocs, self._transfers = self._find_origins()
        self._by_origin = [{origin: n for n, origin in numbers.items()} for numbers in (self._allocs, self._transfers)]
        self._check()
        self._next = 1 + max(
            [a.number for a, _ in log.held]
            + [e.number for s in self._segments for e in s.events if isinstance(e, Alloc)]
        )
        self._numbers: dict[tuple[int, int], int] = {}  # (number, copy) -> number in the deep model
        self._next_transfer = 1 + max(
            [e.transfer for s in self._segments for e in s.events if isinstance(e, (Launch, Mark))], default=0
        )
        self._transfer_numbers: dict[tuple[int, int], int] = {}
        self._referenced: dict[int, set[_Origin]] = {}  # by id of the segment: origins of its frees and waits

    def log(self) -> Log:
        events: list[Event] = []
        for segment, copy in self._order():
            place = segment.place
            if segment.block is not None:
                place = StepPart(place.phase, self._unit(self._deep_block(segment.block, copy), segment.part))
            elif place.unit >= self._end:
                place = StepPart(place.phase, place.unit + self._added_units)
            events.append(Enter(place))
            for event in segment.events:
                events.extend(self._deep_events(event, segment, copy))
        host_bytes = round(self._log.host_bytes * self._scale)
        allocs = self._deep_held()
        if _num_leaked(allocs, events) and not _num_leaked(self._log.held, self._log.events):
            raise IrregularError  # each block allocates it, and only the traced blocks free it
        return replace(self._log, held=allocs, events=events, units=self._units(), host_bytes=host_bytes)

    # -- segments

    def _block(self, unit: int | None) -> int | None:
        inside = unit is not None and self._first <= unit < self._end
        return (unit - self._first) // self._each if inside and unit is not None else None

    def _part(self, unit: int) -> int:
        """Return the unit's index within its block."""
        return (unit - self._first) % self._each if self._first <= unit < self._end else 0

    def _unit(self, block: int, part: int) -> int:
        return self._first + block * self._each + part

    @property
    def _added_units(self) -> int:
        return (self._total - self._traced) * self._each

    def _split(self) -> list[_Segment]:
        segments: list[_Segment] = []
        for event in self._log.events:
            if isinstance(event, Enter):
                segments.append(_Segment(event.place, self._block(event.place.unit), self._part(event.place.unit), []))
            else:
                segments[-1].events.append(event)
        return segments

    def _visits(self) -> Iterator[tuple[_Segment, int]]:
        """Yield each segment, and the number of earlier segments with an equal `place` (of other micro-batches)."""
        count: dict[StepPart, int] = {}
        for segment in self._segments:
            count[segment.place] = count.get(segment.place, -1) + 1
            yield segment, count[segment.place]

    def _find_origins(self) -> tuple[dict[int, _Origin], dict[int, _Origin]]:
        """Return (number of an allocation -> its origin, number of a transfer -> its origin)."""
        allocs: dict[int, _Origin] = {}
        transfers: dict[int, _Origin] = {}
        for segment, visit in self._visits():
            for at, event in enumerate(segment.events):
                origin = _Origin(segment.place.phase, segment.block, segment.part, visit, at)
                if isinstance(event, Alloc):
                    allocs[event.number] = origin
                elif isinstance(event, (Launch, Mark)):
                    transfers[event.transfer] = origin
        return allocs, transfers

    def _is_middle(self, block: int | None) -> bool:
        return block is not None and HEAD <= block < HEAD + PERIODS * self._period

    def _is_repeated(self, block: int | None) -> bool:
        return block is not None and self._start <= block < self._start + self._period

    def _check(self) -> None:
        """Raise `IrregularError` unless middle blocks at the distance of a period have equal events."""
        shapes: dict[tuple[StepPhase, int, int, int], list[object]] = {}
        for segment, visit in self._visits():
            if segment.block is None or not self._is_middle(segment.block):
                continue
            shape = [self._shape(event, segment.block) for event in segment.events]
            key = (segment.place.phase, segment.part, visit, (segment.block - HEAD) % self._period)
            if shapes.setdefault(key, shape) != shape:
                raise IrregularError

    def _shape(self, event: Event, block: int) -> object:
        """Return the properties of an event that must repeat: numbers are replaced by origins relative to `block`."""
        if isinstance(event, Alloc):
            return (Alloc, event.num_bytes, event.stream)
        if isinstance(event, (Launch, Mark)):
            return (type(event), event.stream)
        if isinstance(event, (Free, Land, Wait)):
            origin = self._origin_of(event)
            kind = (type(event), event.stream if isinstance(event, Wait) else "")
            if origin is None or origin.block is None:
                return (*kind, origin)
            return (*kind, origin.phase, origin.part, origin.visit, origin.block - block, origin.at)
        return event

    def _order(self) -> Iterator[tuple[_Segment, int]]:
        """Yield (segment, index of its copy) in the order of the deep model; the index is 0 for segments without copies."""
        i = 0
        while i < len(self._segments):
            segment = self._segments[i]
            if not self._is_repeated(segment.block):
                yield segment, 0
                i += 1
                continue
            j = i
            while j < len(self._segments) and self._is_repeated(self._segments[j].block):
                j += 1
            copies = range(self._copies)
            for copy in copies if segment.place.phase is StepPhase.FORWARD else reversed(copies):
                yield from ((s, copy) for s in self._segments[i:j])
            i = j

    def _deep_block(self, block: int, copy: int) -> int:
        """Return the index in the deep model of the copy number `copy` of the traced block `block`."""
        if self._is_repeated(block):
            return block + copy * self._period
        return block if block < self._start else block + self._total - self._traced

    # -- events

    def _deep_events(self, event: Event, segment: _Segment, copy: int) -> Iterator[Event]:
        """Yield the deep model's events for one event of the log: one, or one for each copy that a free or wait refers to."""
        if isinstance(event, Alloc):
            number = self._number(event.number, copy)
            yield Alloc(number, event.num_bytes, event.category, event.stream, event.operator)
        elif isinstance(event, (Launch, Mark)):
            yield replace(event, transfer=self._transfer(event.transfer, copy))
        elif isinstance(event, Free):
            for c in self._referenced_copies(self._allocs.get(event.number), segment, copy):
                yield Free(self._number(event.number, c))
        elif isinstance(event, (Land, Wait)):
            for c in self._referenced_copies(self._transfers.get(event.transfer), segment, copy):
                yield replace(event, transfer=self._transfer(event.transfer, c))
        elif isinstance(event, Op) and segment.place.phase is StepPhase.STEP:
            yield replace(event, num_bytes=int(event.num_bytes * self._scale), flops=event.flops * self._scale)
        else:
            yield event

    def _referenced_copies(self, origin: _Origin | None, segment: _Segment, copy: int) -> Iterator[int | _Origin]:
        """Yield the copies that a free or wait in `segment` refers to: indices of copies, or an origin in the deep model."""
        if origin is None or origin.block is None:
            yield 0
        elif segment.block is None and self._refers_to_one_block(segment, origin):
            yield origin
        elif segment.block is None:
            yield from range(self._copies) if self._is_repeated(origin.block) else (0,)
        elif self._is_middle(segment.block) or (segment.block < HEAD and origin.block < self._traced - TAIL):
            # The first block waits for transfers that the blocks after it started, just as middle blocks do.
            block = self._deep_block(segment.block, copy) + origin.block - segment.block
            yield _Origin(origin.phase, block, origin.part, origin.visit, origin.at)
        elif self._is_repeated(origin.block):
            yield 0 if segment.block < origin.block else self._copies - 1
        else:
            yield 0

    def _refers_to_one_block(self, segment: _Segment, origin: _Origin) -> bool:
        """Return True if `segment`, outside of the blocks, refers to the block of `origin` alone, not to each equal block."""
        # A backward ends before the transfers of blocks 0 to `later` have ended, so these are waited for after it, block by
        # block. If the same event of a later block is referred to as well, then the segment refers to each block.
        assert origin.block is not None
        if not self._start <= origin.block <= self._later:
            return False
        if id(segment) not in self._referenced:
            origins = (self._origin_of(event) for event in segment.events if isinstance(event, (Free, Land, Wait)))
            self._referenced[id(segment)] = {o for o in origins if o is not None}
        blocks = range(origin.block + self._period, self._traced, self._period)
        return not any(replace(origin, block=k) in self._referenced[id(segment)] for k in blocks if k > self._later)

    def _origin_of(self, event: Free | Land | Wait) -> _Origin | None:
        return self._allocs.get(event.number) if isinstance(event, Free) else self._transfers.get(event.transfer)

    def _number(self, number: int, copy: int | _Origin) -> int:
        return self._deep_number(number, copy, self._numbers, False)

    def _transfer(self, transfer: int, copy: int | _Origin) -> int:
        return self._deep_number(transfer, copy, self._transfer_numbers, True)

    def _deep_number(
        self, number: int, copy: int | _Origin, numbers: dict[tuple[int, int], int], transfer: bool
    ) -> int:
        if isinstance(copy, _Origin):
            number, copy = self._traced_number(copy, transfer)
        if copy == 0:
            return number
        if (number, copy) not in numbers:
            if transfer:
                self._next_transfer += 1
                numbers[number, copy] = self._next_transfer
            else:
                self._next += 1
                numbers[number, copy] = self._next
        return numbers[number, copy]

    def _traced_number(self, origin: _Origin, transfer: bool) -> tuple[int, int]:
        """Return (number in the traced log, copy) of the allocation or transfer that the deep model creates at `origin`."""
        block, copy = origin.block, 0
        assert block is not None
        if block >= self._start:
            beyond = block - self._start
            copy = min(beyond // self._period, self._copies - 1)
            block -= copy * self._period
            if not self._is_repeated(block):
                copy = 0
        return self._by_origin[transfer][_Origin(origin.phase, block, origin.part, origin.visit, origin.at)], copy

    # -- memory before the step, and names

    def _deep_held(self) -> list[tuple[Alloc, int | None]]:
        allocs: list[tuple[Alloc, int | None]] = []
        for alloc, unit in self._log.held:
            block = self._block(unit)
            if block is None or unit is None:
                after = unit is not None and unit >= self._end
                allocs.append((alloc, unit + self._added_units if after and unit is not None else unit))
                continue
            for copy in range(self._copies if self._is_repeated(block) else 1):
                number = self._number(alloc.number, copy)
                allocs.append(
                    (replace(alloc, number=number), self._unit(self._deep_block(block, copy), self._part(unit)))
                )
        return allocs

    def _units(self) -> list[str]:
        """Return the names of the deep model's units, with the block numbers continued."""
        names, first = self._log.units, self._first
        stem, _, number = names[first].rpartition(".")
        start = int(number) if number.isdecimal() else 0
        inside = [name.removeprefix(names[first]) for name in names[first : first + self._each]]
        blocks = [f"{stem}.{start + i}{part}" for i in range(self._total) for part in inside]
        return [*names[:first], *blocks, *names[self._end :]]
