"""Change the sizes in one log as they change between two other logs, which may have another strategy or checkpointing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from accordion.plan.events import Alloc, Collective, Log, Op
from accordion.plan.extrapolate.family import UnlikeError

Sizes = tuple[int, float]  # (bytes, flops)


def resized_like(log: Log, base: Log, other: Log) -> Log:
    """Return `log` with its sizes changed as they change from `base` to `other`, which differ in sizes alone.

    Events of `log` and `base` are matched by kind and size. If several events with one kind and size change differently, they
    are matched in order. Raises `UnlikeError` if the matches are ambiguous.
    """
    changes: dict[tuple[Any, ...], list[Sizes]] = defaultdict(list)
    for a, b in zip(_sized(base), _sized(other), strict=True):
        changes[_key(a)].append(_sizes(b))
    _add_by_operator(log, changes)
    varying = {key for key, sizes in changes.items() if any(size != key[:2] for size in sizes)}
    kinds = {key[2] for key in varying}
    counts: dict[object, int] = defaultdict(int)
    for event in _sized(log):
        key = _key(event)
        counts[key] += 1
        if key not in changes and key[2] in kinds and isinstance(event, (Alloc, Collective)):
            raise UnlikeError
    for key in varying:
        if len(set(changes[key])) > 1 and counts[key] != len(changes[key]):
            raise UnlikeError
    if not varying <= counts.keys():
        raise UnlikeError
    taken: dict[object, int] = defaultdict(int)
    known: dict[tuple[int, Sizes], Any] = {}  # a deep model's log has the same kernel object many times

    def changed(event: Any) -> Any:
        if not isinstance(event, (Alloc, Op, Collective)) or (key := _key(event)) not in varying:
            return event
        sizes = changes[key]
        size = sizes[min(taken[key], len(sizes) - 1)]
        taken[key] += 1
        event_and_size = id(event), size
        if event_and_size not in known:
            known[event_and_size] = _resized(event, *size)
        return known[event_and_size]

    allocs = [(changed(alloc), unit) for alloc, unit in log.held]
    return replace(log, held=allocs, events=[changed(event) for event in log.events])


def _resized(event: Alloc | Op | Collective, num_bytes: int, flops: float) -> Alloc | Op | Collective:
    if not isinstance(event, Op):
        return replace(event, num_bytes=num_bytes)
    unsure = event.unsure * num_bytes // max(1, event.num_bytes)
    return replace(event, num_bytes=num_bytes, flops=flops, unsure=unsure)


def _add_by_operator(log: Log, changes: dict[tuple[Any, ...], list[Sizes]]) -> None:
    """Add to `changes` entries for allocations of `log` whose category differs from that in the other logs. They are matched by
    operator and size alone. Checkpointing changes categories."""
    by_operator: dict[tuple[Any, ...], set[Sizes]] = defaultdict(set)
    for key, sizes in changes.items():
        by_operator[_without_kind(key)].update(sizes)
    for event in _sized(log):
        key = _key(event)
        candidates = by_operator[_without_kind(key)]
        if key not in changes and isinstance(event, Alloc) and len(candidates) == 1:
            changes[key] = list(candidates)


def _without_kind(key: tuple[Any, ...]) -> tuple[Any, ...]:
    num_bytes, flops, _, *others = key
    return (num_bytes, flops, *others)


def _sized(log: Log) -> Iterator[Alloc | Op | Collective]:
    yield from (alloc for alloc, _ in log.held)
    yield from (event for event in log.events if isinstance(event, (Alloc, Op, Collective)))


def _sizes(event: Alloc | Op | Collective) -> Sizes:
    return event.num_bytes, event.flops if isinstance(event, Op) else 0.0


def _key(event: Alloc | Op | Collective) -> tuple[Any, ...]:
    """Return (bytes, flops, kind, further properties): events with equal keys are matched."""
    if isinstance(event, Alloc):
        return (*_sizes(event), event.category, event.operator, event.stream)
    if isinstance(event, Op):
        return (*_sizes(event), Op, event.name, event.dtype, event.stream)
    return (*_sizes(event), Collective, event.kind, event.axis, event.stream)
