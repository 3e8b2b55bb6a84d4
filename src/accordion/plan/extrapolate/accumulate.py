"""The time of a step that accumulates: what was traced, and micro-batches like its second one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from accordion.plan.events import Enter, Log, StepPart, StepPhase, begins
from accordion.plan.hardware import Cluster
from accordion.plan.replay.predict import step_of
from accordion.plan.replay.timeline import Step
from accordion.plan.search.space import Choice
from accordion.plan.trace.setup import TrainingSetup


def step_of_choice(
    log: Log, run: TrainingSetup, choice: Choice, cluster: Cluster, rate: str, *, drawn: bool = False
) -> Step:
    """A step at one of the assumed rates. `log`: with the choice's offload. `drawn`: with its stretches."""
    step = step_of(log, run, cluster, rate, drawn=drawn)
    between = choice.accumulate - run.accumulate
    if between <= 0:
        return step
    marks = [i for i, e in enumerate(log.events) if isinstance(e, Enter) and begins(e.place)]
    marks.append(next(i for i, e in enumerate(log.events) if isinstance(e, Enter) and e.place.phase is StepPhase.STEP))
    first, second = (step_of(replace(log, events=log.events[:end]), run, cluster, rate) for end in marks[1:3])
    return replace(
        step,
        seconds=step.seconds + between * (second.seconds - first.seconds),
        exposed_s=max(0.0, step.exposed_s + between * (second.exposed_s - first.exposed_s)),
        flops=step.flops + between * (second.flops - first.flops),
        by_kind=_more(step.by_kind, first.by_kind, second.by_kind, between),
        waits=_more(step.waits, first.waits, second.waits, between),
        by_place=_more_places(step, first, second, between),
    )


def _more(
    step: Mapping[str, float], first: Mapping[str, float], second: Mapping[str, float], times: int
) -> dict[str, float]:
    """`step` and so many times what `second` has beyond `first`."""
    return {
        name: max(0.0, step.get(name, 0.0) + times * (second.get(name, 0.0) - first.get(name, 0.0)))
        for name in {**step, **second}
    }


def _more_places(step: Step, first: Step, second: Step, times: int) -> dict[StepPart, tuple[float, float]]:
    nothing = (0.0, 0.0)

    def at(place: StepPart, which: int) -> float:
        now, one, two = (found.by_place.get(place, nothing)[which] for found in (step, first, second))
        return max(0.0, now + times * (two - one))

    return {place: (at(place, 0), at(place, 1)) for place in {**step.by_place, **second.by_place}}
