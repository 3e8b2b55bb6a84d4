"""Shard the models of a library's trainer, and prepare models and optimizers for what the library does afterwards."""

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
from accordion.optimizers.wrap import inner_of, is_elementwise, refuse_adafactor, wrap_optimizer
from accordion.safety.same_on_ranks import first_ranks
from accordion.shard.api import entry_point, shard
from accordion.shard.replaced_parameters import follow_moved
from accordion.sharding import Sharding
from accordion.weights.pretrained import fill_from_source

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}  # accelerate's names


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardArguments:
    """The arguments of `accordion.shard` for the models of a library's trainer: `of` makes them, `apply` uses them.

    Args:
        sharding: if it has no precision, the library's mixed precision is used: with "bf16" or "fp16", parameters are gathered
            in that dtype, and autocast stays enabled. `Precision()` gathers parameters in their own dtype.
        mesh: the ranks over which to shard; None for all ranks of the job.
        sync: True gives all ranks the first rank's values, as DDP does; None too, unless parameters are on the meta device.
        debug: additional checks: any of "streams", "order" and "finite".
    """

    sharding: Sharding = field(default_factory=Sharding)
    mesh: DeviceMesh | None = None
    sync: bool | None = None
    debug: str | Iterable[str] = ()

    @classmethod
    def of(cls, choice: Sharding | Mapping[str, Any] | None) -> ShardArguments:
        """Return the arguments for a trainer's `sharding=`: a `Sharding`, a dict of arguments of `accordion.shard`, or None for
        the defaults. Raises `UsageError` for another type, and for a wrong key or value in the dict."""
        if isinstance(choice, Sharding):
            return cls(sharding=choice)
        if not isinstance(choice, Mapping | None):
            raise UsageError(
                f"sharding takes an accordion.Sharding, or a dict of the arguments of accordion.shard, not {choice!r}."
            )
        rest = dict(choice or {})
        others = {key: rest.pop(key) for key in ("mesh", "sync", "debug") if key in rest}
        return cls(sharding=Sharding.from_config(rest), **others)

    def apply(self, model: nn.Module, mixed_precision: str) -> None:
        """Shard `model` in place. If `from_pretrained` put it on the meta device, load its weights then. Collective. Afterwards
        each forward first broadcasts the first rank's buffers, as DDP does, except non-persistent buffers. For
        `generate` to work as before, modules of transformers get the attribute `_is_fsdp_managed_module`. `mixed_precision`:
        accelerate's name, "no", "bf16" or "fp16"."""
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
        # All ranks must run the same forwards, because each gathers parameters. With this mark, `generate` of transformers goes
        # on until the last rank has finished, and layers that a rank might skip on its own are run on all ranks.
        for module in model.modules():
            if type(module).__module__.partition(".")[0] == "transformers":
                vars(module)["_is_fsdp_managed_module"] = True
        method = getattr(type(model), "generate", None)
        # `sequence_parallel` has assigned a `generate` to the model that refuses to run.
        if callable(method) and "generate" not in vars(model) and not inspect.isgeneratorfunction(method):
            entry_point(model, "generate")


def step_on_shards(optimizer: Optimizer) -> None:
    """Change `optimizer` in place so that it steps on shards, even if it was created before its model was sharded. If its step is
    elementwise, also apply `wrap_optimizer`, which makes steps faster. Does nothing without sharded parameters. Raises
    `UsageError` for Adafactor on shards, because it needs whole matrices."""
    inner = inner_of(optimizer)
    follow_moved(inner)
    on_shards = any(isinstance(p, DTensor) for g in inner.param_groups for p in g["params"])
    refuse_adafactor(inner)
    if on_shards and is_elementwise(inner):
        wrap_optimizer(optimizer)


class FirstRanksBuffers(Observer):
    """Observer, attached by `ShardArguments.apply`, that overwrites the buffers `places`, (module, name of its buffer), such as
    statistics of batch norms, on all ranks with those of the first rank before each outermost forward: one broadcast per dtype.
    A checkpoint has the first rank's buffers, so every rank evaluates the model that is saved."""

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
                    # Written through `.data`, so that autograd accepts it: with two forwards before one backward, a graph may
                    # have saved the buffer.
                    buffer.data.copy_(value.view(buffer.shape))
