"""Check before a save that replicas of the same shard have equal values."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.errors import DivergenceError, some_of
from accordion.safety.agreement import agreement_of
from accordion.safety.divergence import monitor_of
from accordion.safety.liveness.wording import step_differences
from accordion.tensor_checksum import checksums

SHOWN = 3  # parameters of a rank in a message


def compare_replicas(engine: Engine) -> None:
    """Raise `DivergenceError` on every rank if replicas of a shard differ. A collective; does nothing without replicas. The host
    waits for optimizer steps in progress. Parameters with a mesh of their own are not compared."""
    context, monitor = engine.context, monitor_of(engine.context)
    if context.replicate.num_ranks < 2 or context.cut_twice or context.replicate.gather.is_fake:
        return  # no other rank has the same shards
    engine.synchronize()
    params = [param for unit in engine.units for param in unit.params if param.context is context]
    shards = {param.name: _torch.local_of(param.sharded).detach() for param in params}
    digests = checksums({name: shard for name, shard in shards.items() if type(shard) is Tensor})
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
    """Return text that names each rank whose values differ from those of the first rank with the same shard, and the parameters;
    "" if none do. `details`: by rank, a dict with `shard`, the index of its shard, and `digests`, name of a parameter -> text."""
    first: dict[int, tuple[int, Mapping[str, str]]] = {}
    each = []
    for rank, report in sorted(details.items()):
        other, theirs = first.setdefault(report["shard"], (rank, report["digests"]))
        names = [name for name, digest in report["digests"].items() if theirs.get(name) != digest]
        if names:
            each.append(f"rank {rank} has other values than rank {other} in {some_of(names, SHOWN)}")
    return " / ".join(each)
