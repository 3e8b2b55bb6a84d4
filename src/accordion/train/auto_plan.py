"""`accordion train --plan auto`: use the configuration that a plan chooses, and compare plan and measurement at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from accordion.config import DEVICE, HOST, Offload, Precision, folder_of
from accordion.devices import name_of
from accordion.errors import UsageError
from accordion.pages.machine import memory_bytes
from accordion.plan.choice import NO_OFFLOAD, OFFLOADS, Choice, Search
from accordion.plan.hardware import GIB, GPUS, Cluster, Gpu
from accordion.plan.search.search import search_in
from accordion.plan.search.space import Space
from accordion.plan.trace.setup import Subject
from accordion.plan.trained_models import language_subject
from accordion.plan.workload import subject_of
from accordion.sharding import Sharding
from accordion.tasks.errors import of_the_task
from accordion.tasks.loaded import LoadedTask, example_of, mean_loss, model_of
from accordion.train.config import Config, Job, JobConfig, ShardConfig
from accordion.train.language_work import answer_losses, trained_model
from accordion.train.metrics import StepMetrics
from accordion.train.model import configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Prediction of the plan for one rank. `choice`: text. `peak_bytes`: allocated. `step_s`: (lowest, highest) seconds."""

    choice: str
    peak_bytes: int
    step_s: tuple[float, float]


def planned(
    config: Job,
    named: AbstractSet[str],
    num_ranks: int,
    device: str,
    say: Callable[[str], None],
    task: LoadedTask | None = None,
) -> tuple[Job, Expected | None]:
    """Return `config` with the fastest strategy, checkpointing and offload that fit into memory, and the plan's prediction.

    If micro-batches do not fit, smaller ones are accumulated to the same global batch. Returns (`config`, None) if
    `train.plan` is "none". Needs a process without a process group. `named`: keys that the user set, whose values do not
    change. `task`: the task, if the run does not train on text. Raises `UsageError` if nothing fits or the GPU is unknown.
    """
    if config.train.plan == "none":
        return config, None
    space = space_of(config, named, num_ranks, device, task)
    best = search_in(space).best
    cut = smaller_of(config, named, space)
    if best is None and cut is not None:
        best = search_in(cut).best
    if best is None or best.memory is None or best.steps is None:
        seq = f" and seq_len {config.data.seq_len}" if isinstance(config, Config) else ""
        raise UsageError(
            f"train.plan: nothing fits {num_ranks} x {space.cluster.gpu.memory_gib:.0f} GiB with micro_batch "
            f"{config.train.micro_batch}{seq}; lower train.micro_batch, or ask `accordion plan`."
        )
    choice, seconds = best.choice, [step.seconds for step in best.steps.values()]
    words = choice.sharding.as_config()
    more = [f"{key} {words[key]}" for key in words if key not in ("strategy", "precision", "checkpoint_activations")]
    sizes = f"micro_batch {choice.micro_batch}, accumulate {choice.accumulate}"
    summary = ", ".join([choice.strategy.name, f"checkpoint_activations {choice.checkpointing}", *more, sizes])
    say(f"plan: {summary}")
    expected = Expected(choice=summary, peak_bytes=best.memory.peak.num_bytes, step_s=(min(seconds), max(seconds)))
    return with_choice(config, choice, named), expected


def space_of(
    config: JobConfig, named: AbstractSet[str], num_ranks: int, device: str, task: LoadedTask | None = None
) -> Space:
    """Return the space of configurations to search. `task`: the task, if the run does not train on text."""
    if isinstance(config, Config):
        model = trained_model(config)
        subject_for: Callable[[int], Subject] = partial(_subject, config)
    else:
        assert task is not None, "a run without text has a task"
        with of_the_task("model()"):
            model = model_of(task)

        def subject_for(micro_batch: int) -> Subject:
            with of_the_task("dataset('train')"):
                batch = example_of(task, micro_batch)
            return subject_of(model, partial(mean_loss, task), batch)

    base = sharding_of(config.shard, device)
    return Space(
        subject_for=subject_for,
        num_params=sum(p.numel() for p in model.parameters()),
        cluster=Cluster(
            gpu=card_of(device, num_ranks), gpus=(num_ranks,), node=num_ranks, host_memory_gib=memory_bytes() / GIB
        ),
        sharding=base,
        search=search_of(config, named, base, device),
        tokens=config.data.seq_len if isinstance(config, Config) else 1,
        device="cpu" if device == "cpu" else "cuda",  # traces of all accelerators use CUDA's operators
    )


def search_of(config: JobConfig, named: AbstractSet[str], base: Sharding, device: str) -> Search:
    """Return the values to try for each key that is not in `named`. CPU ranks offload nothing: their device is the host."""
    # Offload to disk needs a folder, which no key gives.
    search = Search(
        micro_batches=[config.train.micro_batch],
        accumulate=config.train.accumulate,
        replicas=config.shard.replicas or None,
        offloads=[NO_OFFLOAD] if device == "cpu" else [o for o in OFFLOADS if not folder_of(o.optimizer)],
        activations=[DEVICE] if device == "cpu" else [DEVICE, HOST],
    )
    return search.narrowed(base, {field.name for field in fields(Sharding) if f"shard.{field.name}" in named})


def sharding_of(shard: ShardConfig, device: str) -> Sharding:
    """Return `shard` as a plan models it: without parameters on disk, and without places for gradients."""
    offload_keys, inputs = shard.offload, Offload(activations=shard.offload.activations)
    params = HOST if offload_keys.params != DEVICE and offload_keys.optimizer != DEVICE else DEVICE
    offload = inputs if device == "cpu" else replace(inputs, params=params, optimizer=offload_keys.optimizer)
    precision = shard.precision or Precision(params=None if device == "cpu" else torch.bfloat16)
    values = {f.name: getattr(shard, f.name) for f in fields(Sharding)}
    return Sharding(**{**values, "precision": precision, "offload": offload})


def smaller_of(config: JobConfig, named: AbstractSet[str], space: Space) -> Space | None:
    """Return `space` with all smaller micro-batches that keep the global batch. Returns None if there are none, or if keys in
    `named` set the micro-batches."""
    size, samples = config.train.micro_batch, config.train.micro_batch * config.train.accumulate
    smaller = [n for n in range(1, size // 2 + 1) if size % n == 0]
    if not smaller or named & {"train.micro_batch", "train.accumulate"}:
        return None
    batch = samples * space.cluster.num_gpus
    return replace(space, search=replace(space.search, micro_batches=smaller, global_batch=batch))


def with_choice(config: Job, choice: Choice, named: AbstractSet[str]) -> Job:
    """Return `config` with the plan's choice. An offload that the user set (`named`) does not change."""
    excluded = {"precision", "offload"}
    shard = replace(
        config.shard, **{f.name: getattr(choice.sharding, f.name) for f in fields(Sharding) if f.name not in excluded}
    )
    if "shard.offload" not in named:
        shard = replace(shard, offload=choice.offload)
    train = replace(config.train, micro_batch=choice.micro_batch, accumulate=choice.accumulate)
    return replace(config, shard=shard, train=train)


def _subject(config: Config, micro_batch: int) -> Subject:
    """Return the training to trace. If examples are packed, its rows have two, with the mask that separates them."""
    model, data, where = config.model, config.data, config.model.path or config.model.preset
    subject = language_subject(
        configuration(model, data), where, micro_batch, data.seq_len, partial(trained_model, config)
    )
    if data.format == "text" or data.packing != "documents":
        return subject

    def loss_in_rows(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:  # tokens and labels, each (b, tokens)
        """Return the mean loss of tokens, with two examples in each row."""
        tokens, labels = batch
        half = torch.arange(tokens.shape[1], device=tokens.device) % max(1, tokens.shape[1] // 2)
        total, count = answer_losses(
            model, {"input_ids": tokens, "labels": labels, "position_ids": half.expand(tokens.shape).contiguous()}
        )
        return total / count

    return replace(subject, loss=loss_in_rows)


def card_of(device: str, num_ranks: int) -> Gpu:
    """Return the planner's description of this machine's GPU; for CPU ranks, one with guessed rates. Memory is that of the GPU,
    or the share of a CPU rank in the machine's memory."""
    if device == "cpu":
        return Gpu(
            name="cpu",
            memory_gib=memory_bytes() / GIB / num_ranks,
            tflops=0.1,
            fp32_tflops=0.1,
            bandwidth_gbps=10,
            link="memory",
            link_gbps=2,
            source="a guess",
        )
    card, memory = name_of(device), torch.accelerator.get_memory_info(0)[1] / GIB
    name = card.lower().replace(" ", "")
    known = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in name]
    if not known:
        raise UsageError(
            f"train.plan: the card {card!r} is not in the planner's table; describe it to `accordion plan` with "
            "--gpu, and pass its choice to train."
        )
    return replace(min(known, key=lambda gpu: abs(gpu.memory_gib - memory)), memory_gib=memory)


def comparison(expected: Expected, steps: Sequence[StepMetrics], device: str) -> str:
    """Return a line that compares planned and measured peak memory and step time. The first step's time does not count."""
    later = steps[1:] or steps
    peak, seconds = max(s.peak_bytes for s in steps), median(s.step_s for s in later)
    what = "allocated" if device != "cpu" else "resident, with Python and torch"
    low, high = expected.step_s
    return (
        f"plan: {expected.peak_bytes / GIB:.3g} GiB allocated, {low:.2g} to {high:.2g} s a step (uncalibrated); "
        f"measured: {peak / GIB:.3g} GiB {what}, {seconds:.2g} s"
    )
