"""Where nothing fits: the smallest change that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from accordion.config import HOST
from accordion.plan.events import Log
from accordion.plan.hardware import GIB, Cluster
from accordion.plan.search.evaluate import Candidate, Say
from accordion.plan.search.search import closest, search
from accordion.plan.search.space import LARGEST_GPUS, NO_OFFLOAD, OFFLOADS, Choice, Space
from accordion.plan.trace.setup import Subject

DOUBLINGS = 7  # of the GPUs, at most
NODE = 8  # GPUs of a machine, where nobody says
MOST_HOST_GIB = 512.0  # of a machine's memory for each GPU
ALL = "all"  # of OFFLOADS: parameters, gradients and states on the host


def smallest_change(
    subject_for: Callable[[int], Subject],
    space: Space,
    cluster: Cluster,
    num_params: int,
    say: Say,
    known: Mapping[Choice, Log],
) -> str:
    """The first of ever larger changes that makes it fit; each keeps those before it. `known`: logs that were traced to find
    that nothing of `space` fits.
    """
    smallest: Candidate | None = None
    for flags, attempt, on in _attempts(space, cluster):
        found = search(subject_for, attempt, on, num_params, say, known=known)
        known = found.logs
        if found.best is not None:
            needed = f"{found.best.needed_bytes / GIB:,.1f} of {on.card_bytes / GIB:.1f} GiB"
            host = (
                f", and {found.best.host_bytes / GIB:,.0f} GiB of a machine's memory" if found.best.host_bytes else ""
            )
            return f"{flags} would: {needed}{host}"
        smallest = closest(found.candidates, attempt)
    assert smallest is not None
    lacks = smallest.needed_bytes / GIB
    return f"a card of {lacks:,.0f} GiB, or a shorter --seq: activations do not shrink with more of these GPUs"


def _attempts(space: Space, cluster: Cluster) -> Iterator[tuple[str, Space, Cluster]]:
    """(flags, space, cluster): from what costs least."""
    flags, looks = "", len(space.activations) > 1
    space = replace(space, activations=space.activations[:1])
    if min(space.micro_batches) > 1:
        flags, space = f"{flags} --micro-batch 1", replace(space, micro_batches=[1])
        yield flags.strip(), space, cluster
    space = replace(space, micro_batches=[1])
    if "full" not in space.checkpointing:
        flags, space = f"{flags} --checkpoint-activations full", replace(space, checkpointing=["full"])
        yield flags.strip(), space, cluster
    space = replace(space, checkpointing=["full"])
    if "full_shard" not in space.strategies:
        flags += " --strategy full_shard" + (" without --replicas" if space.replicas else "")
        space = replace(space, strategies=["full_shard"], replicas=0)
        yield flags.strip(), space, cluster
    space = replace(space, strategies=["full_shard"])
    if looks:
        yield f"{flags} --offload-activations {HOST}".strip(), replace(space, activations=[HOST]), cluster
    for tier in _further_tiers(space):
        yield f"{flags} --offload {tier}".strip(), replace(space, offloads=[tier]), cluster
    yield from _with_more_memory(flags, space, cluster)
    gpus = max(space.gpus)
    offloads = space.offloads if len(space.offloads) == 1 else [NO_OFFLOAD]
    for _ in range(DOUBLINGS):
        gpus *= 2
        if gpus > LARGEST_GPUS:
            return
        node = min(gpus, NODE) if cluster.node == min(max(space.gpus), NODE) else cluster.node
        nodes = f" --nodes {gpus // node}" if gpus > node else ""
        more, batch = replace(space, gpus=[gpus], offloads=offloads), ""
        if space.global_batch is not None:
            more = replace(more, global_batch=space.global_batch * gpus // max(space.gpus))
            batch = f" --global-batch {more.global_batch}"
        yield f"{flags} --gpus {gpus}{nodes}{batch}".strip(), more, replace(cluster, node=node)


def _with_more_memory(flags: str, space: Space, cluster: Cluster) -> Iterator[tuple[str, Space, Cluster]]:
    """Machines with more memory, up to the largest that are common; FSDP2 is planned without offload."""
    if space.engine != "accordion":
        return
    if list(space.offloads) == [NO_OFFLOAD]:
        flags, space = f"{flags} --offload {ALL}", replace(space, offloads=[ALL])
    for times in (2, 4):
        host_gib = times * cluster.host_bytes / GIB
        if host_gib <= MOST_HOST_GIB * cluster.node:
            more = replace(cluster, host_memory_gib=host_gib)
            yield f"{flags} --host-memory-gib {host_gib:g}".strip(), space, more


def _further_tiers(space: Space) -> Sequence[str]:
    """Where one offload was fixed, those that leave less on the card, or on the host; FSDP2 is planned without any."""
    known = list(OFFLOADS)
    fixed = len(space.offloads) == 1 and space.engine == "accordion"
    return known[known.index(space.offloads[0]) + 1 :] if fixed else []
