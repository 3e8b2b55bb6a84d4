"""`plan`: predict memory and time of a training step of a model on given GPUs, and choose a configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from accordion.config import DEVICE, Place, Precision
from accordion.errors import UsageError
from accordion.plan.choice import NO_OFFLOAD, Search
from accordion.plan.hardware import Cluster, cluster_of, with_attention
from accordion.plan.result import Plan
from accordion.plan.search.evaluate import Say
from accordion.plan.search.search import search_in
from accordion.plan.search.space import Space
from accordion.plan.trace import fsdp2
from accordion.plan.trace.experts import EVENLY, check_experts
from accordion.plan.trace.sequence import check_sequence, sequences_for
from accordion.plan.trained_models import ATTENTIONS
from accordion.plan.workload import LARGEST_TOKENS, TraceableModel, Workload, trained
from accordion.sharding import Sharding
from accordion.units import choose_units, only_blocks

BF16 = Precision(params=torch.bfloat16)


def plan(
    subject: Workload | str,
    cluster: Cluster | str = "h100",
    sharding: Sharding | Mapping[str, Any] | None = None,
    search: Search | None = None,
    *,
    say: Say = lambda text: None,
) -> Plan:
    """Return a plan: predicted memory and time of a training step, for the configuration that needs least memory of those that
    fit on the GPUs and are within 2 % of the fastest. If nothing fits, it is the configuration that is closest to fitting.
    Needs no GPU, no weights and no other rank.

    Args:
        subject: the workload; or the name of a language model, a folder with a config.json, or that file.
        cluster: the GPUs, or a text that describes them: "h100,network_gbps=25" is a node of eight H100.
        sharding: the arguments of `accordion.shard`. A `Sharding` fixes all of them. A mapping (field -> value) fixes the
            fields that it has. Of the other fields, the search chooses strategy, checkpointing, offload and `secondary`; the
            precision is bf16, and the rest have their defaults. None: as an empty mapping.
        search: the values to try for fields that `sharding` does not fix; None: those of `Search()`.
        say: called with a line of text before each trace.

    Creates a fake process group during each trace, and destroys it afterwards. Raises `UsageError` if the model cannot be read,
    if arguments contradict each other, if this process has a process group already, or if the model needs the values of a
    tensor; the message then names the line of code.
    """
    workload = Workload(subject) if isinstance(subject, str) else subject
    cluster = cluster_of(cluster) if isinstance(cluster, str) else cluster
    if isinstance(sharding, Sharding):
        base, fixed = sharding, {f.name for f in fields(Sharding)}
    else:
        words = dict(sharding or {})
        base, fixed = Sharding.from_config({"precision": BF16, **words}), set(words)
    search = _narrowed(search or Search(), base, fixed, workload)
    _check(workload, cluster, base, search)
    task = trained(workload)
    if search.expert_parallel > 1:
        check_experts(task.model, task.name, search.expert_parallel)
        task = replace(task, remarks=[*task.remarks, EVENLY.format(search.expert_parallel)])
    if search.sequence is not None and search.sequence > 1:
        check_sequence(task.model, workload.seq, search.sequence)
    space = _space(workload, cluster, base, search, task)
    return Plan(task=task, workload=workload, space=space, found=search_in(space, say))


def _narrowed(search: Search, base: Sharding, fixed: Collection[str], workload: Workload) -> Search:
    """Return a copy of `search` that tries fewer values: for each field named in `fixed` only the value in `base`, and for all
    other fields only values that the engine, shared experts and the offload in `base` support. For a module, whose batch is
    given, the micro-batch is 1. Raises `UsageError` if fixed values contradict each other, or if no strategy is left."""
    search = search.narrowed(base, fixed)
    if not isinstance(workload.model, str):
        search = replace(search, micro_batches=[1])
    if workload.engine == "fsdp2":
        strategies = [s for s in search.strategies if fsdp2.has(s)]
        if not strategies:
            fsdp2.check(search.strategies[0])
        search = replace(search, strategies=strategies, offloads=[NO_OFFLOAD], activations=[DEVICE], copies=False)
    if search.expert_parallel > 1 and "strategy" not in fixed:
        search = replace(search, strategies=[s for s in search.strategies if not s.hybrid])
    if base.offload.is_any:
        search = replace(search, strategies=[s for s in search.strategies if s.grads is Place.SHARD])
    if not search.strategies:
        raise UsageError(
            "none of the strategies to search works with these experts and this offload; add 'full_shard'."
        )
    return search


def _check(workload: Workload, cluster: Cluster, base: Sharding, search: Search) -> None:
    """Raise `UsageError` if the arguments contradict each other, or if their combination cannot be planned."""
    tokens = workload.seq * min(search.micro_batches)
    if isinstance(workload.model, str) and tokens > LARGEST_TOKENS:
        raise UsageError(
            f"micro_batch x seq is {tokens:,} tokens; it takes up to {LARGEST_TOKENS:,}, since no GPU holds more."
        )
    if cluster.num_gpus % search.expert_parallel:  # smaller numbers of GPUs that it does not divide are left out
        raise UsageError(
            f"expert_parallel is {search.expert_parallel}, which does not divide {cluster.num_gpus} GPUs; take a divisor."
        )
    if base.meshes:
        raise UsageError(
            "meshes is set, but a plan creates its own; leave it out, plan the model with all of its experts, and set "
            "expert_parallel to the number of ranks that share them."
        )
    if base.precision is not None and base.precision.params == torch.bfloat16 and cluster.gpu.half != "bf16":
        raise UsageError(f"{cluster.gpu.name} does not compute with bf16; take --precision {cluster.gpu.half} or fp32.")
    for strategy in search.strategies:
        replace(base, strategy=strategy).check_secondary(cluster.num_gpus // (search.replicas or 1))
    if workload.engine == "fsdp2":
        fsdp2.check_sharding(base)
    if search.expert_parallel > 1 and (
        workload.engine != "accordion" or any(s.hybrid for s in search.strategies) or search.replicas or base.secondary
    ):
        raise UsageError(
            "expert_parallel is planned with engine accordion and without hybrid strategies, replicas and secondary shards; "
            "leave these out, or take full_shard, shard_grad_op, shard_optim or no_shard."
        )
    if search.sequence is not None and search.sequence > 1:
        if not _can_share_sequences(workload, search):
            raise UsageError(
                f"sequence is {search.sequence}, which is planned for a language model by name or config.json, with engine "
                "accordion and without expert_parallel; leave it out."
            )
        if cluster.num_gpus % search.sequence:
            raise UsageError(
                f"sequence is {search.sequence}, which does not divide {cluster.num_gpus} GPUs; take a divisor."
            )


def _can_share_sequences(workload: Workload, search: Search) -> bool:
    return isinstance(workload.model, str) and workload.engine == "accordion" and search.expert_parallel == 1


def _space(workload: Workload, cluster: Cluster, base: Sharding, search: Search, task: TraceableModel) -> Space:
    choose_units(task.model, base.units)  # raises for names that the model lacks, before anything is traced
    dtypes, master_dtype = {p.dtype for p in task.model.parameters()}, (base.precision or Precision()).master_dtype
    if workload.engine == "fsdp2" and base.units is None:
        base = replace(base, units=only_blocks())  # as programs do; FSDP2 warns about parts of blocks
    searched = search.sequence is None and _can_share_sequences(workload, search)
    return Space(
        subject_for=task.subject_for,
        num_params=sum(p.numel() for p in task.model.parameters() if p.requires_grad),
        cluster=replace(cluster, gpu=with_attention(cluster.gpu, ATTENTIONS[workload.kernels.attention])),
        sharding=base,
        search=search,
        tokens=workload.seq if task.vocab else 1,
        optimizer=workload.optimizer,
        engine=workload.engine,
        sequences=sequences_for(task.model, workload.seq) if searched else (),
        master_bytes=min((master_dtype(d, True).itemsize for d in dtypes if d.is_floating_point), default=4),
    )
