"""The log of a deep model from that of a shallow one: what repeats from block to block is repeated, number by number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from accordion.plan.events import Alloc, Enter, Event, Free, Land, Launch, Log, Mark, Op, StepPart, StepPhase, Wait

HEAD, TAIL = 1, 2  # blocks at either end that may differ from those between; a reduce lands one block after it began
PERIODS = 3  # of which the middle one is repeated, once its neighbours are found equal


def num_traced(num_blocks: int, period: int, later: int = 0) -> int:
    """How many of `num_blocks` equal blocks must be traced, where every `period`-th is treated alike.

    `later`: by how many blocks more than one the last of a block's work in a backward is waited for.
    """
    least = HEAD + PERIODS * period + TAIL + later
    return num_blocks if num_blocks <= least else least + (num_blocks - least) % period


@dataclass(slots=True)
class _Segment:
    """The events of one place, `block` its number in the run of equal blocks (None: outside of it), `part` that of its units."""

    place: StepPart
    block: int | None
    part: int
    events: list[Event]


@dataclass(frozen=True, slots=True)
class _Made:
    """Where something numbered, memory or a transfer, came to be: segment by phase, block and unit of it, position in it."""

    phase: StepPhase
    block: int | None
    part: int
    visit: int  # of that place: accumulation comes by more than once
    at: int


class IrregularError(Exception):
    """The blocks in the middle do not repeat, so the whole model must be traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """How a deep model was shortened: of `total` equal blocks `traced` are left, units `first_unit` and following.

    `each`: units of one block. `period`, `later`: as in `num_traced`. `optimizer_scale`: by how much larger the deep
    model's kernels of the optimizer are.
    """

    first_unit: int
    traced: int
    total: int
    period: int
    optimizer_scale: float
    each: int = 1
    later: int = 0


def extend(log: Log, how: Shortened) -> Log:
    """`log` of a shortened model as that of the deep one. Raises `IrregularError`."""
    return log if how.traced == how.total else _Extension(log, how).log()


def _num_left(held: list[tuple[Alloc, int | None]], events: list[Event]) -> int:
    """How many more allocations live after a step than before. Raises `IrregularError` where one is freed that is not there."""
    live = {alloc.number for alloc, _ in held}
    for event in events:
        if isinstance(event, Alloc):
            live.add(event.number)
        elif isinstance(event, Free):
            if event.number not in live:
                raise IrregularError
            live.remove(event.number)
    return len(live) - len(held)


class _Extension:
    """Owns the numbers of what is made anew."""

    def __init__(self, log: Log, how: Shortened) -> None:
        self._log, self._first, self._each = log, how.first_unit, how.each
        self._traced, self._total, self._period, self._later = how.traced, how.total, how.period, how.later
        self._scale = how.optimizer_scale
        self._end = how.first_unit + how.traced * how.each  # the first unit behind the blocks
        self._start = HEAD + how.period  # the repeated period: [start, start + period)
        self._copies = 1 + (how.total - how.traced) // how.period
        self._segments = self._cut()
        self._made, self._transfers = self._find_made()
        self._by_place = [{place: n for n, place in numbers.items()} for numbers in (self._made, self._transfers)]
        self._check()
        self._next = 1 + max(
            [a.number for a, _ in log.held]
            + [e.number for s in self._segments for e in s.events if isinstance(e, Alloc)]
        )
        self._numbers: dict[tuple[int, int], int] = {}  # (number, copy) -> its own
        self._next_transfer = 1 + max(
            [e.transfer for s in self._segments for e in s.events if isinstance(e, (Launch, Mark))], default=0
        )
        self._transfer_numbers: dict[tuple[int, int], int] = {}
        self._meant: dict[int, set[_Made]] = {}  # by id of the segment, where what it frees and waits for was made

    def log(self) -> Log:
        events: list[Event] = []
        for segment, copy in self._order():
            place = segment.place
            if segment.block is not None:
                place = StepPart(place.phase, self._unit(self._image(segment.block, copy), segment.part))
            elif place.unit >= self._end:
                place = StepPart(place.phase, place.unit + self._more)
            events.append(Enter(place))
            for event in segment.events:
                events.extend(self._again(event, segment, copy))
        host_bytes = round(self._log.host_bytes * self._scale)
        held = self._held()
        if _num_left(held, events) and not _num_left(self._log.held, self._log.events):
            raise IrregularError  # what every block made, and only those that were traced let go
        return replace(self._log, held=held, events=events, units=self._units(), host_bytes=host_bytes)

    # -- segments

    def _block(self, unit: int | None) -> int | None:
        inside = unit is not None and self._first <= unit < self._end
        return (unit - self._first) // self._each if inside and unit is not None else None

    def _part(self, unit: int) -> int:
        """Which of its block's units this is."""
        return (unit - self._first) % self._each if self._first <= unit < self._end else 0

    def _unit(self, block: int, part: int) -> int:
        """In the deep model."""
        return self._first + block * self._each + part

    @property
    def _more(self) -> int:
        """Units that the deep model has beside those of the shallow one."""
        return (self._total - self._traced) * self._each

    def _cut(self) -> list[_Segment]:
        segments: list[_Segment] = []
        for event in self._log.events:
            if isinstance(event, Enter):
                segments.append(_Segment(event.place, self._block(event.place.unit), self._part(event.place.unit), []))
            else:
                segments[-1].events.append(event)
        return segments

    def _visits(self) -> Iterator[tuple[_Segment, int]]:
        """Each segment with how often its place was entered before."""
        count: dict[StepPart, int] = {}
        for segment in self._segments:
            count[segment.place] = count.get(segment.place, -1) + 1
            yield segment, count[segment.place]

    def _find_made(self) -> tuple[dict[int, _Made], dict[int, _Made]]:
        made: dict[int, _Made] = {}
        transfers: dict[int, _Made] = {}
        for segment, visit in self._visits():
            for at, event in enumerate(segment.events):
                where = _Made(segment.place.phase, segment.block, segment.part, visit, at)
                if isinstance(event, Alloc):
                    made[event.number] = where
                elif isinstance(event, (Launch, Mark)):
                    transfers[event.transfer] = where
        return made, transfers

    def _is_middle(self, block: int | None) -> bool:
        return block is not None and HEAD <= block < HEAD + PERIODS * self._period

    def _is_repeated(self, block: int | None) -> bool:
        return block is not None and self._start <= block < self._start + self._period

    def _check(self) -> None:
        """Blocks of the middle that are a period apart must do the same, event by event."""
        shapes: dict[tuple[StepPhase, int, int, int], list[object]] = {}
        for segment, visit in self._visits():
            if segment.block is None or not self._is_middle(segment.block):
                continue
            shape = [self._shape(event, segment.block) for event in segment.events]
            key = (segment.place.phase, segment.part, visit, (segment.block - HEAD) % self._period)
            if shapes.setdefault(key, shape) != shape:
                raise IrregularError

    def _shape(self, event: Event, block: int) -> object:
        """What must be equal: numbers by where they were made, from here."""
        if isinstance(event, Alloc):
            return (Alloc, event.num_bytes, event.stream)
        if isinstance(event, (Launch, Mark)):
            return (type(event), event.stream)
        if isinstance(event, (Free, Land, Wait)):
            where = self._where(event)
            kind = (type(event), event.stream if isinstance(event, Wait) else "")
            if where is None or where.block is None:
                return (*kind, where)
            return (*kind, where.phase, where.part, where.visit, where.block - block, where.at)
        return event

    def _order(self) -> Iterator[tuple[_Segment, int]]:
        """Segments in the order of the deep model, the repeated ones with the number of their copy."""
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

    def _image(self, block: int, copy: int) -> int:
        """The number in the deep model of a block of the shallow one."""
        if self._is_repeated(block):
            return block + copy * self._period
        return block if block < self._start else block + self._total - self._traced

    # -- events

    def _again(self, event: Event, segment: _Segment, copy: int) -> Iterator[Event]:
        if isinstance(event, Alloc):
            number = self._number(event.number, copy)
            yield Alloc(number, event.num_bytes, event.category, event.stream, event.operator)
        elif isinstance(event, (Launch, Mark)):
            yield replace(event, transfer=self._transfer(event.transfer, copy))
        elif isinstance(event, Free):
            for c in self._copies_meant(self._made.get(event.number), segment, copy):
                yield Free(self._number(event.number, c))
        elif isinstance(event, (Land, Wait)):
            for c in self._copies_meant(self._transfers.get(event.transfer), segment, copy):
                yield replace(event, transfer=self._transfer(event.transfer, c))
        elif isinstance(event, Op) and segment.place.phase is StepPhase.STEP:
            yield replace(event, num_bytes=int(event.num_bytes * self._scale), flops=event.flops * self._scale)
        else:
            yield event

    def _copies_meant(self, where: _Made | None, segment: _Segment, copy: int) -> Iterator[int | _Made]:
        """Which copy of what was made there is meant here."""
        if where is None or where.block is None:
            yield 0
        elif segment.block is None and self._is_one_blocks(where, segment):
            yield where
        elif segment.block is None:
            yield from range(self._copies) if self._is_repeated(where.block) else (0,)
        elif self._is_middle(segment.block) or (segment.block < HEAD and where.block < self._traced - TAIL):
            # A block of the head waits for what the blocks after it began, as those of the middle do.
            meant = self._image(segment.block, copy) + where.block - segment.block
            yield _Made(where.phase, meant, where.part, where.visit, where.at)
        elif self._is_repeated(where.block):
            yield 0 if segment.block < where.block else self._copies - 1
        else:
            yield 0

    def _is_one_blocks(self, where: _Made, segment: _Segment) -> bool:
        """Whether a segment outside of the blocks means what that block made, counted from the first one; else it means what each
        of them made, and so those behind too.

        A backward ends before the first blocks' work has landed, up to block `later`; what is of a later block is of each.
        """
        assert where.block is not None
        if not self._start <= where.block <= self._later:
            return False
        if id(segment) not in self._meant:
            found = (self._where(event) for event in segment.events if isinstance(event, (Free, Land, Wait)))
            self._meant[id(segment)] = {w for w in found if w is not None}
        behind = range(where.block + self._period, self._traced, self._period)
        return not any(replace(where, block=k) in self._meant[id(segment)] for k in behind if k > self._later)

    def _where(self, event: Free | Land | Wait) -> _Made | None:
        return self._made.get(event.number) if isinstance(event, Free) else self._transfers.get(event.transfer)

    def _number(self, number: int, which: int | _Made) -> int:
        return self._own(number, which, self._numbers, False)

    def _transfer(self, transfer: int, which: int | _Made) -> int:
        return self._own(transfer, which, self._transfer_numbers, True)

    def _own(self, number: int, which: int | _Made, own: dict[tuple[int, int], int], transfer: bool) -> int:
        if isinstance(which, _Made):
            number, which = self._resolved(which, transfer)
        if which == 0:
            return number
        if (number, which) not in own:
            if transfer:
                self._next_transfer += 1
                own[number, which] = self._next_transfer
            else:
                self._next += 1
                own[number, which] = self._next
        return own[number, which]

    def _resolved(self, where: _Made, transfer: bool) -> tuple[int, int]:
        """(number, copy) of what the deep model makes at a place of its own."""
        block, copy = where.block, 0
        assert block is not None
        if block >= self._start:
            beyond = block - self._start
            copy = min(beyond // self._period, self._copies - 1)
            block -= copy * self._period
            if not self._is_repeated(block):
                copy = 0
        return self._by_place[transfer][_Made(where.phase, block, where.part, where.visit, where.at)], copy

    # -- what is there before

    def _held(self) -> list[tuple[Alloc, int | None]]:
        held: list[tuple[Alloc, int | None]] = []
        for alloc, unit in self._log.held:
            block = self._block(unit)
            if block is None or unit is None:
                moved = unit is not None and unit >= self._end
                held.append((alloc, unit + self._more if moved and unit is not None else unit))
                continue
            for copy in range(self._copies if self._is_repeated(block) else 1):
                number = self._number(alloc.number, copy)
                held.append((replace(alloc, number=number), self._unit(self._image(block, copy), self._part(unit))))
        return held

    def _units(self) -> list[str]:
        """Names of the deep model's units: numbers in the names of the blocks go on."""
        names, first = self._log.units, self._first
        stem, _, number = names[first].rpartition(".")
        start = int(number) if number.isdecimal() else 0
        inside = [name.removeprefix(names[first]) for name in names[first : first + self._each]]
        blocks = [f"{stem}.{start + i}{part}" for i in range(self._total) for part in inside]
        return [*names[:first], *blocks, *names[self._end :]]
