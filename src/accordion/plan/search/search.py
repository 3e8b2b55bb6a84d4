"""Choose a configuration: evaluate all choices of a space, and note for each of the others why it was not chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accordion.config import FULL_SHARD
from accordion.plan.choice import Choice
from accordion.plan.events import Log
from accordion.plan.hardware import GIB, TELLABLE, Cluster
from accordion.plan.search.evaluate import HOST_MARGIN, Candidate, Evaluator, Say
from accordion.plan.search.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Result of a search.

    Args:
        best: of the candidates that fit on all requested GPUs and are within 2 % of the fastest, that with least memory; or None.
        fewest: chosen like `best`, of the candidates on the smallest number of GPUs on which any fits; None if none fits, or if
            only one number of GPUs was tried.
        candidates: all configurations of the search with their figures; `why` of each says why it was not chosen.
        logs: all traced logs, by the choice that was traced.
    """

    best: Candidate | None
    fewest: Candidate | None
    candidates: Sequence[Candidate]
    logs: Mapping[Choice, Log]


def search_in(space: Space, say: Say = lambda text: None) -> SearchResult:
    """Evaluate all choices of `space`, and return all candidates and the best. If none fits on all GPUs, also evaluate choices
    with shared sequences; if still none fits, with offloaded activations. If the search has `copies`, also evaluate the fastest
    that fit with copies in each node. `say`: called with a text before each trace. Raises `UsageError` for an empty space."""
    every = space.choices()
    evaluator = Evaluator(space, say)
    candidates = _evaluated(every, evaluator)
    for sequence in space.sequences:
        if any(c.fits and c.choice.gpus == space.cluster.num_gpus for c in candidates):
            break
        more_choices = list(space.choices_over(sequence))
        every += more_choices
        probes = evaluator.candidates(_smallest(more_choices))
        candidates += _evaluated(more_choices, evaluator) if any(c.fits for c in probes) else probes
    for more in (evaluator.with_copies, evaluator.with_activations):
        candidates += more(candidates)
    place = {_key(choice): i for i, choice in enumerate(every)}
    candidates.sort(key=lambda c: place[_key(c.choice)])
    best = evaluator.verified([c for c in candidates if c.choice.gpus == space.cluster.num_gpus])
    least = min((c.choice.gpus for c in candidates if c.fits), default=0)
    on_least = [c for c in candidates if c.choice.gpus == least]
    on_fewest = evaluator.fastest(on_least) if len(space.cluster.gpus) > 1 else None
    evaluator.at_all_rates(best or closest(candidates, space))
    for candidate in candidates:
        candidate.why = "" if candidate is best else why_not(candidate, best, space)
    return SearchResult(best=best, fewest=on_fewest, candidates=candidates, logs=evaluator.traces.traced)


def _evaluated(choices: Sequence[Choice], evaluator: Evaluator) -> list[Candidate]:
    """Evaluate all of `choices`, those of FULL_SHARD first, and return their candidates, one or more for each choice."""
    # FULL_SHARD takes least memory, and other strategies can only wait less, so it bounds them.
    first = [c for c in choices if c.strategy == FULL_SHARD] or choices
    others = evaluator.promising([c for c in choices if c not in first])
    return evaluator.candidates(first) + evaluator.candidates(others)


def _smallest(choices: Sequence[Choice]) -> list[Choice]:
    """Return those of `choices` that need least memory: on the most GPUs with the smallest micro-batch; of these, if there are
    any, those with FULL_SHARD and with full recomputation. Return [] if there are no choices."""
    first = max(((c.gpus, -c.micro_batch) for c in choices), default=None)
    least = [c for c in choices if (c.gpus, -c.micro_batch) == first]
    for wanted in (lambda c: c.strategy == FULL_SHARD, lambda c: c.checkpointing == "full"):
        least = list(filter(wanted, least)) or least
    return least


def _key(choice: Choice) -> tuple[object, ...]:
    """Return the fields in which choices of a space differ, except for offload and copies in a node, as a key of a dict."""
    return choice.strategy.name, choice.checkpointing, choice.micro_batch, choice.gpus, choice.replicas, choice.sequence


def closest(candidates: Sequence[Candidate], space: Space) -> Candidate:
    """Return the candidate for all requested GPUs with least memory, if possible one that was not ruled out by a bound."""
    on_all = [c for c in candidates if c.choice.gpus == space.cluster.num_gpus]
    return min([c for c in on_all if c.memory is not None] or on_all, key=lambda c: c.needed_bytes)


def why_not(candidate: Candidate, best: Candidate | None, space: Space) -> str:
    """Return a text that says why `candidate` was not chosen: ruled out by a bound, too large, unknown whether it fits, for
    fewer GPUs than `best`, slower, or about as fast. Return "" if it fits and `best` is None."""
    cluster = space.cluster
    card = cluster.card_bytes / GIB
    if candidate.bound:
        return candidate.bound
    if candidate.memory is None:
        return f"needs at least {candidate.least_bytes / GIB:,.0f} of {card:.0f} GiB"
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
    if ratio < 1 + TELLABLE:
        percent = round((ratio - 1) * 100)
        side = "" if not percent else " slower" if percent > 0 else " faster"
        return f"too close to tell apart ({abs(percent)} %{side})"
    return f"{(ratio - 1) * 100:.0f} % slower"


def unsettled(candidate: Candidate, cluster: Cluster) -> str:
    """Return text that says why it is not known whether `candidate` fits, and how to find out."""
    assert candidate.memory is not None
    memory = candidate.memory
    left = (cluster.card_bytes - memory.needed_bytes) / GIB
    return (
        f"no verdict: {memory.peak.unsure_operator} may allocate up to {memory.peak.unsure_bytes / GIB:,.2f} GiB that a trace "
        f"does not see, of {left:,.2f} GiB left; measure one step's torch.cuda.max_memory_reserved(), or leave that much free"
    )
