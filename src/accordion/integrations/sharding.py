"""How a library's trainer is told to shard: the arguments of `accordion.shard`, and what a library needs of a model after."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accordion.config import Precision
from accordion.engine.engine import Engine
from accordion.engine.hooks import engine_of
from accordion.engine.observer import Observer
from accordion.engine.unit import Unit
from accordion.errors import UsageError
from accordion.optim import ELEMENTWISE, inner_of, refuse_adafactor, wrap_optimizer
from accordion.same_on_ranks import first_ranks
from accordion.shard.api import entry_point, shard
from accordion.shard.replaced_parameters import follow_moved
from accordion.sharding import Sharding
from accordion.weights.meta_start import fill_from_source

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}  # what accelerate calls them


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardArguments:
    """The arguments of `accordion.shard` for the models of a library's trainer.

    Args:
        sharding: without a precision it takes the library's own mixed precision: under "bf16" and "fp16" parameters are gathered
            in that dtype, and autocast runs as always. `Precision()` gathers them as they are.
        mesh: as `accordion.shard` takes it.
        sync: None gives all ranks the first one's values, as DistributedDataParallel does; a model on the meta device has none.
        debug: as `accordion.shard` takes it.
    """

    sharding: Sharding = field(default_factory=Sharding)
    mesh: DeviceMesh | None = None
    sync: bool | None = None
    debug: str | Iterable[str] = ()

    @classmethod
    def of(cls, given: Sharding | Mapping[str, Any] | None) -> ShardArguments:
        """Read a trainer's `sharding=`: a `Sharding`, or a dict of arguments of `accordion.shard`. Raises `UsageError`."""
        if isinstance(given, Sharding):
            return cls(sharding=given)
        if not isinstance(given, Mapping | None):
            raise UsageError(
                f"sharding takes an accordion.Sharding, or a dict of the arguments of accordion.shard, not {given!r}."
            )
        others = {key: value for key, value in (given or {}).items() if key in ("mesh", "sync", "debug")}
        rest = {key: value for key, value in (given or {}).items() if key not in others}
        return cls(sharding=Sharding.from_config(rest), **others)

    def applied(self, model: nn.Module, mixed_precision: str = "no") -> nn.Module:
        """Shard `model` in place, fill it with the weights of its source if it has one, and return it. A collective.

        `mixed_precision`: as accelerate calls it. Afterwards `generate` may be called as before, and all ranks take the first
        one's buffers before each forward, as under DistributedDataParallel.
        """
        sharding, sync = self.sharding, self.sync
        if sharding.precision is None and mixed_precision in AMP:
            sharding = replace(sharding, precision=Precision(params=AMP[mixed_precision]))
        if sync is None:
            sync = not any(param.is_meta for param in model.parameters())
        shard(model, self.mesh, sharding, sync=sync, debug=self.debug)
        fill_from_source(model)
        engine = engine_of(model)
        assert engine is not None
        places = [(m, key) for m in model.modules() for key in m._buffers if key not in m._non_persistent_buffers_set]
        if places and engine.context.num_ranks > 1:
            engine.observers.attach(FirstRanksBuffers(engine, places))
        # Ranks generate together: all go on until the last one has ended, and reach inner parts of the model on the way.
        for module in model.modules():
            if type(module).__module__.partition(".")[0] == "transformers":
                # Asked by `generate`, and by layers that one rank alone might skip.
                vars(module)["_is_fsdp_managed_module"] = True
        method = getattr(type(model), "generate", None)
        if callable(method) and not inspect.isgeneratorfunction(method):
            entry_point(model, "generate")
        return model


def step_on_shards(optimizer: Optimizer) -> None:
    """Let an optimizer, made before or after its model was sharded, step on the shards, fast where it looks at elements alone.

    Raises `UsageError` for Adafactor, which looks at whole matrices.
    """
    inner = inner_of(optimizer)
    follow_moved(inner)
    on_shards = any(isinstance(p, DTensor) for g in inner.param_groups for p in g["params"])
    refuse_adafactor(inner)
    if on_shards and isinstance(inner, ELEMENTWISE):
        wrap_optimizer(optimizer)


class FirstRanksBuffers(Observer):
    """Before each forward all ranks take the first one's buffers that a state dict holds, running means of batch norms say.

    So every rank evaluates the model that a checkpoint keeps. One broadcast for each dtype.
    """

    def __init__(self, engine: Engine, places: list[tuple[nn.Module, str]]) -> None:
        self._engine, self._places = engine, places

    def unit_enters(self, unit: Unit, differentiable: bool, by_read: bool) -> None:
        if self._engine.depth:
            return
        current = (module._buffers.get(key) for module, key in self._places)
        of_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in {id(buffer): buffer for buffer in current if buffer is not None}.values():
            of_dtype.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            for buffers in of_dtype.values():
                flat = first_ranks(torch.cat([buffer.reshape(-1) for buffer in buffers]), self._engine.context)
                for buffer, value in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                    # By data: a graph that has saved a buffer may go on, two forwards may come before one backward.
                    buffer.data.copy_(value.view(buffer.shape))
