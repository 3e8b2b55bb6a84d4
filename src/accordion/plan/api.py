"""`plan`: what a training step of a model takes on given cards, and which configuration to take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from accordion import _torch
from accordion.config import DEVICE, Place, Precision, Strategy, checkpointing_named, strategy_named
from accordion.errors import UsageError, nearest
from accordion.plan.events import Log
from accordion.plan.experts import EVENLY, check_experts
from accordion.plan.extrapolate.offload import offloaded
from accordion.plan.hardware import DISK_GBPS, NETWORK_GBPS, Cluster, Gpu, check_rate, gpu_named, with_attention
from accordion.plan.losses import LOSSES
from accordion.plan.own_model import names_code, vocab_of
from accordion.plan.replay.calibrate import calibrated, choice_of, only_choice
from accordion.plan.result import Plan
from accordion.plan.search.search import SearchResult, search
from accordion.plan.search.space import (
    ACTIVATIONS,
    CHECKPOINTING,
    LARGEST_GPUS,
    MICRO_BATCHES,
    NO_OFFLOAD,
    OFFLOADS,
    STRATEGIES,
    Choice,
    Space,
    check_activations,
    check_offload,
)
from accordion.plan.search.traces import moved_as, traced_as
from accordion.plan.trace import fsdp2
from accordion.plan.trace.optimizers import OPTIMIZERS
from accordion.plan.trace.setup import Subject
from accordion.plan.trained_models import (
    ATTENTIONS,
    Built,
    Kernels,
    configuration,
    language_subject,
    own_subject,
    remarks_on,
    trained_model,
    trained_own,
    unit_rules,
)
from accordion.units import AUTO, choose_units

ENGINES = {"accordion": STRATEGIES, "fsdp2": ("full_shard", "shard_grad_op", "hybrid_shard")}
"""Engines that can be traced, each with the strategies that it has."""
COMPILED = (
    "the model is compiled; it is traced as it was written: fused kernels move fewer bytes and keep fewer activations"
)
LARGEST = 10**9  # of numbers that are asked for
LARGEST_TOKENS = 1 << 24  # of a micro-batch: torch counts the elements of a tensor in 63 bits


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
    host_memory_gib: float | None = None,
    disk_gbps: float = DISK_GBPS,
    strategy: Strategy | str | None = None,
    replicas: int | None = None,
    secondary: int | None = None,
    offload: str | None = None,
    offload_activations: str | None = None,
    checkpoint_activations: str | None = None,
    expert_parallel: int = 1,
    micro_batch: int | None = None,
    seq: int = 4096,
    accumulate: int = 1,
    no_sync: bool = False,
    global_batch: int | None = None,
    optimizer: str = "adamw",
    engine: str = "accordion",
    measured_step_s: float | None = None,
    measured_at: str = "",
    precision: Precision | None = None,
    kernels: Kernels | None = None,
    mean_tokens: int | None = None,
    packed: bool = False,
    tokens: float | None = None,
    price: float | None = None,
    say: Callable[[str], None] = quiet,
    processes: int = 1,
    **sharding: Any,
) -> Plan:
    """Predict memory and time of a training step, before anything is launched; no GPU, no weights and no other rank are needed.

    `model`: a module, with `loss(model, batch)` (0-d) and an example `batch` of one rank, whose size is the micro-batch; or
    the name of a preset, a transformers folder or a config.json, or "file.py:build", a function that gives a module that makes
    logits of tokens; its loss and attention `kernels` choose. `gpu`: of the table, or a description. `gpus`: in all, the last of
    several is what is asked for. `node`: GPUs of one machine. `strategy`, `replicas`, `offload` (none, optimizer, all, disk),
    `checkpoint_activations`, `micro_batch`: fixed where given, else looked for. `offload_activations` (device, host, disk): where
    inputs of recomputed units wait; without it elsewhere than on the device only where nothing fits. `secondary`: what `shard`
    takes, 0 for nothing; looked for where neither it nor `strategy` is given. `seq`: tokens of a sequence. `no_sync`:
    micro-batches of a step but the last reduce nothing. `expert_parallel`: neighbouring ranks that share the experts of a
    mixture; tokens are assumed to choose experts evenly. `global_batch`: samples of a step over all GPUs, from which `accumulate`
    follows.
    `host_memory_gib`, `disk_gbps`: a machine's. `engine`: "fsdp2" traces PyTorch's own in this one's place.
    `measured_step_s`: seconds of one step on these cards, which calibrates all times; of the configuration `measured_at`
    ("full_shard,selective,2,8": strategy, checkpointing, micro-batch, GPUs), or of the only one there is. `mean_tokens`: of a
    sample that is padded to `seq`; the others are not counted as trained. `packed`: such samples fill `seq` in its place, and
    each looks at itself alone. `tokens`, `price`: of a whole run, and dollars for an hour of a GPU. `processes`: 2 shares the
    search with a second process. `sharding`: more keyword arguments of `shard`.
    Needs a process without a process group. Raises `UsageError`, for a model that needs values of tensors with the line of it.
    """
    counts = [gpus] if isinstance(gpus, int) else sorted(gpus)
    training = Training(
        seq=seq,
        accumulate=accumulate,
        no_sync=no_sync,
        global_batch=global_batch,
        optimizer=optimizer,
        engine=engine,
        precision=precision or Precision(params=torch.bfloat16),
        kernels=_packed(kernels or Kernels(), seq, mean_tokens if packed else seq, packed),
        sharding=sharding,
    )
    fixed = Fixed(
        strategy=None if strategy is None else strategy_named(strategy).name,
        replicas=replicas,
        secondary=secondary if secondary is not None or strategy is None else 0,
        offload=offload,
        offload_activations=offload_activations,
        checkpoint_activations=checkpoint_activations,
        expert_parallel=expert_parallel,
        micro_batch=micro_batch,
    )
    _check_numbers(counts, node, training, fixed)
    for rate, value in (("network_gbps", network_gbps), ("host_memory_gib", host_memory_gib), ("disk_gbps", disk_gbps)):
        check_rate(rate, 1 if value is None else value)
    for what, value in (("tokens", tokens), ("price", price)):
        check_rate(what, 1 if value is None else value, 1e18)
    if mean_tokens is not None and not 1 <= mean_tokens <= seq:
        raise UsageError(f"lengths has a mean of {mean_tokens} tokens; it takes 1 to the longest, {seq}.")
    _check_names(training, fixed)
    cluster = Cluster(
        gpu=_with_kernels(gpu_named(gpu) if isinstance(gpu, str) else gpu, training),
        node=node,
        network_gbps=network_gbps,
        host_memory_gib=host_memory_gib,
        disk_gbps=disk_gbps,
    )
    task = _named(model, seq, micro_batch, training.kernels) if isinstance(model, str) else _given(model, loss, batch)
    if expert_parallel > 1:
        check_experts(task.model, task.name, expert_parallel)
    space = _left_by(fixed, training, task, counts)
    num_params, measured = sum(p.numel() for p in task.model.parameters()), ""
    num_trained = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    if measured_step_s is not None or measured_at:
        cluster, measured = _calibrated(cluster, task, space, measured_step_s, measured_at)
    if mean_tokens is not None and not packed:
        space = replace(space, tokens=mean_tokens)
    found = search(task.subject_for, space, cluster, num_trained, say, processes, fewest=True)
    made = Plan(
        model=task.name,
        cluster=cluster,
        space=space,
        found=found,
        log=None,
        num_params=num_params,
        measured=measured,
        tokens=tokens,
        price=price,
        seq=task.tokens if task.vocab else 0,
        vocab=task.vocab,
        counted=task.counted,
        asked={
            "model": task.name,
            "gpu": cluster.gpu.name,
            **({"seq": task.tokens, "mean_tokens": mean_tokens or task.tokens} if task.vocab else {}),
        },
        remarks=[*task.remarks, EVENLY.format(expert_parallel)] if expert_parallel > 1 else task.remarks,
    )
    return replace(made, log=log_of_choice(found, made.chosen.choice, space))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a step is, whichever configuration runs it. `seq`: tokens of a sample of a named model. `global_batch`: samples of a
    step over all GPUs, from which `accumulate` follows. `sharding`: more keyword arguments of `shard`.
    """

    seq: int
    accumulate: int
    no_sync: bool
    global_batch: int | None
    optimizer: str
    engine: str
    precision: Precision
    kernels: Kernels
    sharding: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What the caller fixed of a configuration; None is looked for."""

    strategy: str | None
    replicas: int | None
    secondary: int | None
    offload: str | None
    offload_activations: str | None
    checkpoint_activations: str | None
    expert_parallel: int
    micro_batch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained. `model`: on the meta device, until the first trace, which may cut it. `subject_for`: its training with a
    micro-batch. `tokens`: of one sample. `counted`: what speed is of. `vocab`: 0 where no tokens are made.
    """

    name: str
    model: nn.Module
    subject_for: Callable[[int], Subject]
    micro_batches: Sequence[int]
    tokens: int
    counted: str = "batches"
    remarks: Sequence[str] = ()
    vocab: int = 0


def _with_kernels(gpu: Gpu, training: Training) -> Gpu:
    """The card as these kernels use it. Raises `UsageError` for a dtype that it does not compute with."""
    params = training.precision.params
    if gpu.half != "bf16" and params == torch.bfloat16:
        raise UsageError(f"{gpu.name} does not compute with bf16; take --precision {gpu.half} or fp32.")
    return with_attention(gpu, ATTENTIONS[training.kernels.attention])


def _named(model: str, seq: int, micro_batch: int | None, kernels: Kernels) -> Workload:
    """A model by preset, folder, file or function. Raises `UsageError`."""
    if names_code(model):
        return _own(model, seq, micro_batch, kernels)
    config, where = configuration(model, seq), f"model {model!r}"
    made = trained_model(config, where, kernels)
    built = Built(made, partial(trained_model, config, where, kernels))  # 80 blocks take a third of a second
    return Workload(
        name=model,
        model=made,
        subject_for=partial(language_subject, config, where, seq=seq, make=built, kernels=kernels),
        micro_batches=MICRO_BATCHES if micro_batch is None else [micro_batch],
        tokens=seq,
        counted="tokens",
        remarks=remarks_on(config, made),
        vocab=int(config.get_text_config().vocab_size),
    )


def _own(model: str, seq: int, micro_batch: int | None, kernels: Kernels) -> Workload:
    """A language model that a function of the user's own makes. Raises `UsageError`."""
    where = f"model {model!r}"
    made = trained_own(model, where, kernels)
    vocab = vocab_of(made, where)
    built = Built(made, partial(trained_own, model, where, kernels))
    return Workload(
        name=model,
        model=made,
        subject_for=partial(own_subject, where, vocab, seq=seq, make=built, kernels=kernels),
        micro_batches=MICRO_BATCHES if micro_batch is None else [micro_batch],
        tokens=seq,
        counted="tokens",
        vocab=vocab,
    )


def _packed(kernels: Kernels, seq: int, mean_tokens: int | None, packed: bool) -> Kernels:
    """With the attention of samples that fill a row together, all as long as their mean. Raises `UsageError`."""
    if packed and (mean_tokens is None or not 1 <= mean_tokens <= seq):
        raise UsageError(
            f"packed samples need the mean of their lengths, 1 to {seq} tokens: --lengths mean,longest, such as 900,4096."
        )
    return replace(kernels, attention_share=mean_tokens / seq) if packed and mean_tokens else kernels


def _given(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor] | None, batch: Any) -> Workload:
    """Any module, whose batch is as large as it is. Raises `UsageError`."""
    if loss is None:
        raise UsageError("plan() takes loss=, a function of the model and the batch, for a module; none was given.")
    plain = _torch.without_compile(model)
    compiled = plain is not model or _torch.is_compiled(plain)
    apart = next((name for name, p in plain.named_parameters() if isinstance(p, DTensor)), None)
    if apart is not None:
        raise UsageError(
            f"parameter {apart!r} lies over a mesh already, which is not planned; plan the model as it is before. Experts are "
            "spread by expert_parallel."
        )
    model = plain
    subject = subject_of(model, loss, batch)
    return Workload(
        name=type(model).__name__,
        model=on_meta(model),
        subject_for=lambda size: subject,
        micro_batches=[1],
        tokens=1,
        remarks=[COMPILED] if compiled else (),
    )


def subject_of(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any) -> Subject:
    """The training of any module with a batch like `batch`."""
    return Subject(make=partial(on_meta, model), batch=partial(_without_values, batch), loss=loss)


def _calibrated(
    cluster: Cluster, task: Workload, space: Space, measured_step_s: float | None, measured_at: str
) -> tuple[Cluster, str]:
    """The cluster at the speed of a measured step, and what was measured, in words. Raises `UsageError`."""
    at = choice_of(measured_at) if measured_at else only_choice(space, cluster)
    if measured_step_s is None:
        raise UsageError(f"measured_at {measured_at!r} says what was measured; pass measured_step_s, its seconds, too.")
    return calibrated(cluster, task.subject_for, space, at, measured_step_s), f"{measured_step_s:g} s of {at}"


def _units(model: nn.Module, engine: str, sharding: Mapping[str, Any]) -> Sequence[str]:
    """Rules to try: those that are not given. For FSDP2 the blocks alone, as programs write it; it warns of parts of them."""
    choose_units(model, sharding.get("units"))  # names of what the model lacks are told of at once
    return [AUTO] if "units" in sharding or engine == "fsdp2" else [AUTO, *unit_rules(model)]


def _left_by(fixed: Fixed, training: Training, task: Workload, counts: Sequence[int]) -> Space:
    """What is left to look through."""
    offload = NO_OFFLOAD if training.engine == "fsdp2" or training.no_sync else fixed.offload
    checkpointing = fixed.checkpoint_activations
    return Space(
        strategies=_strategies(fixed, offload, training.engine),
        checkpointing=CHECKPOINTING if checkpointing is None else [checkpointing],
        micro_batches=task.micro_batches,
        gpus=counts,
        accumulate=training.accumulate,
        no_sync=training.no_sync,
        global_batch=training.global_batch,
        replicas=fixed.replicas or 0,
        secondary=0 if fixed.expert_parallel > 1 else fixed.secondary,
        offloads=tuple(OFFLOADS) if offload is None else [offload],
        activations=_places(fixed, training.engine),
        expert_parallel=fixed.expert_parallel,
        units=_units(task.model, training.engine, training.sharding),
        optimizer=training.optimizer,
        engine=training.engine,
        precision=training.precision,
        kernels=training.kernels,
        tokens=task.tokens,
        sharding=training.sharding,
    )


def _places(fixed: Fixed, engine: str) -> Sequence[str]:
    """Where inputs of recomputed units may wait. Without recomputation there are none."""
    if fixed.offload_activations is not None:
        return [fixed.offload_activations]
    return ACTIVATIONS if engine == "accordion" and fixed.checkpoint_activations != "none" else [DEVICE]


def _strategies(fixed: Fixed, offload: str | None, engine: str) -> Sequence[str]:
    if fixed.strategy is not None:
        return [fixed.strategy]
    known: Sequence[str] = ENGINES[engine]
    if fixed.expert_parallel > 1:
        known = [s for s in known if not strategy_named(s).hybrid]
    return known if offload in (None, NO_OFFLOAD) else [s for s in known if strategy_named(s).grads is Place.SHARD]


def log_of_choice(found: SearchResult, choice: Choice, space: Space) -> Log | None:
    """The log of a choice that was traced, with its offload; None where it was not."""
    if moved_as(choice) in found.logs:
        return found.logs[moved_as(choice)]
    log = found.logs.get(traced_as(choice))
    return None if log is None else offloaded(log, choice, space.compute_bytes)


def _check_numbers(counts: Sequence[int], node: int, training: Training, fixed: Fixed) -> None:
    numbers = {
        "node": node,
        "micro_batch": fixed.micro_batch,
        "seq": training.seq,
        "accumulate": training.accumulate,
        "replicas": fixed.replicas,
        "expert_parallel": fixed.expert_parallel,
        "global_batch": training.global_batch,
    }
    if fixed.secondary is not None and not (fixed.secondary == 0 or 2 <= fixed.secondary <= LARGEST):
        raise UsageError(f"secondary is {fixed.secondary}; it takes 2 or more ranks, or 0 for none.")
    for name, value in [*(("gpus", n) for n in counts), *numbers.items()]:
        if value is not None and not 1 <= value <= LARGEST:
            raise UsageError(f"{name} is {value}; it takes 1 or more{f', up to {LARGEST:,}' if value > 1 else ''}.")
    if max(counts, default=0) > LARGEST_GPUS:
        raise UsageError(f"gpus is {max(counts):,}; it takes up to {LARGEST_GPUS:,}.")
    tokens = training.seq * (fixed.micro_batch or 1)
    if tokens > LARGEST_TOKENS:
        raise UsageError(
            f"micro_batch x seq is {tokens:,} tokens at a time; it takes up to {LARGEST_TOKENS:,}: what is larger fits no card."
        )
    if not 0 <= training.kernels.lora_rank <= 4096:
        raise UsageError(f"lora_rank is {training.kernels.lora_rank}; it takes 0 (no adapters) to 4,096.")
    if max(counts, default=0) % fixed.expert_parallel:  # smaller numbers of GPUs that it does not divide are left out
        raise UsageError(
            f"expert_parallel is {fixed.expert_parallel}, which does not divide {max(counts)} GPUs; take a divisor."
        )
    if not counts:
        raise UsageError("gpus is empty; name at least one number of GPUs.")


def _check_names(training: Training, fixed: Fixed) -> None:
    """That what is named exists, and goes together."""
    engine, strategy, offload = training.engine, fixed.strategy, fixed.offload
    if training.sharding.get("meshes"):
        raise UsageError(
            "meshes is given, and a plan makes its own; leave it out, plan the model with all of its experts, and say with "
            "expert_parallel over how many ranks they are spread."
        )
    named: tuple[tuple[str, str, Iterable[str]], ...] = (
        ("optimizer", training.optimizer, OPTIMIZERS),
        ("engine", engine, ENGINES),
        ("loss", training.kernels.loss, LOSSES),
        ("attention", training.kernels.attention, ATTENTIONS),
    )
    for kind, name, known in named:
        if name not in known:
            raise UsageError(f"{kind} {name!r} is not known to plan; {nearest(name, list(known))}")
    if strategy is not None and engine == "fsdp2":
        fsdp2.check(strategy_named(strategy))
    if offload is not None:
        check_offload(offload, strategy)
    if training.no_sync and training.accumulate == 1 and training.global_batch is None:
        raise UsageError("no_sync is for micro-batches of one step; give accumulate, 2 or more, or a global_batch.")
    if training.no_sync and offload not in (None, NO_OFFLOAD):
        raise UsageError(f"no_sync keeps full gradients on the device; leave offload {offload!r} out.")
    if engine == "fsdp2" and offload not in (None, NO_OFFLOAD):
        raise UsageError(
            f"fsdp2 with offload {offload!r} is not planned; leave --offload out, or take the engine accordion."
        )
    if fixed.checkpoint_activations is not None:
        checkpointing_named(fixed.checkpoint_activations)
    if fixed.offload_activations is not None:
        check_activations(fixed.offload_activations, fixed.checkpoint_activations)
        if engine == "fsdp2" and fixed.offload_activations != DEVICE:
            raise UsageError(
                f"fsdp2 with offload_activations={fixed.offload_activations!r} is not planned; take the engine accordion, or "
                "leave it out."
            )
    if fixed.secondary and engine == "fsdp2":
        raise UsageError(
            f"fsdp2 with secondary={fixed.secondary} is not planned; take the engine accordion, or leave it out."
        )
    if fixed.expert_parallel > 1:
        _check_beside_experts(fixed, training)
    if fixed.replicas is not None and strategy is not None and not strategy_named(strategy).hybrid:
        raise UsageError(
            f"replicas is {fixed.replicas}, of which strategy {strategy!r} keeps none; take hybrid_shard, or leave it out."
        )


def _check_beside_experts(fixed: Fixed, training: Training) -> None:
    """Raise `UsageError` for options that are not planned with experts over some of the ranks."""
    beside = {
        f"engine {training.engine!r}": training.engine != "accordion",
        f"strategy {fixed.strategy!r}": fixed.strategy is not None and strategy_named(fixed.strategy).hybrid,
        f"replicas={fixed.replicas}": fixed.replicas is not None,
        f"secondary={fixed.secondary}": bool(fixed.secondary),
    }
    for name, is_asked in beside.items():
        if is_asked:
            raise UsageError(
                f"expert_parallel with {name} is not planned; leave one of them out, or take full_shard, shard_grad_op, "
                "shard_optim or no_shard."
            )


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
