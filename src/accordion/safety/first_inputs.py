"""Warn if data-parallel ranks train on the same data: each sends a digest of the model's first two inputs to the first rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion.devices import HostCopy
from accordion.engine.engine import IN_BACKWARD, Engine
from accordion.engine.observer import CallInForward, Observer
from accordion.engine.tree import tensors_of
from accordion.safety.divergence import DivergenceMonitor
from accordion.tensor_checksum import checksum

NUM_COMPARED = 2
SHARE_DATA = {"tp", "sp", "cp", "ep"}  # in the name of a mesh dim: its ranks may have the same data


class FirstInputs(Observer):
    """Observer that sends a digest of the model's first two training inputs to the first rank, and then detaches itself.
    Nothing is sent if both inputs are equal, as in a benchmark, or if one has no tensor whose elements differ. The host never
    waits for the device: the digest is sent in a later step, when the copies of the checksums have ended."""

    def __init__(self, engine: Engine, monitor: DivergenceMonitor) -> None:
        self._engine, self._monitor = engine, monitor
        self._copies: list[list[HostCopy]] = []

    def outputs_are_ready(self, call: CallInForward, fulls: Sequence[Tensor], out: Any, inputs: Any) -> None:
        module = call.unit.module()
        if self._engine.depth > 1 or call.root == IN_BACKWARD or module is None or not module.training:
            return
        if len(self._copies) < NUM_COMPARED:
            self._copies.append(checksums_of(tensors_of(inputs)))
        if len(self._copies) == NUM_COMPARED and all(copy.is_ready() for copies in self._copies for copy in copies):
            self._engine.observers.detach(self)
            digests = list(map(digest_of, self._copies))
            if None not in digests and len(set(digests)) == NUM_COMPARED:
                self._monitor.send_inputs(zlib.crc32(repr(digests).encode()))


def have_own_data(engine: Engine) -> bool:
    """Return True if every rank should train on data of its own: no mesh dim of the model has "tp", "sp", "cp" or "ep" in its
    name (as "dp_cp" has), and no parameter has a mesh of its own or is wrapped in a subclass."""
    params = [param for unit in engine.units for param in unit.params]
    meshes = [param.sharded.device_mesh for param in params if isinstance(param.sharded, DTensor)]
    names = {part for mesh in meshes for name in mesh.mesh_dim_names or () for part in name.split("_")}
    return not names & SHARE_DATA and all(p.around is None and p.context is engine.context for p in params)


@torch.no_grad()
def checksums_of(tensors: Iterable[Tensor]) -> list[HostCopy]:
    """Compute (checksum, 1 if elements differ else 0) of each tensor, begin to copy these pairs to the host, and return one copy
    per device, without waiting. Tensors on meta, without elements, of a subclass, or not strided are left out."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if is_plain and tensor.device.type != "meta" and tensor.numel():
            elements = tensor.reshape(-1)
            differs = (elements != elements[0]).any()
            by_device.setdefault(tensor.device, []).append(torch.stack([checksum(tensor), differs.long()]))
    return [HostCopy([torch.stack(pairs)]) for pairs in by_device.values()]


def digest_of(copies: Iterable[HostCopy]) -> int | None:
    """Return a digest of the `copies` that `checksums_of` returned; None if none of the tensors has elements that differ."""
    pairs = [pair for copy in copies for pair in copy.read()[0]]
    return zlib.crc32(repr(pairs).encode()) if any(differs for _, differs in pairs) else None
