"""How sizes change from one log to another, carried over to a third that does the same with other strategies or checkpointing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from accordion.plan.events import Alloc, Collective, Log, Op
from accordion.plan.extrapolate.family import UnlikeError

Sizes = tuple[int, float]  # bytes, operations


def alike(log: Log, base: Log, other: Log) -> Log:
    """`log` with its sizes changed as they change from `base` to `other`, which differ in sizes alone.

    Memory, kernels and messages answer to each other by what they are and how large. Where several of the same size
    change differently, they do so in order. Raises `UnlikeError` where that does not say which.
    """
    changes: dict[tuple[Any, ...], list[Sizes]] = defaultdict(list)
    for a, b in zip(_sized(base), _sized(other), strict=True):
        changes[_key(a)].append(_sizes(b))
    _adopt(log, changes)
    varying = {key for key, sizes in changes.items() if any(size != key[:2] for size in sizes)}
    kinds = {key[2] for key in varying}
    mine: dict[object, int] = defaultdict(int)
    for event in _sized(log):
        key = _key(event)
        mine[key] += 1
        if key not in changes and key[2] in kinds and isinstance(event, (Alloc, Collective)):
            raise UnlikeError
    for key in varying:
        if len(set(changes[key])) > 1 and mine[key] != len(changes[key]):
            raise UnlikeError
    if not varying <= mine.keys():
        raise UnlikeError
    taken: dict[object, int] = defaultdict(int)
    known: dict[tuple[int, Sizes], Any] = {}  # kernels come again as the same objects

    def changed(event: Any) -> Any:
        if not isinstance(event, (Alloc, Op, Collective)) or (key := _key(event)) not in varying:
            return event
        sizes = changes[key]
        size = sizes[min(taken[key], len(sizes) - 1)]
        taken[key] += 1
        again = id(event), size
        if again not in known:
            known[again] = _resized(event, *size)
        return known[again]

    held = [(changed(alloc), unit) for alloc, unit in log.held]
    return replace(log, held=held, events=[changed(event) for event in log.events])


def _resized(event: Alloc | Op | Collective, num_bytes: int, flops: float) -> Alloc | Op | Collective:
    if not isinstance(event, Op):
        return replace(event, num_bytes=num_bytes)
    unsure = event.unsure * num_bytes // max(1, event.num_bytes)
    return replace(event, num_bytes=num_bytes, flops=flops, unsure=unsure)


def _adopt(log: Log, changes: dict[tuple[Any, ...], list[Sizes]]) -> None:
    """What is kept in one log and passes in the other, as under checkpointing, changes as the same operator's memory does."""
    by_operator: dict[tuple[Any, ...], set[Sizes]] = defaultdict(set)
    for key, sizes in changes.items():
        by_operator[_of_any_kind(key)].update(sizes)
    for event in _sized(log):
        key = _key(event)
        found = by_operator[_of_any_kind(key)]
        if key not in changes and isinstance(event, Alloc) and len(found) == 1:
            changes[key] = list(found)


def _of_any_kind(key: tuple[Any, ...]) -> tuple[Any, ...]:
    num_bytes, flops, _, *which = key
    return (num_bytes, flops, *which)


def _sized(log: Log) -> Iterator[Alloc | Op | Collective]:
    yield from (alloc for alloc, _ in log.held)
    yield from (event for event in log.events if isinstance(event, (Alloc, Op, Collective)))


def _sizes(event: Alloc | Op | Collective) -> Sizes:
    return event.num_bytes, event.flops if isinstance(event, Op) else 0.0


def _key(event: Alloc | Op | Collective) -> tuple[Any, ...]:
    """(bytes, operations, what kind of thing it is, and which)."""
    if isinstance(event, Alloc):
        return (*_sizes(event), event.category, event.operator, event.stream)
    if isinstance(event, Op):
        return (*_sizes(event), Op, event.name, event.dtype, event.stream)
    return (*_sizes(event), Collective, event.kind, event.axis, event.stream)
