"""Which configuration to take: all that are asked for are predicted, and each that is not chosen says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from accordion.config import FULL_SHARD
from accordion.plan.choice import Choice
from accordion.plan.events import Log
from accordion.plan.hardware import GIB, Cluster
from accordion.plan.search.evaluate import HOST_MARGIN, Candidate, Evaluator, Say, on_fewer
from accordion.plan.search.space import Space


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


def search_in(
    space: Space, say: Say = lambda text: None, fewest: bool = False, known: Mapping[Choice, Log] | None = None
) -> SearchResult:
    """Predict every choice of `space`.

    Args:
        fewest: look at smaller numbers of GPUs too, with what takes least memory, unless there is one choice alone.
        known: logs that a search of the same model and step traced.

    Raises `UsageError` if the space is empty.
    """
    every = space.choices()
    evaluator = Evaluator(space, say, known)
    # Copies of a hybrid are not fixed by anything but the GPUs; with all else fixed, no other number is asked for.
    is_open = len({replace(c, replicas=1) for c in every}) > 1
    # Full sharding takes least memory, and others can only wait less: it bounds them.
    first = [c for c in every if c.strategy == FULL_SHARD] or every
    candidates = evaluator.candidates(first)
    looks_at_fewer = fewest and is_open and len(space.cluster.gpus) == 1 and any(c.fits for c in candidates)
    candidates += evaluator.candidates(evaluator.promising([c for c in every if c not in first]))
    for more in (evaluator.other_units, evaluator.with_copies, evaluator.with_activations):
        candidates += more(candidates)
    place = {_key(choice): i for i, choice in enumerate(every)}
    candidates.sort(key=lambda c: place[_key(c.choice)])
    best = evaluator.verified([c for c in candidates if c.choice.gpus == space.cluster.num_gpus])
    if looks_at_fewer and best is not None:
        on_less, logs = on_fewer(space, evaluator.traces.traced, say)
        candidates += on_less
        evaluator.traces.traced.update(logs)
    least = min((c.choice.gpus for c in candidates if c.fits), default=0)
    looked = is_open or space.cluster.num_gpus == 1
    on_fewest = evaluator.fastest([c for c in candidates if c.choice.gpus == least]) if looked else None
    evaluator.at_all_rates(best or closest(candidates, space))
    for candidate in candidates:
        candidate.why = "" if candidate is best else why_not(candidate, best, space)
    return SearchResult(best=best, fewest=on_fewest, candidates=candidates, logs=evaluator.traces.traced)


def _key(choice: Choice) -> tuple[object, ...]:
    """Return the choices to evaluate first; units, offload and copies are tried next to some of them."""
    return choice.strategy.name, choice.checkpointing, choice.micro_batch, choice.gpus, choice.replicas


def closest(candidates: Sequence[Candidate], space: Space) -> Candidate:
    """What comes closest to fitting all GPUs asked for, of what was worked out where anything was."""
    mine = [c for c in candidates if c.choice.gpus == space.cluster.num_gpus]
    return min([c for c in mine if c.memory is not None] or mine, key=lambda c: c.needed_bytes)


def why_not(candidate: Candidate, best: Candidate | None, space: Space) -> str:
    cluster = space.cluster
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
