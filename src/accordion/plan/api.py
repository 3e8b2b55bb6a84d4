"""`plan`: what a training step of a model takes on given cards, and which configuration to take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from accordion.config import Precision, checkpointing_named, nearest, strategy_named
from accordion.errors import UsageError
from accordion.plan.hardware import NETWORK_GBPS, Cluster, Gpu, check_rate, gpu_named
from accordion.plan.language import language_model
from accordion.plan.models import configuration, language_subject
from accordion.plan.result import Plan
from accordion.plan.search import CHECKPOINTING, MICRO_BATCHES, STRATEGIES, Space, search
from accordion.plan.trace import OPTIMIZERS, Subject


def quiet(text: str) -> None:
    """Says nothing."""


def plan(
    model: nn.Module | str,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    batch: Any = None,
    *,
    gpu: str | Gpu = "h100",
    gpus: int | Sequence[int] = 8,
    node: int = 8,
    network_gbps: float = NETWORK_GBPS,
    strategy: str | None = None,
    checkpoint_activations: str | None = None,
    micro_batch: int | None = None,
    seq: int = 4096,
    accumulate: int = 1,
    optimizer: str = "adamw",
    precision: Precision | None = None,
    say: Callable[[str], None] = quiet,
    **sharding: Any,
) -> Plan:
    """Predict memory and time of a training step, before anything is launched; no GPU, no weights and no other rank are needed.

    `model`: a module, with `loss(model, batch)` (0-d) and an example `batch` of one rank, whose size is the micro-batch; or
    the name of a preset, a transformers folder or a config.json. `gpu`: of the table, or a description. `gpus`: in all, the last
    of several is what is asked for. `node`: GPUs of one machine. `strategy`, `checkpoint_activations`, `micro_batch`: fixed
    where given, else looked for. `seq`: tokens of a sequence. `sharding`: more keyword arguments of `shard`, such as `units`.
    Needs a process without a process group. Raises `UsageError`, for a model that needs values of tensors with the line of it.
    """
    cluster = Cluster(gpu=gpu_named(gpu) if isinstance(gpu, str) else gpu, node=node, network_gbps=network_gbps)
    counts = [gpus] if isinstance(gpus, int) else sorted(gpus)
    _check(counts, node, micro_batch, seq, accumulate, optimizer)
    check_rate("network_gbps", network_gbps)
    if strategy is not None:
        strategy_named(strategy)
    if checkpoint_activations is not None:
        checkpointing_named(checkpoint_activations)
    if isinstance(model, str):
        config, name = configuration(model, seq), model
        whole = language_model(config, f"model {model!r}")
        subject_for: Callable[[int], Subject] = lambda size: language_subject(config, f"model {model!r}", size, seq)  # noqa: E731
        batches: Sequence[int] = MICRO_BATCHES if micro_batch is None else [micro_batch]
        tokens = seq
    else:
        if loss is None:
            raise UsageError("plan() takes loss=, a function of the model and the batch, for a module; none was given.")
        whole, name = on_meta(model), type(model).__name__
        subject = Subject(make=partial(on_meta, model), batch=partial(_without_values, batch), loss=loss)
        subject_for, batches, tokens = (lambda size: subject), [1], 1
    space = Space(
        strategies=STRATEGIES if strategy is None else [strategy],
        checkpointing=CHECKPOINTING if checkpoint_activations is None else [checkpoint_activations],
        micro_batches=batches,
        gpus=counts,
        accumulate=accumulate,
        optimizer=optimizer,
        precision=precision or Precision(params=torch.bfloat16),
        tokens=tokens,
        sharding=sharding,
    )
    num_params = sum(p.numel() for p in whole.parameters())
    found = search(subject_for, space, cluster, num_params, say)
    made = Plan(model=name, cluster=cluster, space=space, found=found, log=None, num_params=num_params)
    return replace(made, log=found.logs.get(made.chosen.choice))


def _check(
    counts: Sequence[int], node: int, micro_batch: int | None, seq: int, accumulate: int, optimizer: str
) -> None:
    numbers = {"node": node, "micro_batch": micro_batch, "seq": seq, "accumulate": accumulate}
    for name, value in [*(("gpus", n) for n in counts), *numbers.items()]:
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; it takes 1 or more.")
    if not counts:
        raise UsageError("gpus is empty; name at least one number of GPUs.")
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"optimizer {optimizer!r} is not known to plan; {nearest(optimizer, OPTIMIZERS)}")


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of a module without memory: the same classes, names, shapes and ties."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo)


def _without_values(batch: Any) -> Any:
    return tree_map_only(Tensor, lambda t: torch.empty_like(t, device="cpu"), batch)
