"""The time of a step that accumulates: what was traced, and micro-batches like its second one."""

from __future__ import annotations

from dataclasses import replace

from accordion.plan.events import Enter, Log, StepPhase, begins
from accordion.plan.hardware import Cluster
from accordion.plan.replay.predict import step_of
from accordion.plan.replay.timeline import Step
from accordion.plan.search.space import Choice
from accordion.plan.trace.setup import TrainingSetup


def step_of_choice(log: Log, run: TrainingSetup, choice: Choice, cluster: Cluster, rate: str) -> Step:
    """A step at one of the assumed rates. `log`: with the choice's offload."""
    step = step_of(log, run, cluster, rate)
    between = choice.accumulate - run.accumulate
    if between <= 0:
        return step
    marks = [i for i, e in enumerate(log.events) if isinstance(e, Enter) and begins(e.place)]
    marks.append(next(i for i, e in enumerate(log.events) if isinstance(e, Enter) and e.place.phase is StepPhase.STEP))
    first, second = (step_of(replace(log, events=log.events[:end]), run, cluster, rate) for end in marks[1:3])
    seconds, exposed = second.seconds - first.seconds, second.exposed_s - first.exposed_s
    flops = second.flops - first.flops
    return replace(
        step,
        seconds=step.seconds + between * seconds,
        exposed_s=max(0.0, step.exposed_s + between * exposed),
        flops=step.flops + between * flops,
    )
