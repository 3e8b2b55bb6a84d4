"""Warn if data-parallel ranks train on the same data: each rank sends a digest of its first two inputs to the first rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion.engine.engine import IN_BACKWARD, Engine
from accordion.engine.observer import CallInForward, Observer
from accordion.engine.tree import tensors_of
from accordion.safety.divergence import DivergenceMonitor
from accordion.tensor_checksum import checksums

NUM_COMPARED = 2
SHARE_DATA = {"tp", "sp", "cp", "ep"}  # in the name of a mesh dim: its ranks may have the same data


class FirstInputs(Observer):
    """Observer that sends the digest of the first two training inputs, for which the host waits, and then detaches itself.

    Nothing is sent if an input has no tensors or only constant ones, or if both inputs are equal, as in a benchmark.
    """

    def __init__(self, engine: Engine, monitor: DivergenceMonitor) -> None:
        self._engine, self._monitor = engine, monitor
        self._digests: list[int | None] = []

    def outputs_are_ready(self, call: CallInForward, fulls: Sequence[Tensor], out: Any, inputs: Any) -> None:
        module = call.unit.module()
        if self._engine.depth > 1 or call.root == IN_BACKWARD or module is None or not module.training:
            return
        self._digests.append(digest_of(tensors_of(inputs)))
        if len(self._digests) == NUM_COMPARED:
            self._engine.observers.detach(self)
            if None not in self._digests and len(set(self._digests)) == NUM_COMPARED:
                self._monitor.send_inputs(zlib.crc32(repr(self._digests).encode()))


def have_own_data(engine: Engine) -> bool:
    """Return True if every rank should train on different data: no tensor, sequence, context or expert parallelism."""
    params = [param for unit in engine.units for param in unit.params]
    meshes = [param.sharded.device_mesh for param in params if isinstance(param.sharded, DTensor)]
    names = {part for mesh in meshes for name in mesh.mesh_dim_names or () for part in name.split("_")}
    return not names & SHARE_DATA and all(p.around is None and p.context is engine.context for p in params)


@torch.no_grad()
def digest_of(tensors: Iterable[Tensor]) -> int | None:
    """Return a digest of all `tensors` with elements; None if every one is constant."""
    plain = [t for t in tensors if type(t) is Tensor and t.layout is torch.strided and not t.is_meta and t.numel()]
    if all((t == t.reshape(-1)[0]).all() for t in plain):
        return None
    return zlib.crc32(repr(checksums({str(i): t for i, t in enumerate(plain)})).encode())
