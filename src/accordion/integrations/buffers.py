"""Buffers of a sharded model that are the first rank's on all ranks, as DistributedDataParallel keeps them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from accordion.engine.engine import Engine
from accordion.engine.observer import Observer
from accordion.engine.unit import Unit
from accordion.same_on_ranks import first_ranks


class FirstRanksBuffers(Observer):
    """Before each forward all ranks take the first one's buffers that a state dict holds, running means of batch norms say.

    So every rank evaluates the model that a checkpoint keeps. One broadcast for each dtype.
    """

    def __init__(self, engine: Engine, places: list[tuple[nn.Module, str]]) -> None:
        self._engine, self._places = engine, places

    @classmethod
    def attach(cls, engine: Engine, model: nn.Module) -> None:
        """Nothing where `model` has no such buffers, or one rank alone."""
        places = [(m, key) for m in model.modules() for key in m._buffers if key not in m._non_persistent_buffers_set]
        if places and engine.context.num_ranks > 1:
            engine.observers.attach(cls(engine, places))

    def unit_enters(self, unit: Unit, differentiable: bool, by_read: bool) -> None:
        if self._engine.depth:
            return
        of_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._buffers():
            of_dtype.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            for buffers in of_dtype.values():
                flat = first_ranks(torch.cat([buffer.reshape(-1) for buffer in buffers]), self._engine.context)
                for buffer, value in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                    # By data: a graph that has saved a buffer may go on, two forwards may come before one backward.
                    buffer.data.copy_(value.view(buffer.shape))

    def _buffers(self) -> Iterator[Tensor]:
        """Each once, as modules have them now."""
        found = (module._buffers.get(key) for module, key in self._places)
        yield from {id(buffer): buffer for buffer in found if buffer is not None}.values()
