"""If nothing fits: find the smallest change that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from accordion.config import FULL_SHARD, HOST, Offload
from accordion.plan.choice import NO_OFFLOAD, OFFLOADS, Choice
from accordion.plan.events import Log
from accordion.plan.hardware import GIB, LARGEST_GPUS, cluster_words
from accordion.plan.search.evaluate import Candidate, Say
from accordion.plan.search.search import closest, search_in
from accordion.plan.search.space import Space
from accordion.sharding import offload_words

DOUBLINGS = 7  # most times that the number of GPUs is doubled
NODE = 8  # default number of GPUs per machine
MOST_HOST_GIB = 512.0  # most memory of a machine per GPU
ON_HOST = OFFLOADS[2]  # parameters, gradients and states


def smallest_change(space: Space, say: Say, known: Mapping[Choice, Log]) -> str:
    """Search one of `attempts` after the other. Return text on the first in which a choice fits, such as "--micro-batch 1 needs
    70.0 of 79.1 GiB". If none fits, return text on the size of GPU that would. `known`: `logs` of the search of `space`."""
    smallest: Candidate | None = None
    for flags, attempt in attempts(space):
        result = search_in(attempt, say, known=known)
        known = result.logs
        if result.best is not None:
            needed = f"{result.best.needed_bytes / GIB:,.1f} of {attempt.cluster.card_bytes / GIB:.1f} GiB"
            host = (
                f", and {result.best.host_bytes / GIB:,.0f} GiB of a machine's memory" if result.best.host_bytes else ""
            )
            return f"{flags} needs {needed}{host}"
        smallest = closest(result.candidates, attempt)
    assert smallest is not None
    lacks = smallest.needed_bytes / GIB
    return f"a GPU of {lacks:,.0f} GiB, or a shorter --seq: activations do not shrink with more of these GPUs"


def attempts(space: Space) -> Iterator[tuple[str, Space]]:
    """Yield (flags of the command line, the space with these flags), from the smallest change to the largest. Most changes
    include those before them."""
    flags, search = "", space.search
    narrow: dict[str, Any] = {"activations": search.activations[:1], "micro_batches": [1]}
    if min(search.micro_batches) > 1:
        flags += " --micro-batch 1"
        yield flags.strip(), _searching(space, **narrow)
    narrow["checkpointing"] = ["full"]
    if "full" not in search.checkpointing:
        flags += " --checkpoint-activations full"
        yield flags.strip(), _searching(space, **narrow)
    narrow["strategies"] = [FULL_SHARD]
    if FULL_SHARD not in search.strategies:
        flags += " --strategy full_shard" + (" without --replicas" if search.replicas else "")
        narrow["replicas"] = None
        yield flags.strip(), _searching(space, **narrow)
    space = _searching(space, **narrow)
    if len(search.activations) > 1:
        yield f"{flags} --offload activations={HOST}".strip(), _searching(space, activations=[HOST])
    for offload in _further_offloads(space):
        yield f"{flags} --offload {offload_words(offload)}".strip(), _searching(space, offloads=[offload])
    if space.engine == "accordion":  # FSDP2 is planned without offload
        yield from _with_more_memory(flags, space)
    yield from _with_more_gpus(flags, space)


def _searching(space: Space, **changes: Any) -> Space:
    return replace(space, search=replace(space.search, **changes))


def _with_more_memory(flags: str, space: Space) -> Iterator[tuple[str, Space]]:
    """Yield (flags, space) with offload to the host, on machines with two and four times the memory, up to `MOST_HOST_GIB`."""
    cluster = space.cluster
    if list(space.search.offloads) == [NO_OFFLOAD]:
        flags, space = f"{flags} --offload {offload_words(ON_HOST)}", _searching(space, offloads=[ON_HOST])
    for times in (2, 4):
        more = replace(cluster, host_memory_gib=times * cluster.host_bytes / GIB)
        if more.host_bytes <= MOST_HOST_GIB * GIB * cluster.node:
            yield f"{flags} --gpu {cluster_words(more)}".strip(), replace(space, cluster=more)


def _with_more_gpus(flags: str, space: Space) -> Iterator[tuple[str, Space]]:
    search, cluster = space.search, space.cluster
    gpus, batch = cluster.num_gpus, search.global_batch
    offloads = search.offloads if len(search.offloads) == 1 else [NO_OFFLOAD]
    while gpus < min(LARGEST_GPUS, cluster.num_gpus << DOUBLINGS):
        gpus *= 2
        node = min(gpus, NODE) if cluster.node == min(cluster.num_gpus, NODE) else cluster.node
        count = f"{gpus // node}x{node}" if gpus > node else f"{gpus}"
        more = None if batch is None else batch * gpus // cluster.num_gpus
        words = f"{flags} --gpus {count}" + (f" --global-batch {more}" if more else "")
        wider = _searching(space, offloads=offloads, global_batch=more)
        yield words.strip(), replace(wider, cluster=replace(cluster, gpus=(gpus,), node=node))


def _further_offloads(space: Space) -> Sequence[Offload]:
    """Return the entries of `OFFLOADS` after the one that the search fixes, which leave less on GPU or host. [] for FSDP2, or if
    the search does not fix one."""
    fixed = space.search.offloads[0]
    if len(space.search.offloads) > 1 or space.engine != "accordion" or fixed not in OFFLOADS:
        return []
    return OFFLOADS[OFFLOADS.index(fixed) + 1 :]
