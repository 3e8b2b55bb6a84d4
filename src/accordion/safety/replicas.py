"""Whether ranks that hold the same rows hold the same numbers: a few of each parameter now and then, and all before a save."""

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

SAMPLE = 64  # elements of each parameter, others each time
OFTEN, EVERY = 4, 256  # backwards: at each power of two up to the first, then at each multiple of the second
SHOWN = 3  # parameters of a rank in a message


class ReplicaCheck(Observer):
    """Owns when replicas are compared. They meet in the job's store, and a device is read: rarely.

    Of offloaded parameters, whose step may be under way on a thread, replicas are compared before a save alone.
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
    """Raise `DivergenceError` on every rank where replicas of some rows differ in any number. Called by all ranks together."""
    if has_replicas(engine):
        engine.synchronize()
        compare(engine, monitor_of(engine.context), None)


def has_replicas(engine: Engine) -> bool:
    """Whether other ranks hold this one's rows too."""
    context = engine.context
    return context.replicate.num_ranks > 1 and not context.cut_twice and not context.replicate.gather.is_fake


def compare(engine: Engine, monitor: DivergenceMonitor, at: int | None) -> None:
    """Compare a sample of each parameter that begins at an element, or all of it."""
    params = [param for unit in engine.units for param in unit.params if param.context is engine.context]
    rows = {param.name: _rows(param.sharded, at) for param in params}
    if at is None:
        digests = checksums(rows)
    else:  # a few elements of each, all on one device: the host waits once
        parts = [sample.contiguous().view(torch.uint8) for sample in rows.values()]
        on_host = torch.cat(parts).cpu().split([len(part) for part in parts]) if parts else ()
        digests = {name: str(zlib.crc32(part.numpy())) for name, part in zip(rows, on_host, strict=True)}
    agreement_of(engine).must("compares its replicas")  # one that is slow may say first where it waits
    mine = {"what": "compares its replicas", "shard": engine.context.shard.rank}
    said = monitor.meet({**mine, "digest": zlib.crc32(repr(digests).encode())}) or {}
    first: dict[int, Any] = {}
    if all(first.setdefault(one["shard"], one["digest"]) == one["digest"] for one in said.values()):
        return
    replica = engine.context.replicate.rank
    heard = monitor.meet({**mine, "digests": digests, "replica": replica, **monitor.history()}) or {}
    raise DivergenceError(
        monitor.compare(heard)
        or f"replicas differ: {different(heard)}; a rank has written its own copy of weights; write them on all ranks alike, or "
        "load the newest checkpoint on all of them."
    )


def different(heard: Mapping[int, Mapping[str, Any]]) -> str:
    """Which ranks hold other numbers than the first that has the same rows, and of which parameters."""
    first: dict[int, tuple[int, Mapping[str, str]]] = {}
    each = []
    for rank, one in sorted(heard.items()):
        other, theirs = first.setdefault(one["shard"], (rank, one["digests"]))
        names = [name for name, digest in one["digests"].items() if theirs.get(name) != digest]
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            each.append(f"rank {rank} has other numbers than rank {other} in {', '.join(names[:SHOWN])}{more}")
    return " / ".join(each)


def _rows(sharded: Tensor, at: int | None) -> Tensor:
    """Return a parameter's local elements, or a sample of them that begins at element `at`."""
    rows = _torch.local_of(sharded).detach()
    if type(rows) is not Tensor:  # a subclass: others compare it
        return torch.empty(0, device=sharded.device)
    flat = rows.reshape(-1)
    if at is not None and flat.numel() > SAMPLE:
        begin = at % (flat.numel() - SAMPLE)
        flat = flat[begin : begin + SAMPLE]
    return flat
