"""Medians, spreads and ratios of rounds of measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and range of `count` values. `low`, `high`: least and largest, or, by `quartiles()`, first and third quartile."""

    median: float
    low: float
    high: float
    count: int


def quartiles(values: Sequence[float]) -> Spread:
    """Return the median of `values`, with the values nearest to the first and the third quartile as `low` and `high`."""
    ordered, last = sorted(values), len(values) - 1
    return Spread(
        median=median(ordered),
        low=ordered[round(last / 4)],
        high=ordered[round(3 * last / 4)],
        count=len(ordered),
    )


def extremes(values: Sequence[float]) -> Spread:
    """Return the median of `values` with the lowest and the highest value."""
    return Spread(median=median(values), low=min(values), high=max(values), count=len(values))


def ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Spread:
    """Return median, lowest and highest of median(a) / median(b) over rounds. a, b: lists of one round in `ours` and `theirs`,
    which are [round][measurement]."""
    # By round, since measurements of a round are close in time, and a slow phase of the machine affects both.
    return extremes([median(a) / median(b) for a, b in zip(ours, theirs, strict=True)])


def flat(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [value for one in rounds for value in one]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of `compare_losses`. `losses`, `tolerance`: the arguments. `wrong`: names of contenders whose losses are wrong."""

    losses: dict[str, list[float]]
    tolerance: float
    wrong: list[str]


def compare_losses(losses: dict[str, list[float]], tolerance: float) -> Verdict:
    """Compare each contender's losses with the median over contenders, step by step, and return which are wrong, as a
    `Verdict`. A contender is wrong if it has no losses, if a loss is not finite, or if a loss differs from the median by more
    than `tolerance` times the median. It does not count in the medians of later steps. If only two disagree, both are wrong.
    `losses`: name of each contender, one or more -> its losses from the first step on; lists may differ in length."""
    wrong = {name for name, values in losses.items() if not values}
    for step in range(max(map(len, losses.values()))):
        at_step = {name: values[step] for name, values in losses.items() if step < len(values) and name not in wrong}
        if not at_step:
            break
        middle = median([v for v in at_step.values() if math.isfinite(v)] or [math.nan])
        wrong |= {name for name, v in at_step.items() if not abs(v - middle) <= tolerance * abs(middle)}
    return Verdict(losses=losses, tolerance=tolerance, wrong=[name for name in losses if name in wrong])
