"""Where nothing fits: the smallest change that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from accordion.plan.hardware import GIB, Cluster
from accordion.plan.part import Candidate, Say
from accordion.plan.rig import Subject
from accordion.plan.search import search
from accordion.plan.space import NO_OFFLOAD, OFFLOADS, Space

DOUBLINGS = 7  # of the GPUs, at most


def smallest_change(
    subject_for: Callable[[int], Subject], space: Space, cluster: Cluster, num_params: int, say: Say
) -> str:
    """The first of ever larger changes that makes it fit; each keeps those before it."""
    smallest: Candidate | None = None
    for flags, attempt in _attempts(space):
        found = search(subject_for, attempt, cluster, num_params, say)
        if found.best is not None:
            needed = f"{found.best.needed_bytes / GIB:,.1f} of {cluster.card_bytes / GIB:.1f} GiB"
            host = (
                f", and {found.best.host_bytes / GIB:,.0f} GiB of a machine's memory" if found.best.host_bytes else ""
            )
            return f"{flags} would: {needed}{host}"
        smallest = min(found.candidates, key=lambda c: c.needed_bytes)
    assert smallest is not None
    lacks = smallest.needed_bytes / GIB
    return f"a card of {lacks:,.0f} GiB, or a shorter --seq: activations do not shrink with more of these GPUs"


def _attempts(space: Space) -> Iterator[tuple[str, Space]]:
    """(flags, space): from what costs least."""
    flags = ""
    if min(space.micro_batches) > 1:
        flags, space = f"{flags} --micro-batch 1", replace(space, micro_batches=[1])
        yield flags.strip(), space
    space = replace(space, micro_batches=[1])
    if "full" not in space.checkpointing:
        flags, space = f"{flags} --checkpoint-activations full", replace(space, checkpointing=["full"])
        yield flags.strip(), space
    space = replace(space, checkpointing=["full"])
    if "full_shard" not in space.strategies:
        flags, space = f"{flags} --strategy full_shard", replace(space, strategies=["full_shard"], replicas=0)
        yield flags.strip(), space
    space = replace(space, strategies=["full_shard"])
    if tuple(space.offloads) == (NO_OFFLOAD,):
        yield f"{flags} --offload all".strip(), replace(space, offloads=list(OFFLOADS)[1:])
    gpus = max(space.gpus)
    for _ in range(DOUBLINGS):
        gpus *= 2
        more = replace(space, gpus=[gpus], offloads=[NO_OFFLOAD])
        if space.global_batch is not None:
            more = replace(more, global_batch=space.global_batch * gpus // max(space.gpus))
        yield f"{flags} --gpus {gpus}".strip(), more
