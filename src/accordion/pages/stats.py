"""Medians, spreads and ratios of rounds; pure numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median and how far what it is of lies apart."""

    median: float
    low: float
    high: float
    count: int


def quartiles(values: Sequence[float]) -> Spread:
    """The median of single measurements with their first and third quartile, by the nearest rank."""
    ordered, last = sorted(values), len(values) - 1
    return Spread(
        median=median(ordered),
        low=ordered[round(last / 4)],
        high=ordered[round(3 * last / 4)],
        count=len(ordered),
    )


def extremes(values: Sequence[float]) -> Spread:
    """The median of rounds with the least and the largest of them."""
    return Spread(median=median(values), low=min(values), high=max(values), count=len(values))


def ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Spread:
    """Ours over theirs: of the medians of each round, since a round's turns lie close in time and share a slow phase.

    `ours`, `theirs`: measurements by round.
    """
    return extremes([median(a) / median(b) for a, b in zip(ours, theirs, strict=True)])


def flat(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [value for one in rounds for value in one]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the losses say. `wrong`: contenders whose losses are not those of the others."""

    losses: dict[str, list[float]]
    tolerance: float
    wrong: list[str]


def compare_losses(losses: dict[str, list[float]], tolerance: float) -> Verdict:
    """Hold each contender's losses against the median over contenders, step by step.

    `losses`: by contender, from the first step on; a shorter list is compared as far as it goes. `tolerance`: relative. What
    is not finite, or missing altogether, is wrong; who was wrong in one step has no say in the next. Of two that disagree
    both are.
    """
    wrong = {name for name, values in losses.items() if not values}
    for step in range(max(map(len, losses.values()))):
        there = {name: values[step] for name, values in losses.items() if step < len(values) and name not in wrong}
        if not there:
            break
        middle = median(there.values())
        wrong |= {name for name, v in there.items() if not abs(v - middle) <= tolerance * abs(middle)}
    return Verdict(losses=losses, tolerance=tolerance, wrong=[name for name in losses if name in wrong])
