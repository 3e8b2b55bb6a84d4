"""Build the objects that a rank trains with: the sharded model, its optimizer, its batches and the schedule."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from accordion import _torch
from accordion.compat.deepspeed import Settings
from accordion.config import Place, Precision
from accordion.describe import describe
from accordion.ema import EMA
from accordion.errors import DivergenceError
from accordion.offload.step.deferred_step import engines_of
from accordion.optimizers.wrap import is_elementwise, wrap_optimizer
from accordion.shard.api import shard as shard_model
from accordion.sharding import Sharding, precision_named, precision_words
from accordion.train.batches import Batches
from accordion.train.config import JobConfig, max_skips_of
from accordion.train.data import Share
from accordion.train.deepspeed import settings_of
from accordion.train.ending import Best, Ending, Signals, Skips
from accordion.train.language_work import LanguageWork
from accordion.train.launch import RankPlace
from accordion.train.prepare import Prepared, share_of
from accordion.train.rates import LearningRates
from accordion.train.screen import Screen


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One rank of a run: its inputs, and the objects that `run_of` builds from them. `share`: samples that this rank reads.
    `sums_locally`: sum gradients of a step's micro-batches on each rank, and reduce them once. `decides_on_device`: the fused
    optimizer itself skips a step with NaN or inf, so the host need not wait. `ema`: averaged weights, or None."""

    prepared: Prepared
    place: RankPlace
    device: torch.device
    screen: Screen
    share: Share
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    rates: LearningRates
    batches: Batches
    sums_locally: bool
    decides_on_device: bool
    ending: Ending
    best: Best
    skips: Skips
    ema: EMA | None

    @property
    def config(self) -> JobConfig:
        return self.prepared.config

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context manager in which the model has the averaged weights of `ema`; without effect if `ema` is None."""
        return nullcontext() if self.ema is None else self.ema.applied()


def agree(prepared: Prepared, place: RankPlace) -> None:
    """Raise `DivergenceError` if data, tokenizer, checkpoint to resume or DeepSpeed file differ between ranks. Collective."""
    file = prepared.config.train.deepspeed
    of_rank = {
        **prepared.work.agreed(),
        "the checkpoint to resume from": str(prepared.resume),
        "the file train.deepspeed": "none" if file is None else sha256(Path(file).read_bytes()).hexdigest()[:12],
    }
    facts: list[dict[str, str]] = [{}] * place.world
    dist.all_gather_object(facts, of_rank)
    for what, value in facts[0].items():
        other = next((rank for rank, theirs in enumerate(facts) if theirs[what] != value), None)
        if other is not None:
            raise DivergenceError(
                f"ranks differ in {what}: rank 0 has {value}, rank {other} has {facts[other][what]}; give every machine the same "
                "data.path and checkpoint.dir, on shared storage."
            )


def run_of(prepared: Prepared, place: RankPlace, device: torch.device, signals: Signals, screen: Screen) -> Run:
    """Build, shard and fill the model, make all other objects of a `Run`, and return it. Collective; needs a process group."""
    prepared = _with_sequences(prepared, place, device)
    config, work, on_cpu = prepared.config, prepared.work, device.type == "cpu"
    # "auto" is fp32 on CPU, bf16 on accelerators that support it, else fp16.
    best = "fp32" if on_cpu else "bf16" if _torch.has_bf16(device) else "fp16"
    options, precision = config.train, config.shard.precision or precision_named(best)
    assert precision is not None, "only auto is None"
    name = str(precision_words(precision))
    theirs = settings_of(config, name)
    model = _sharded_model(prepared, place, device, precision, theirs)
    task_optimizer = work.optimizer(model)
    optimizer = _optimizer(model, config, theirs, task_optimizer)
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    share = share_of(config, place)
    state_bytes = sum(unit.parameter_bytes + unit.optimizer_bytes for unit in describe(model).units)
    return Run(
        prepared=prepared,
        place=place,
        device=device,
        screen=screen,
        share=share,
        model=model,
        optimizer=optimizer,
        scaler=theirs.scaler(device.type) if theirs else torch.amp.GradScaler(device.type, enabled=name == "fp16"),
        rates=LearningRates(options, optimizer, work.scheduler(optimizer), theirs, is_own=task_optimizer is not None),
        batches=work.batches(share, options.seed, pins=not on_cpu),
        sums_locally=config.shard.strategy.grads is Place.REPLICATE,
        decides_on_device=not on_cpu and theirs is None and not engines_of(optimizer) and is_fused,
        ending=Ending(signals, hours=options.hours, began_s=prepared.began_s, state_bytes=state_bytes),
        best=Best(options.patience, options.min_delta),
        skips=Skips(max_skips_of(options.on_nonfinite)),
        ema=EMA(model, options.ema) if options.ema else None,
    )


def _with_sequences(prepared: Prepared, place: RankPlace, device: torch.device) -> Prepared:
    """Return `prepared` with `work.sequence` set to a new mesh of this rank and those that share each sequence with it. Return
    `prepared` itself for a task, or if `shard.sequence`, the size of that mesh, is 1. Collective."""
    size, work = prepared.config.shard.sequence, prepared.work
    if size == 1 or not isinstance(work, LanguageWork):
        return prepared
    mesh = init_device_mesh(device.type, (place.world // size, size), mesh_dim_names=("data", "sequence"))
    return replace(prepared, work=replace(work, sequence=mesh["sequence"]))


def _sharded_model(
    prepared: Prepared, place: RankPlace, device: torch.device, precision: Precision, theirs: Settings | None
) -> nn.Module:
    """Build the model, shard it as the keys `shard.*` describe, fill its weights, and return it. Parameters are gathered in
    `precision.params`; other dtypes and the reduce op are those of the DeepSpeed configuration `theirs`, or defaults if that is
    None. Without the key `shard.units`, `work.units()` chooses the units. Collective."""
    work, shard, seed = prepared.work, prepared.config.shard, prepared.config.train.seed
    base = theirs.sharding if theirs else Sharding()
    model = work.model(seed)
    on_meta = any(p.is_meta for p in model.parameters())
    sharding = replace(
        shard,
        precision=replace(base.precision or Precision(), params=precision.params),
        units=work.units() if shard.units is None else shard.units,
        reduce_op=base.reduce_op,
    )
    sizes = {"shard": place.world // prepared.replicas}
    if shard.strategy.hybrid:
        sizes = {"replicate": prepared.replicas, **sizes}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = shard_model(model, mesh, sharding)
    work.fill(model, seed, on_meta=on_meta)
    return model


def _optimizer(
    model: nn.Module, config: JobConfig, theirs: Settings | None, own: torch.optim.Optimizer | None
) -> torch.optim.Optimizer:
    """Return the optimizer for the trained parameters of `model`: the user's `own`, else that of the DeepSpeed configuration
    `theirs`, else AdamW without weight decay for vectors. An `own` one is wrapped only if its step is elementwise, others
    always."""
    options = config.train
    if own is not None:
        return wrap_optimizer(own) if is_elementwise(own) else own
    if theirs is not None and theirs.optimizer is not None:
        return wrap_optimizer(theirs.optimizer(model.parameters()))
    matrices = [p for p in model.parameters() if p.dim() >= 2 and p.requires_grad]
    vectors = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    present = [group for group in groups if group["params"]]
    return wrap_optimizer(torch.optim.AdamW(present, lr=options.lr, betas=(0.9, 0.95), fused=True))
