"""The contenders: how each of them shards or replicates the same model, and trains it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accordion.bench.model import loss_of
from accordion.config import STRATEGIES, Precision, strategy_named
from accordion.errors import UsageError, nearest
from accordion.optimizers.wrap import wrap_optimizer
from accordion.safety.own_process import keep_freed_memory
from accordion.shard.api import shard
from accordion.units import choose_units, only_blocks
from accordion.workers.ranks import RankSetup

OURS = "accordion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The training that all contenders run. `model`: a name that `shape_of` takes. `batch`: sequences per rank and step. `seq`:
    tokens per sequence. `bf16`: compute in bf16 over float32 parameters. `seed`: of the model's random weights."""

    model: str = "gpt-30m"
    batch: int = 2
    seq: int = 128
    bf16: bool = False
    lr: float = 1e-3
    seed: int = 0


class Loop:
    """One contender's training on one rank; `loop_of` creates it. For each step call `forward`, `backward` with its loss, and
    `step`, which also clears the gradients."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, cast: bool, device: str) -> None:
        """Create the loop. `cast`: run forwards under bf16 autocast of the device type `device`, for a contender without a
        mixed-precision policy."""
        self._model, self._optimizer = model, optimizer
        self._autocast = partial(torch.autocast, device, dtype=torch.bfloat16) if cast else contextlib.nullcontext

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, in float32, of the model's output for `tokens` with `targets`; run no backward."""
        with self._autocast():
            return loss_of(self._model(tokens), targets)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class FloorLoop(Loop):
    """A `Loop` without communication whose optimizer steps one rank's share of each parameter: the least time that a step of
    sharded training can take on this machine."""

    def __init__(self, model: nn.Module, setup: RankSetup, setting: Setting) -> None:
        params = list(model.parameters())
        pairs = [(p, p.detach().view(-1).tensor_split(setup.num_ranks)[setup.rank]) for p in params]
        self._shares = [(nn.Parameter(share), p) for p, share in pairs]  # `share` has the memory of these rows of `p`
        optimizer = optimizer_of([share for share, _ in self._shares], setting)
        super().__init__(model, optimizer, setting.bf16, setup.device.type)
        self._setup = setup

    def step(self) -> None:
        for share, param in self._shares:
            if param.grad is not None:
                share.grad = param.grad.view(-1).tensor_split(self._setup.num_ranks)[self._setup.rank]
        super().step()
        self._model.zero_grad()


class DeepSpeedLoop(Loop):
    """A `Loop` in which DeepSpeed's engine runs backward and step."""

    def __init__(self, engine: Any) -> None:
        self._model, self._autocast = engine, contextlib.nullcontext

    def backward(self, loss: Tensor) -> None:
        self._model.backward(loss)

    def step(self) -> None:
        self._model.step()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of `model`, the units of `only_blocks`, which FSDP1 and FSDP2 wrap one by one."""
    return [module for _, module in choose_units(model, only_blocks())[1:]]


def mesh_of(setup: RankSetup) -> DeviceMesh:
    return init_device_mesh(setup.device.type, (setup.num_ranks,))


def optimizer_of(params: Iterable[nn.Parameter], setting: Setting) -> torch.optim.Optimizer:
    """Return torch's fused AdamW for `params`, the fastest optimizer that all contenders support."""
    return torch.optim.AdamW(params, lr=setting.lr, fused=True)


# -- models, sharded or replicated


def ours(model: nn.Module, setup: RankSetup, bf16: bool, strategy: str = "full_shard") -> nn.Module:
    precision = Precision(params=torch.bfloat16) if bf16 else Precision()
    if setup.device.type == "cpu":
        keep_freed_memory()  # as `accordion train` and `accordion run` do
    return shard(model, mesh_of(setup), strategy=strategy_named(strategy), precision=precision)


def fsdp2(model: nn.Module, setup: RankSetup, bf16: bool) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh, options = mesh_of(setup), {"mp_policy": policy} if bf16 else {}
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, **options)  # type: ignore[call-overload]
    fully_shard(model, mesh=mesh, **options)  # type: ignore[call-overload]
    return model


def fsdp1(model: nn.Module, setup: RankSetup, bf16: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import CustomPolicy

    blocks = {id(block) for block in blocks_of(model)}
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in blocks),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None,
        device_id=setup.device,
        use_orig_params=True,
    )


def ddp(model: nn.Module, setup: RankSetup, bf16: bool) -> nn.Module:
    ids = None if setup.device.type == "cpu" else [setup.device]
    return nn.parallel.DistributedDataParallel(model, device_ids=ids)


WRAPPERS: Mapping[str, Callable[..., nn.Module]] = {
    "plain": lambda model, setup, bf16: model,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp1": fsdp1,
    OURS: ours,
    **{f"{OURS}:{name}": partial(ours, strategy=name) for name, s in STRATEGIES.items() if not s.hybrid},
}
CASTS = ("plain", "ddp")  # contenders without a mixed-precision policy of their own
FLOOR = "floor"
ALONE = ("plain", FLOOR)  # contenders without communication
PEERS = ("fsdp2", "fsdp1", "ddp", "deepspeed", FLOOR)
NAMES = (*WRAPPERS, "deepspeed", FLOOR)
ENVIRON: Mapping[str, Mapping[str, str]] = {"deepspeed": {"DS_ACCELERATOR": "cpu"}}  # deepspeed reads it at import
NOT_HERE = {"deepspeed": "deepspeed"}  # contender -> package that it needs


def is_ours(name: str) -> bool:
    """Return True if the contender `name` is this engine, under any strategy."""
    return name.partition(":")[0] == OURS


def chosen(against: str) -> tuple[list[str], dict[str, str]]:
    """Return (names of contenders to measure, {name that is left out: reason}). Names are "accordion" and those in `against`,
    separated by commas, each once; a name is left out if its package is not installed. Raises `UsageError` for unknown ones."""
    names = list(dict.fromkeys([OURS, *(name.strip() for name in against.split(",") if name.strip())]))
    for name in names:
        if name not in NAMES:
            raise UsageError(f"contender {name!r} does not exist; {nearest(name, list(NAMES))}")
    missing = [name for name in names if name in NOT_HERE and find_spec(NOT_HERE[name]) is None]
    left_out = {name: f"{NOT_HERE[name]} is not installed" for name in missing}
    return [name for name in names if name not in left_out], left_out


def loop_of(name: str, model: nn.Module, setup: RankSetup, setting: Setting) -> Loop:
    """Shard or replicate `model`, which is on the device of `setup`, as contender `name` does ("plain" and "floor" do neither);
    return a `Loop` with AdamW. Collective."""
    if name == "deepspeed":
        return deepspeed(model, setting, {})
    if name == FLOOR:
        return FloorLoop(model, setup, setting)
    wrapped = WRAPPERS[name](model, setup, setting.bf16)
    optimizer = optimizer_of(wrapped.parameters(), setting)
    if is_ours(name):
        optimizer = wrap_optimizer(optimizer)
    return Loop(wrapped, optimizer, setting.bf16 and name in CASTS, setup.device.type)


def deepspeed(model: nn.Module, setting: Setting, zero: Mapping[str, Any], *, offloads: bool = False) -> Loop:
    """Shard `model` with DeepSpeed's ZeRO-3, and return its `Loop` with torch's fused AdamW. `zero`: option -> value to add to
    DeepSpeed's "zero_optimization". `offloads`: True if `zero` keeps the optimizer on the host. Disables all log messages of this
    process up to warnings."""
    logging.disable(logging.WARNING)
    import deepspeed as package  # type: ignore[import-not-found]

    config = {
        "train_micro_batch_size_per_gpu": setting.batch,
        "zero_optimization": {"stage": 3, **zero},
        "zero_allow_untested_optimizer": True,  # torch's own
        "bf16": {"enabled": setting.bf16},
    }
    if offloads:
        config["zero_force_ds_cpu_optimizer"] = False
    engine, *_ = package.initialize(
        model=model,
        optimizer=optimizer_of(model.parameters(), setting),
        config=config,
        dist_init_required=False,
    )
    return DeepSpeedLoop(engine)
