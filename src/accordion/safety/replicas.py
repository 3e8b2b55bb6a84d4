"""Check that replicas of the same shard have equal values: a sample of each parameter now and then, and all before a save."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.observer import Observer
from accordion.errors import DivergenceError
from accordion.safety.agreement import agreement_of
from accordion.safety.divergence import DivergenceMonitor, monitor_of
from accordion.tensor_checksum import checksums

SAMPLE = 64  # elements of each parameter, a different range each time
OFTEN, EVERY = 4, 256  # training forwards: at each power of two up to the first, then at each multiple of the second
SHOWN = 3  # parameters of a rank in a message


class ReplicaCheck(Observer):
    """Observer that compares a sample of replicas in some training forwards.

    A comparison waits for the device and for all ranks, so it is rare. Offloaded parameters, which a thread may be stepping,
    are compared only before a save.
    """

    def __init__(self, engine: Engine, monitor: DivergenceMonitor) -> None:
        self._engine, self._monitor = engine, monitor
        self._num = 0

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        if not differentiable or not reduces:
            return
        self._num += 1
        few = self._num <= OFTEN and self._num & (self._num - 1) == 0
        if (few or self._num % EVERY == 0) and not self._engine.arriving:
            compare(self._engine, self._monitor, self._num * SAMPLE)


def compare_replicas(engine: Engine) -> None:
    """Raise `DivergenceError` on every rank if any element differs between replicas. A collective."""
    if has_replicas(engine):
        engine.synchronize()
        compare(engine, monitor_of(engine.context), None)


def has_replicas(engine: Engine) -> bool:
    """Return True if other ranks have the same shards as this one."""
    context = engine.context
    return context.replicate.num_ranks > 1 and not context.cut_twice and not context.replicate.gather.is_fake


def compare(engine: Engine, monitor: DivergenceMonitor, at: int | None) -> None:
    """Raise `DivergenceError` if replicas differ. `at`: first element of the sample of each parameter; None compares all."""
    params = [param for unit in engine.units for param in unit.params if param.context is engine.context]
    rows = {param.name: _rows(param.sharded, at) for param in params}
    if at is None:
        digests = checksums(rows)
    else:  # all samples in one copy: the host waits once
        parts = [sample.contiguous().view(torch.uint8) for sample in rows.values()]
        on_host = torch.cat(parts).cpu().split([len(part) for part in parts]) if parts else ()
        digests = {name: str(zlib.crc32(part.numpy())) for name, part in zip(rows, on_host, strict=True)}
    agreement_of(engine).must("compares its replicas")  # a rank that is late may still wait in a collective
    report = {"what": "compares its replicas", "shard": engine.context.shard.rank}
    reports = monitor.meet({**report, "digest": zlib.crc32(repr(digests).encode())}) or {}
    first: dict[int, Any] = {}
    if all(first.setdefault(each["shard"], each["digest"]) == each["digest"] for each in reports.values()):
        return
    replica = engine.context.replicate.rank
    details = monitor.meet({**report, "digests": digests, "replica": replica, **monitor.history()}) or {}
    raise DivergenceError(
        monitor.compare(details)
        or f"replicas differ: {different(details)}; a rank has modified its own copy of weights; modify weights in the same way "
        "on all ranks, or load the newest checkpoint on all of them."
    )


def different(details: Mapping[int, Mapping[str, Any]]) -> str:
    """Name each rank whose values differ from those of the first rank with the same shard, and the parameters."""
    first: dict[int, tuple[int, Mapping[str, str]]] = {}
    each = []
    for rank, report in sorted(details.items()):
        other, theirs = first.setdefault(report["shard"], (rank, report["digests"]))
        names = [name for name, digest in report["digests"].items() if theirs.get(name) != digest]
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            each.append(f"rank {rank} has other values than rank {other} in {', '.join(names[:SHOWN])}{more}")
    return " / ".join(each)


def _rows(sharded: Tensor, at: int | None) -> Tensor:
    """Return a parameter's local elements, or a sample of them that begins at element `at`."""
    rows = _torch.local_of(sharded).detach()
    if type(rows) is not Tensor:  # a subclass is not compared here
        return torch.empty(0, device=sharded.device)
    flat = rows.reshape(-1)
    if at is not None and flat.numel() > SAMPLE:
        begin = at % (flat.numel() - SAMPLE)
        flat = flat[begin : begin + SAMPLE]
    return flat
