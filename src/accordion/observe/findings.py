"""Evaluate recorded steps: times by unit, ranks that the others wait for, and the changes that would gain most."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from accordion.observe.values import COMPUTE, WAIT, RankTrace, TraceSpan

MIB = 2**20
SMALLEST_GAIN = 0.01  # of a step; smaller gains are not worth a line
STRAGGLES = 1.05  # times the median compute time of all ranks
HIDDEN = 0.1  # a gather is prefetched in time if the compute stream waits for less of its time
REGATHERS = ("full_shard", "hybrid_shard", "hybrid_shard_optim")  # strategies that gather again for the backward


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTimes:
    """Microseconds per step of one unit, with index `unit`, on one rank: forward and backward without waits, transfers, and the
    compute stream's waits for transfers. `gathers`: gathers per step. `hits`: gathers per step for which the compute stream
    waited less than 10 % of their time."""

    unit: int
    forward_us: float
    backward_us: float
    gather_us: float
    reduce_us: float
    gather_wait_us: float
    reduce_wait_us: float
    gathers: float
    hits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinding:
    """A suggested change, `text`, and the most microseconds per step that it would save, `gain_us`."""

    gain_us: float
    text: str


def unit_times(rank: RankTrace) -> list[UnitTimes]:
    """Return the mean times of each unit over the recorded steps of `rank`, in the order of `rank.units`."""
    num_steps = max(len(rank.steps), 1)
    total: dict[tuple[int, str, str], float] = defaultdict(float)
    waits = [span for span in rank.spans if span.lane == WAIT]
    for span in rank.spans:
        total[span.unit, span.lane, span.kind] += span.us
    for span, waited_us in _overlaps([span for span in rank.spans if span.lane == COMPUTE], waits):
        total[span.unit, COMPUTE, span.kind] -= waited_us
    gathers = [span for span in rank.spans if span.lane == "gather"]
    counts = Counter(gather.unit for gather in gathers)
    hits: dict[int, int] = defaultdict(int)
    for gather, wait in _waits_of(gathers, waits):
        hits[gather.unit] += wait is None or wait.us < HIDDEN * gather.us
    return [
        UnitTimes(
            unit=unit,
            forward_us=total[unit, COMPUTE, "forward"] / num_steps,
            backward_us=total[unit, COMPUTE, "backward"] / num_steps,
            gather_us=total[unit, "gather", "gather"] / num_steps,
            reduce_us=sum(total[unit, lane, lane] for lane in ("reduce", "all-reduce")) / num_steps,
            gather_wait_us=total[unit, WAIT, "gather"] / num_steps,
            reduce_wait_us=sum(total[unit, WAIT, lane] for lane in ("reduce", "all-reduce")) / num_steps,
            gathers=counts[unit] / num_steps,
            hits=hits[unit] / num_steps,
        )
        for unit in range(len(rank.units))
    ]


def findings(ranks: Sequence[RankTrace]) -> list[StepFinding]:
    """Return the changes that would save 1 % of the median step or more, the largest saving first. `ranks` must have a step. The
    saving by earlier gathers, or by keeping full parameters, is that of the rank that saves least: all ranks change together."""
    step_us = median([end - start for rank in ranks for start, end in rank.steps])
    possible = [*_stragglers(ranks), *_prefetch(ranks), *_keep(ranks)]
    worth = [finding for finding in possible if finding.gain_us >= SMALLEST_GAIN * step_us]
    return sorted(worth, key=lambda finding: -finding.gain_us)


def _stragglers(ranks: Sequence[RankTrace]) -> Iterator[StepFinding]:
    """Yield a finding for each rank that computes over 5 % longer than the median rank: the others wait for it in collectives."""
    times = [unit_times(rank) for rank in ranks]
    totals = [sum(unit.forward_us + unit.backward_us for unit in units) for units in times]
    # The lower median: of two ranks the faster one.
    middle = sorted(totals)[(len(totals) - 1) // 2]
    for rank, units, total in zip(ranks, times, totals, strict=True):
        if total > STRAGGLES * middle:
            slowest = max(units, key=lambda unit: unit.forward_us + unit.backward_us)
            yield StepFinding(
                gain_us=total - middle,
                text=f"rank {rank.rank} computes for {_ms(total)} in a step and the median rank for {_ms(middle)}, so the others "
                f"wait for it; most of its time is in {rank.units[slowest.unit].name}. Give it an equal batch, or look for "
                "another program on its device.",
            )


def _prefetch(ranks: Sequence[RankTrace]) -> Iterator[StepFinding]:
    """Yield one finding if gathers could begin earlier on every rank: compute waits for them while the gather stream is idle."""
    # Of the rank that gains least.
    rank, by_unit = min(((rank, _earlier(rank)) for rank in ranks), key=lambda pair: sum(pair[1].values()))
    gain = sum(by_unit.values())
    if not gain:
        return
    worst = max(by_unit, key=lambda unit: by_unit[unit])
    largest = max(unit.full_bytes for unit in rank.units)
    wait = unit_times(rank)[worst].gather_wait_us
    yield StepFinding(
        gain_us=gain,
        text=f"gathers of {rank.units[worst].name} are exposed by {_ms(wait)} in a step; "
        f"prefetch=accordion.Prefetch(budget_bytes={2 * largest}) would start gathers earlier, hides up to {_ms(gain)} over all "
        f"units and costs {largest / MIB:.0f} MiB.",
    )


def _earlier(rank: RankTrace) -> dict[int, float]:
    """Return {index of a unit: microseconds per step by which waits for the unit's gathers would shrink if each gather began as
    soon as the previous one ended}. The first gather of a step does not count."""
    waits = [span for span in rank.spans if span.lane == WAIT]
    by_unit: dict[int, float] = defaultdict(float)
    for start_us, end_us in rank.steps:
        free_us: float | None = None  # when the gather before has ended
        gathers = [span for span in rank.spans if span.lane == "gather" and start_us <= span.start_us < end_us]
        for gather, wait in _waits_of(gathers, waits):
            if free_us is not None and wait is not None:
                by_unit[gather.unit] += max(0.0, min(wait.us, gather.start_us - free_us)) / len(rank.steps)
            free_us = max(free_us or 0.0, gather.end_us)
    return by_unit


def _keep(ranks: Sequence[RankTrace]) -> Iterator[StepFinding]:
    """Yield a finding if all ranks gather again for the backward: to keep full parameters, which saves the backward's waits."""
    if any(rank.strategy not in REGATHERS for rank in ranks):
        return
    waited_us = []  # per step, of each rank
    for rank in ranks:
        waits = [span for span in rank.spans if span.lane == WAIT and span.kind == "gather"]
        backward = [span for span in rank.spans if span.lane == COMPUTE and span.kind == "backward"]
        waited_us.append(sum(us for _, us in _overlaps(backward, waits)) / max(len(rank.steps), 1))
    gain = min(waited_us)
    kept_bytes = sum(unit.full_bytes for unit in ranks[0].units)
    yield StepFinding(
        gain_us=gain,
        text=f"the backward waits {_ms(gain)} in a step for gathers; strategy='shard_grad_op' keeps full parameters from the "
        f"forward, so these waits end, and costs up to {kept_bytes / MIB:.0f} MiB.",
    )


def _overlaps(spans: Sequence[TraceSpan], others: Sequence[TraceSpan]) -> Iterator[tuple[TraceSpan, float]]:
    """Yield (span, microseconds) for each overlap in time of one of `spans` with one of `others`. Spans of one list must not
    overlap each other."""
    a, b = sorted(spans, key=lambda span: span.start_us), sorted(others, key=lambda span: span.start_us)
    i = j = 0
    while i < len(a) and j < len(b):
        overlap_us = min(a[i].end_us, b[j].end_us) - max(a[i].start_us, b[j].start_us)
        if overlap_us > 0:
            yield a[i], overlap_us
        if a[i].end_us < b[j].end_us:
            i += 1
        else:
            j += 1


def _waits_of(
    transfers: Sequence[TraceSpan], waits: Sequence[TraceSpan]
) -> Iterator[tuple[TraceSpan, TraceSpan | None]]:
    """Yield (transfer, wait) for each of `transfers`, in order of time. wait: the first of `waits` for the transfer's unit and
    lane that ended after the transfer began and belongs to no earlier transfer; None if no wait does."""
    by_place: dict[tuple[int, str], list[TraceSpan]] = defaultdict(list)
    for wait in sorted(waits, key=lambda span: span.start_us, reverse=True):
        by_place[wait.unit, wait.kind].append(wait)
    for transfer in sorted(transfers, key=lambda span: span.start_us):
        left = by_place[transfer.unit, transfer.lane]
        while left and left[-1].end_us < transfer.start_us:
            left.pop()
        yield transfer, left.pop() if left else None


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f} ms"
