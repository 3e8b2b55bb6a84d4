"""Make the plan that the options of `accordion plan` describe."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from accordion.config import COMPUTE_DTYPES, Precision
from accordion.errors import UsageError, nearest
from accordion.garbage import without_collections
from accordion.plan.api import plan
from accordion.plan.choice import MICRO_BATCHES, Search
from accordion.plan.cli.options import Options
from accordion.plan.hardware import LARGEST_GPUS, NODE, Cluster, cluster_of
from accordion.plan.result import Plan, gib
from accordion.plan.trained_models import Kernels
from accordion.plan.workload import Workload
from accordion.tasks.errors import of_the_task
from accordion.tasks.loaded import example_of, mean_loss, model_of, read_task

PURE = "bf16-pure"
TASK_BATCH = 8  # samples in a micro-batch of a task, without --micro-batch
FIXED = ("strategy", "units", "offload", "checkpoint_activations")
"""Options that set the field of `Sharding` of the same name."""
SEARCHED = ("replicas", "accumulate", "global_batch", "no_sync", "expert_parallel", "sequence")
"""Options that set the field of `Search` of the same name."""


def planned(o: Options, task_words: list[str]) -> Plan:
    """Make and return the plan that the options `o` describe, and print progress to stderr. `task_words`: the words of options
    `--task.*`; [] without a task. Raises `UsageError` for wrong options, and `TaskError` if the task's code fails."""
    cluster, sharding = cluster_in(o), sharding_of(o)
    search = Search(
        micro_batches=MICRO_BATCHES if o.micro_batch is None or o.task is not None else [o.micro_batch],
        **{name: getattr(o, name) for name in SEARCHED},
    )
    workload = workload_of(o, task_words)
    with without_collections():  # planning makes millions of small objects, and no reference cycles
        return plan(workload, cluster, sharding, search, say=partial(print, file=sys.stderr))


# -- options as values


def workload_of(o: Options, task_words: list[str]) -> Workload:
    """Return the workload that `o` describes: a language model, or a task with options `task_words`. For a task, print the size
    of a micro-batch to stderr. Raises `UsageError` for a wrong option or task, and `TaskError` if the task's code fails."""
    model: Any = o.model
    loss: Any = None
    batch: Any = None
    if o.task is not None:
        size, task = o.micro_batch or TASK_BATCH, read_task(o.task, task_words, "accordion plan")
        with of_the_task("model()"):
            model = model_of(task)
        with of_the_task("dataset('train')"):
            batch = example_of(task, size)
        print(f"{task.name}: a micro-batch has {size} samples, unless the task's loader makes batches", file=sys.stderr)
        loss = partial(mean_loss, task)
    elif task_words:
        raise UsageError(f"{task_words[0]} is an option of a task, and none is named; give --task.")
    rank, targets = (0, "all") if o.lora is None else adapters_of(o.lora)
    kernels = Kernels(
        loss=o.loss,
        attention=o.attention,
        mlp_tiles=o.mlp_tiles,
        pure=o.precision.partition(",")[0] == PURE,
        lora_rank=rank,
        lora_targets=targets,
        quantize=o.quantize,
    )
    return Workload(
        model, loss, batch, seq=o.seq, kernels=kernels, optimizer=o.optimizer, engine=o.engine, tokens=o.tokens
    )


def cluster_in(o: Options) -> Cluster:
    """Return the cluster of `--gpu` and `--gpus`, less `--reserve-gb` of each GPU. Raises `UsageError` for a wrong value."""
    gpus, node = counts_of(o.gpus)
    cluster = cluster_of(o.gpu, gpus=gpus, node=node)
    if not 0 <= o.reserve_gb < cluster.gpu.memory_gib:
        most = gib(cluster.card_bytes)
        raise UsageError(f"--reserve-gb {o.reserve_gb:g} is not between 0 and the {most} GiB of a GPU.")
    return replace(cluster, gpu=replace(cluster.gpu, memory_gib=cluster.gpu.memory_gib - o.reserve_gb))


def sharding_of(o: Options) -> dict[str, Any]:
    """Return field of `Sharding` -> value, for the precision and for the fields that options fix. A value in `--sharding`
    becomes an int if it has only digits, else it stays text. Raises `UsageError` for a wrong precision, or a value of 0."""
    fixed = {name: getattr(o, name) for name in FIXED if getattr(o, name) is not None}
    for word in [] if o.sharding is None else o.sharding.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        fixed[name] = int(value) if value.isdecimal() and len(value) < 10 else value
        if fixed[name] == 0:
            raise UsageError(f"--sharding {word!r}: no field takes 0; leave {name} out for its default.")
    return {"precision": precision_of(o.precision), **fixed}


def adapters_of(text: str) -> tuple[int, str]:
    """Return (rank, layers) of `--lora`: (16, "q_proj,v_proj") from "16,targets=q_proj+v_proj", (16, "all") from "16". Raises
    `UsageError` for other text."""
    rank, *words = text.split(",")
    more = dict(word.partition("=")[::2] for word in words)
    targets = more.pop("targets", "all").replace("+", ",")
    if not rank.isdecimal() or len(rank) > 9 or more:
        raise UsageError(
            f"--lora {text!r} is not understood; it takes a rank, such as 16,targets=q_proj+v_proj (and --quantize nf4)."
        )
    return int(rank), targets


def precision_of(text: str) -> Precision:
    """Return the precision that `--precision` describes; bf16-pure has no float32 masters. Raises `UsageError` for other text."""
    name, _, more = text.partition(",")
    key, _, dtype = more.partition("=")
    known = (*COMPUTE_DTYPES, PURE)
    if name not in known or (more and (key, dtype) not in (("reduce", "fp32"), ("reduce", "bf16"))):
        raise UsageError(f"--precision {text!r} is not understood; {nearest(name, list(known))} Or bf16,reduce=bf16.")
    reduce = torch.bfloat16 if dtype == "bf16" else torch.float32
    if name == PURE:
        return Precision(params=torch.bfloat16, reduce=reduce, master=None)
    return Precision(params=COMPUTE_DTYPES[name], reduce=reduce)


def counts_of(text: str | None) -> tuple[list[int], int]:
    """Return (numbers of GPUs to try, GPUs per node): ([16], 8) from "2x8", ([8, 16], 8) from "8,16", ([8], 8) from None.
    Without "x", a node has the largest number, but at most eight. Raises `UsageError` for other text."""
    nodes, _, each = (text or str(NODE)).rpartition("x")
    words = each.split(",") if not nodes else [nodes, each]
    if not all(word.isdecimal() and 0 < int(word[:9]) <= LARGEST_GPUS and len(word) < 9 for word in words):
        raise UsageError(f"--gpus {text!r} is not understood; it takes 1 to {LARGEST_GPUS:,}, 2x8 (nodes) or 8,16,32.")
    counts = [int(word) for word in words]
    if nodes:
        return [counts[0] * counts[1]], counts[1]
    return counts, min(max(counts), NODE)
