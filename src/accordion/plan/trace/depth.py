"""Extend the log of a model with few equal blocks to that of a deeper model, by repeating the events of the middle blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from torch import nn

from accordion.plan.events import Alloc, Enter, Event, Free, Launch, Log, Mark, Op, StepPart, StepPhase, Wait
from accordion.units import UnitChoice, choose_units

HEAD, TAIL = 1, 2  # numbers of first and last blocks that may differ; a reduce ends one block after its start
PERIODS = 3  # periods in the middle: the second one is repeated if the first and the third are equal to it


def num_traced(num_blocks: int, period: int, later: int = 0) -> int:
    """Return the number of equal blocks to trace, of `num_blocks`, so that the log of all can be derived; all if they are few.

    Args:
        period: distance of blocks with equal events; 2 if every second block is recomputed.
        later: in the backward, the device waits for the last transfer of a block `1 + later` blocks after that block.
    """
    least = HEAD + PERIODS * period + TAIL + later
    return num_blocks if num_blocks <= least else least + (num_blocks - least) % period


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualBlocks:
    """A container (`nn.ModuleList` or `nn.Sequential`) all of whose modules are equal units, such as a transformer's blocks."""

    container: str  # name of the module
    count: int  # number of blocks
    first_unit: int  # index of the first block among the units of the model
    each: int = 1  # number of units in one block: itself and the units inside it


def longest_run(model: nn.Module, units: UnitChoice) -> EqualBlocks | None:
    """Return a description of the longest `nn.ModuleList` or `nn.Sequential` of equal blocks in `model`; None if there is none.
    The container has two or more modules. All are units, inside of no unit but the root, and equal in class, in number of inner
    units, and in names, shapes and `requires_grad` of parameters. `units`: the choice of units, as for `accordion.shard`."""
    names = [name for name, _ in choose_units(model, units)]
    runs: list[EqualBlocks] = []
    for container, holder in model.named_modules():
        if not container or not isinstance(holder, (nn.ModuleList, nn.Sequential)) or len(holder) < 2:
            continue
        blocks = [f"{container}.{i}" for i in range(len(holder))]
        inside_a_unit = any(f"{container}.".startswith(f"{name}.") for name in names[1:])
        if inside_a_unit or not set(blocks) <= set(names):
            continue
        num_units = {sum(f"{name}.".startswith(f"{block}.") for name in names) for block in blocks}
        kinds = {
            (type(block), tuple((n, p.shape, p.requires_grad) for n, p in block.named_parameters())) for block in holder
        }
        if len(num_units) == len(kinds) == 1:
            first, each = names.index(blocks[0]), num_units.pop()
            runs.append(EqualBlocks(container=container, count=len(holder), first_unit=first, each=each))
    return max(runs, key=lambda run: run.count, default=None)


class _Origin(NamedTuple):
    """Position of the event that creates an allocation or a transfer. It identifies that allocation or transfer in the log of
    the model with fewer blocks, and in that of the deep model."""

    phase: StepPhase
    block: int | None  # index of the equal block; None outside of them
    part: int  # index of the unit within its block; outside of blocks, of the unit
    visit: int  # how often this phase of this unit was entered before in the step (accumulation)
    at: int  # index of the event in its `_Segment`


@dataclass(slots=True)
class _Segment:
    """The events from one `Enter` to the next: visit `visit` (from 0) of `place`, unit `part` of `block` (None: no block)."""

    place: StepPart
    block: int | None
    part: int
    visit: int
    events: list[Event]

    def origin(self, at: int, block: int | None) -> _Origin:
        """Return the origin of the allocation or transfer that event number `at` creates in this segment's copy for `block`."""
        return _Origin(self.place.phase, block, self.part, self.visit, at)


class IrregularError(Exception):
    """Raised if the events of the blocks do not repeat, so that no log of the deep model can be derived from them."""


def _num_leaked(allocs: list[tuple[Alloc, int | None]], events: list[Event]) -> int:
    """Return the number of allocations that are live after the step in `events`, minus the number before the step. `allocs`:
    the allocations before the step. Raises `IrregularError` if the step frees memory that is not allocated."""
    live = {alloc.number for alloc, _ in allocs}
    for event in events:
        if isinstance(event, Alloc):
            live.add(event.number)
        elif isinstance(event, Free):
            if event.number not in live:
                raise IrregularError
            live.remove(event.number)
    return len(live) - len(allocs)


class Extension:
    """Derives the log of a deep model from the log of the same model with fewer blocks; the method `log` returns it. In the
    result, allocations and transfers have new numbers. Constructor and `log` raise `IrregularError`, `KeyError` or `IndexError`
    if the events of the blocks do not repeat.

    Args:
        log: the log of the model with fewer blocks.
        blocks: the equal blocks of the deep model.
        traced: number of blocks in `log`.
        period, later: as in `num_traced`.
        scale: number of trained elements of the deep model, divided by that of the model with fewer blocks.
    """

    def __init__(self, log: Log, blocks: EqualBlocks, *, traced: int, period: int, later: int, scale: float) -> None:
        self._log, self._first, self._each = log, blocks.first_unit, blocks.each
        self._traced, self._period, self._later, self._scale = traced, period, later, scale
        self._end = self._first + traced * self._each  # the first unit after the blocks
        self._start = HEAD + period  # the repeated blocks: [start, start + period)
        self._total, self._added = blocks.count, blocks.count - traced  # blocks
        self._origins: dict[object, _Origin] = {}  # in `log`, by `_key`
        self._segments = self._split()
        self._check()
        # In the deep model's log, by origin; by `_key` for allocations and transfers that are older than the step.
        self._numbers: dict[object, int] = {}
        self._referenced: dict[int, set[_Origin]] = {}  # by id of the segment: origins of its frees and waits

    def log(self) -> Log:
        allocs, events = self._deep_held(), list[Event]()
        for segment, block in self._order():
            unit = segment.place.unit + (self._added * self._each if segment.place.unit >= self._end else 0)
            if block is not None:
                unit = self._first + block * self._each + segment.part
            events.append(Enter(StepPart(segment.place.phase, unit)))
            for at, event in enumerate(segment.events):
                events.extend(self._deep_events(event, at, segment, block))
        if _num_leaked(allocs, events) and not _num_leaked(self._log.held, self._log.events):
            raise IrregularError  # each block allocates it, and only the traced blocks free it
        host_bytes = round(self._log.host_bytes * self._scale)
        return replace(self._log, held=allocs, events=events, units=self._units(), host_bytes=host_bytes)

    # -- segments

    def _position(self, unit: int) -> tuple[int | None, int]:
        """Return (index of the block, index within the block) of a unit; outside of blocks, (None, `unit`)."""
        if not self._first <= unit < self._end:
            return None, unit
        return divmod(unit - self._first, self._each)

    def _split(self) -> list[_Segment]:
        segments: list[_Segment] = []
        visits: Counter[StepPart] = Counter()
        for event in self._log.events:
            if isinstance(event, Enter):
                block, part = self._position(event.place.unit)
                segments.append(_Segment(event.place, block, part, visits[event.place], []))
                visits[event.place] += 1
                continue
            segment = segments[-1]
            if isinstance(event, (Alloc, Launch, Mark)):
                self._origins[_key(event)] = segment.origin(len(segment.events), segment.block)
            segment.events.append(event)
        return segments

    def _is_middle(self, block: int) -> bool:
        return HEAD <= block < HEAD + PERIODS * self._period

    def _is_repeated(self, block: int | None) -> bool:
        return block is not None and self._start <= block < self._start + self._period

    def _check(self) -> None:
        """Raise `IrregularError` unless the middle blocks repeat: blocks that are a period apart must have equal events."""
        shapes: dict[tuple[StepPhase, int, int, int], list[object]] = {}
        for segment in self._segments:
            if segment.block is None or not self._is_middle(segment.block):
                continue
            shape = [self._shape(event, segment.block) for event in segment.events]
            key = (segment.place.phase, segment.part, segment.visit, (segment.block - HEAD) % self._period)
            if shapes.setdefault(key, shape) != shape:
                raise IrregularError

    def _shape(self, event: Event, block: int) -> object:
        """Return a description of `event`, which belongs to the block with index `block`. A description refers to other events
        by positions relative to `block`, not by numbers. So events at one position of equal blocks have equal descriptions."""
        if isinstance(event, Alloc):
            return (Alloc, event.num_bytes, event.stream)
        if isinstance(event, (Launch, Mark)):
            return (type(event), event.stream)
        if isinstance(event, (Free, Wait)):
            origin = self._origins.get(_key(event))
            if origin is not None and origin.block is not None:
                origin = origin._replace(block=origin.block - block)
            return (type(event), getattr(event, "stream", ""), origin)
        return event

    def _order(self) -> Iterator[tuple[_Segment, int | None]]:
        """Yield (segment, index of its block in the deep model) in the order of the deep model's events. A segment of a
        repeated block is yielded once for each copy of that block. Outside of blocks the index is None."""
        for is_repeated, run in groupby(self._segments, lambda segment: self._is_repeated(segment.block)):
            segments = list(run)
            if not is_repeated:
                yield from ((s, None if s.block is None else self._deep_block(s.block)) for s in segments)
                continue
            added = range(0, self._added + 1, self._period)
            for more in added if segments[0].place.phase is StepPhase.FORWARD else reversed(added):
                yield from ((s, s.block + more) for s in segments if s.block is not None)

    def _deep_block(self, block: int) -> int:
        """Return the index in the deep model of a traced block; for a repeated block, that of its last copy."""
        return block if block < self._start else block + self._added

    # -- events

    def _deep_events(self, event: Event, at: int, segment: _Segment, block: int | None) -> Iterator[Event]:
        """Yield the events of the deep model's log for `event`, number `at` of `segment`: one event, but for `Free` and `Wait`
        one for each number that `_references` returns. Flops and bytes of the optimizer's step are multiplied by the scale.
        `block`: index in the deep model of this copy of `segment`; None outside of blocks."""
        if isinstance(event, Alloc):
            number = self._number(segment.origin(at, block))
            yield Alloc(number, event.num_bytes, event.category, event.stream, event.operator)
        elif isinstance(event, (Launch, Mark)):
            yield replace(event, transfer=self._number(segment.origin(at, block)))
        elif isinstance(event, Free):
            yield from map(Free, self._references(event, segment, block))
        elif isinstance(event, Wait):
            for number in self._references(event, segment, block):
                yield replace(event, transfer=number)
        elif isinstance(event, Op) and segment.place.phase is StepPhase.STEP:
            yield replace(event, num_bytes=int(event.num_bytes * self._scale), flops=event.flops * self._scale)
        else:
            yield event

    def _number(self, name: object) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _references(self, event: Free | Wait, segment: _Segment, block: int | None) -> Sequence[int]:
        """Return the numbers, in the deep model's log, of the allocations or transfers to which `event` refers: one number, or
        if `segment` is outside of blocks, perhaps one for each copy of a repeated block. `block`: index in the deep model of
        this copy of `segment`. Raises `KeyError` if the deep model's log has no such allocation or transfer so far."""
        origin = self._origins.get(_key(event))
        if origin is None or origin.block is None:
            return [self._number(origin or _key(event))]
        blocks: Sequence[int]
        if segment.block is None or block is None:
            blocks = [self._deep_block(origin.block)]
            if self._refers_to_one_block(segment, origin):
                blocks = [origin.block]
            elif self._is_repeated(origin.block):
                blocks = range(origin.block, origin.block + self._added + 1, self._period)
        elif self._is_middle(segment.block) or (segment.block < HEAD and origin.block < self._traced - TAIL):
            # The first block waits for transfers that the blocks after it started, just as middle blocks do.
            blocks = [block + origin.block - segment.block]
        else:
            blocks = [self._deep_block(origin.block)]
        return [self._numbers[origin._replace(block=b)] for b in blocks]

    def _refers_to_one_block(self, segment: _Segment, origin: _Origin) -> bool:
        """Return True if frees or waits in `segment`, outside of blocks, refer to `origin` in the deep model's block with index
        `origin.block` alone; False if in each copy of a repeated block, or else in block `_deep_block(origin.block)`."""
        # A backward ends before the transfers of blocks 0 to `later` have ended, so these are waited for after it, block by
        # block. If the same event of a later block is referred to as well, then the segment refers to each block.
        assert origin.block is not None
        if not self._start <= origin.block <= self._later:
            return False
        if id(segment) not in self._referenced:
            origins = (self._origins.get(_key(e)) for e in segment.events if isinstance(e, (Free, Wait)))
            self._referenced[id(segment)] = {o for o in origins if o is not None}
        blocks = range(origin.block + self._period, self._traced, self._period)
        return not any(origin._replace(block=k) in self._referenced[id(segment)] for k in blocks if k > self._later)

    # -- memory before the step, and names

    def _deep_held(self) -> list[tuple[Alloc, int | None]]:
        allocs: list[tuple[Alloc, int | None]] = []
        for alloc, unit in self._log.held:
            block = None if unit is None else self._position(unit)[0]
            added: Sequence[int] = [self._added if unit is not None and unit >= self._end else 0]
            if self._is_repeated(block):
                added = range(0, self._added + 1, self._period)
            elif block is not None:
                added = [self._deep_block(block) - block]
            for more in added:
                number = self._number((*_key(alloc), more) if len(added) > 1 else _key(alloc))
                allocs.append((replace(alloc, number=number), None if unit is None else unit + more * self._each))
        return allocs

    def _units(self) -> list[str]:
        """Return the names of the deep model's units, by index. Numbers of blocks are continued, as in "layers.7"."""
        names, first = self._log.units, self._first
        stem, _, number = names[first].rpartition(".")
        start = int(number) if number.isdecimal() else 0
        inside = [name.removeprefix(names[first]) for name in names[first : first + self._each]]
        blocks = [f"{stem}.{start + i}{part}" for i in range(self._total) for part in inside]
        return [*names[:first], *blocks, *names[self._end :]]


def _key(event: Alloc | Free | Launch | Mark | Wait) -> tuple[str, int]:
    """Return a key of the allocation or transfer that `event` creates or refers to. Keys are unique within one log."""
    return ("memory", event.number) if isinstance(event, (Alloc, Free)) else ("transfer", event.transfer)
