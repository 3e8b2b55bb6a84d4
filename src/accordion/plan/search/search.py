"""Which configuration to take: all that are asked for are predicted, and each that is not chosen says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from accordion.plan.events import Log
from accordion.plan.hardware import GIB, Cluster
from accordion.plan.search.evaluate import (
    FIRST,
    HOST_MARGIN,
    Candidate,
    Evaluator,
    Outcome,
    Say,
    SearchTask,
    frugal_space,
    on_fewer,
)
from accordion.plan.search.space import NO_OFFLOAD, Choice, Space, choices
from accordion.plan.search.worker import SecondProcess, search_half, theirs_of
from accordion.plan.trace.setup import Subject
from accordion.units import AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """`best`: the fastest that fits on all GPUs asked for, or None. `fewest`: the fastest on the least GPUs on which any fits;
    None where no other number was looked at.

    `logs`: what was traced, and not worked out from other traces, without offload.
    """

    best: Candidate | None
    fewest: Candidate | None
    candidates: Sequence[Candidate]
    logs: Mapping[Choice, Log]


def search(
    subject_for: Callable[[int], Subject],
    space: Space,
    cluster: Cluster,
    num_params: int,
    say: Say = lambda text: None,
    processes: int = 1,
    fewest: bool = False,
    known: Mapping[Choice, Log] | None = None,
) -> SearchResult:
    """Predict every choice of `space`. `subject_for`: training with that micro-batch. `processes`: 2 has a second one take half
    of the ways of checkpointing, and fewer GPUs. `fewest`: smaller numbers of GPUs are looked at too, with what takes least
    memory, unless there is one choice alone. `known`: logs that a search of the same model and step traced. Raises `UsageError`
    where the space is empty.
    """
    task = SearchTask(subject_for=subject_for, space=space, cluster=cluster, num_params=num_params)
    every = choices(space, cluster)
    evaluator = Evaluator(task, say)
    evaluator.traces.traced.update(known or {})
    with ExitStack() as stack:
        # Copies of a hybrid are not fixed by anything but the GPUs; with all else fixed, no other number is asked for.
        is_open = len({replace(c, replicas=1) for c in every}) > 1
        candidates, less = _searched(evaluator, task, every, say, processes, fewest and is_open, stack)
        candidates += evaluator.other_units(candidates)
        candidates += evaluator.with_secondary(candidates)
        candidates += evaluator.with_activations(candidates)
        place = {replace(choice, secondary=0): i for i, choice in enumerate(every)}
        first_place = space.activations[0]
        candidates.sort(
            key=lambda c: place[replace(c.choice, offload=NO_OFFLOAD, units=AUTO, secondary=0, activations=first_place)]
        )
        best = evaluator.verified([c for c in candidates if c.choice.gpus == max(space.gpus)])
        if less is not None and best is not None:
            on_less, logs = less()
            candidates += on_less
            evaluator.traces.traced.update(logs)
    least = min((c.choice.gpus for c in candidates if c.fits), default=0)
    looked = is_open or max(space.gpus) == 1
    on_fewest = evaluator.fastest([c for c in candidates if c.choice.gpus == least]) if looked else None
    evaluator.at_all_rates(best or closest(candidates, space))
    for candidate in candidates:
        candidate.why = "" if candidate is best else why_not(candidate, best, space, cluster)
    return SearchResult(best=best, fewest=on_fewest, candidates=candidates, logs=evaluator.traces.traced)


def _searched(
    evaluator: Evaluator,
    task: SearchTask,
    every: Sequence[Choice],
    say: Say,
    processes: int,
    fewest: bool,
    stack: ExitStack,
) -> tuple[list[Candidate], Callable[[], Outcome] | None]:
    """The candidates, what bounds others first; and what gives those on fewer GPUs."""
    first = [c for c in every if c.strategy == FIRST] or every
    theirs = theirs_of(first) if processes > 1 else []
    second = stack.enter_context(SecondProcess(task, say)) if theirs else None
    half = None if second is None else second.asked(search_half, theirs)
    candidates = evaluator.candidates([c for c in first if c not in theirs])
    if half is not None:
        found, logs = half()
        evaluator.adopt(found, logs)
        candidates += found
    less = None
    if fewest and len(task.space.gpus) == 1 and any(c.fits for c in candidates):
        known = evaluator.traces.known(choices(replace(frugal_space(task.space), gpus=task.space.gpus), task.cluster))
        less = (lambda: on_fewer(task, known, say)) if second is None else second.asked(on_fewer, known)
    candidates += evaluator.candidates(evaluator.promising([c for c in every if c not in first]))
    return candidates, less


def closest(candidates: Sequence[Candidate], space: Space) -> Candidate:
    """What comes closest to fitting all GPUs asked for, of what was worked out where anything was."""
    mine = [c for c in candidates if c.choice.gpus == max(space.gpus)]
    return min([c for c in mine if c.memory is not None] or mine, key=lambda c: c.needed_bytes)


def why_not(candidate: Candidate, best: Candidate | None, space: Space, cluster: Cluster) -> str:
    card = cluster.card_bytes / GIB
    if candidate.bound:
        return candidate.bound
    if candidate.memory is None:
        return f"takes {candidate.least_bytes / GIB:,.0f} GiB at least, of {card:.0f}"
    if candidate.memory.is_open(cluster):
        return unsettled(candidate, cluster)
    if not candidate.memory.fits(cluster):
        least = " at least" if "at_least" in candidate.memory.reserved_bytes else ""
        return f"needs{least} {candidate.needed_bytes / GIB:,.1f} of {card:.1f} GiB"
    if not candidate.fits:
        needed = candidate.host_bytes * HOST_MARGIN / GIB
        return f"needs {needed:,.0f} of {cluster.host_bytes / GIB:,.0f} GiB of a machine's memory"
    if best is None or best.steps is None:
        return ""
    if candidate.choice.gpus < best.choice.gpus:
        return "fits, on fewer GPUs than asked for"
    ratio = best.tokens_per_s(space.tokens) / candidate.tokens_per_s(space.tokens)
    if ratio < 1 + cluster.tellable:
        return f"too close to tell apart ({(ratio - 1) * 100:+.0f} %)"
    return f"{(ratio - 1) * 100:.0f} % slower"


def unsettled(candidate: Candidate, cluster: Cluster) -> str:
    """Why there is no verdict, and what would bring one."""
    assert candidate.memory is not None
    memory = candidate.memory
    left = (cluster.card_bytes - memory.needed_bytes) / GIB
    return (
        f"no verdict: {memory.peak.unsure_operator} may take up to {memory.peak.unsure_bytes / GIB:,.2f} GiB more inside than a "
        f"trace sees, of {left:,.2f} GiB left; measure one step's torch.cuda.max_memory_reserved(), or leave that much room"
    )
