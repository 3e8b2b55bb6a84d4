"""A warning if data-parallel ranks train on the same data: digests of the first two inputs go to the first rank."""

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

NUM_COMPARED = 2
SHARE_DATA = {"tp", "sp", "cp", "ep"}  # parts of names of mesh dims over which ranks may have the same data


class FirstInputs(Observer):
    """Digests of the inputs of the first two training forwards; detaches itself after them.

    An input that tells nothing is left out: one without tensors, of constants alone, or the same one twice, as in a benchmark.
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
                self._monitor.say_inputs(zlib.crc32(repr(self._digests).encode()))


def have_own_data(engine: Engine) -> bool:
    """Return whether each rank of the model should get data of its own: without tensor, sequence or expert parallelism."""
    params = [param for unit in engine.units for param in unit.params]
    meshes = [param.sharded.device_mesh for param in params if isinstance(param.sharded, DTensor)]
    names = {part for mesh in meshes for name in mesh.mesh_dim_names or () for part in name.split("_")}
    return not names & SHARE_DATA and all(p.around is None and p.context is engine.context for p in params)


def digest_of(tensors: Iterable[Tensor]) -> int | None:
    """Return a digest of all tensors together, which reads their devices; None if no tensor has two different elements."""
    digest, differs = 0, False
    for tensor in tensors:
        if (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.device.type != "meta"
            and tensor.numel()
        ):
            elements = tensor.detach().cpu().reshape(-1)
            differs = differs or bool((elements != elements[0]).any())
            digest = zlib.crc32(elements.contiguous().view(torch.uint8).numpy().data, digest)
    return digest if differs else None
