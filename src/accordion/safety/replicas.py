"""Check that replicas of the same shard have equal values: a sample of each parameter now and then, and all before a save."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.observer import Observer
from accordion.errors import DivergenceError
from accordion.safety.agreement import agreement_of
from accordion.safety.divergence import monitor_of
from accordion.safety.liveness.wording import step_differences
from accordion.tensor_checksum import checksums

SAMPLE = 64  # elements of each parameter, others each time
EARLY, EVERY = (1, 2, 4), 256  # training forwards that compare a sample
SHOWN = 3  # parameters of a rank in a message


class ReplicaCheck(Observer):
    """Observer that compares a sample of replicas in a few training forwards; there it waits for the device and all ranks."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._num = engine, 0

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        if differentiable and reduces:
            self._num += 1
            if self._num in EARLY or self._num % EVERY == 0:
                compare_replicas(self._engine, self._num * SAMPLE)


def compare_replicas(engine: Engine, at: int | None = None) -> None:
    """Raise `DivergenceError` on every rank if replicas of a shard differ. A collective; does nothing without replicas.

    `at`: position of the `SAMPLE` elements to compare in each parameter, as in `_sample`; None for all elements.
    """
    context, monitor = engine.context, monitor_of(engine.context)
    if context.replicate.num_ranks < 2 or context.cut_twice or context.replicate.gather.is_fake:
        return  # no other rank has the same shards
    engine.synchronize()
    params = [param for unit in engine.units for param in unit.params if param.context is context]
    shards = {param.name: _torch.local_of(param.sharded).detach() for param in params}
    digests = checksums({name: _sample(shard, at) for name, shard in shards.items() if type(shard) is Tensor})
    agreement_of(engine).must("compares its replicas")  # a rank that is late may still wait in a collective
    report = {"what": "compares its replicas", "shard": context.shard.rank}
    reports = monitor.meet({**report, "digest": zlib.crc32(repr(digests).encode())}) or {}
    first: dict[int, Any] = {}
    if all(first.setdefault(each["shard"], each["digest"]) == each["digest"] for each in reports.values()):
        return
    details = monitor.meet({**report, "digests": digests, "replica": context.replicate.rank, **monitor.history()}) or {}
    raise DivergenceError(
        step_differences(details)
        or f"replicas differ: {different(details)}; a rank has modified its own copy of weights; modify weights in the same way "
        "on all ranks, or load the newest checkpoint on all of them."
    )


def different(details: Mapping[int, Mapping[str, Any]]) -> str:
    """Return text on each rank whose values differ from those of the first rank with the same shard, and on the parameters.

    `details`: by rank, a dict with `shard`, the shard's index, and `digests`, by name of a parameter.
    """
    first: dict[int, tuple[int, Mapping[str, str]]] = {}
    each = []
    for rank, report in sorted(details.items()):
        other, theirs = first.setdefault(report["shard"], (rank, report["digests"]))
        names = [name for name, digest in report["digests"].items() if theirs.get(name) != digest]
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            each.append(f"rank {rank} has other values than rank {other} in {', '.join(names[:SHOWN])}{more}")
    return " / ".join(each)


def _sample(shard: Tensor, at: int | None) -> Tensor:
    """Return `SAMPLE` consecutive elements of `shard`; all elements if `at` is None or if there are no more. They begin at
    element `at`, modulo the number of elements at which they can begin."""
    if at is None:
        return shard
    begin = at % max(1, shard.numel() - SAMPLE + 1)
    return shard.reshape(-1)[begin : begin + SAMPLE]
