"""`accordion train --plan auto`: what a plan says is taken, and at the end what was measured beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from accordion.config import DEVICE, DISK, HOST, Precision, strategy_named
from accordion.devices import name_of
from accordion.errors import UsageError
from accordion.plan.api import subject_of
from accordion.plan.hardware import GIB, GPUS, Cluster, Gpu
from accordion.plan.search.evaluate import Candidate
from accordion.plan.search.search import search
from accordion.plan.search.space import CHECKPOINTING, NO_OFFLOAD, OFFLOADS, ON_DISK, STRATEGIES, Choice, Space
from accordion.plan.trace.setup import Subject
from accordion.plan.trained_models import language_subject, unit_rules
from accordion.tasks.errors import of_the_task
from accordion.tasks.loaded import LoadedTask, example_of, mean_loss, model_of
from accordion.train.config import Config, Job, JobConfig
from accordion.train.instructions import answer_losses
from accordion.train.language_work import trained_model
from accordion.train.metrics import StepMetrics
from accordion.train.model import configuration
from accordion.units import AUTO, units_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the plan says of a rank: allocated bytes at the peak, and seconds of a step, from low to high."""

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
    """`config` with the fastest strategy, checkpointing and offload that fit; what `named` keys say stays. Raises `UsageError`.

    What a step sees is left alone, so that the maths are those that were asked for: where its micro-batches do not fit and nobody
    named them, they are cut smaller and accumulated. `task`: where text is not what is trained. Needs a process without a process
    group.
    """
    if config.train.plan == "none":
        return config, None
    cluster = Cluster(gpu=card_of(device, num_ranks), node=num_ranks, host_memory_gib=host_gib())
    if isinstance(config, Config):
        model = trained_model(config)
        subject_for = partial(_subject, config)
    else:
        assert task is not None, "a run without text has a task"
        with of_the_task("model()"):
            model = model_of(task)
        subject_for = partial(_subject_of_task, task, model)
    num_params = sum(p.numel() for p in model.parameters())
    space = space_of(config, named, num_ranks, device)
    if "shard.units" not in named:
        space = replace(space, units=[AUTO, *unit_rules(model)])
    best = search(subject_for, space, cluster, num_params).best
    cut = smaller_of(config, named, num_ranks, space)
    if best is None and cut is not None:
        best = search(subject_for, cut, cluster, num_params).best
    if best is None or best.memory is None or best.steps is None:
        seq = f" and seq_len {config.data.seq_len}" if isinstance(config, Config) else ""
        raise UsageError(
            f"train.plan: nothing fits {num_ranks} x {cluster.gpu.memory_gib:.0f} GiB with micro_batch "
            f"{config.train.micro_batch}{seq}; lower train.micro_batch, or ask `accordion plan`."
        )
    expected = _expected(best)
    say(f"plan: {expected.choice}")
    return with_choice(config, best.choice, space), expected


def space_of(config: JobConfig, named: AbstractSet[str], num_ranks: int, device: str) -> Space:
    """What is left to look for. On CPU ranks the host is the device: there is nowhere to offload to."""
    shard, places = config.shard, config.shard.offload
    offloads: Sequence[str] = [NO_OFFLOAD]
    if device != "cpu":
        offloads = [name for name in OFFLOADS if name != "disk"]  # which takes a folder that nobody named
        if "shard.offload" in named:
            offloads = [offload_named(places.params, places.optimizer)]
    return Space(
        strategies=[shard.strategy.name] if "shard.strategy" in named else STRATEGIES,
        checkpointing=[shard.checkpoint_activations] if "shard.checkpoint_activations" in named else CHECKPOINTING,
        micro_batches=[config.train.micro_batch],
        gpus=[num_ranks],
        accumulate=config.train.accumulate,
        replicas=shard.replicas,
        secondary=shard.secondary or 0 if named & {"shard.secondary", "shard.strategy"} else None,
        offloads=offloads,
        activations=_places(places.activations, named, device),
        precision=shard.precision or Precision(params=None if device == "cpu" else torch.bfloat16),
        tokens=config.data.seq_len if isinstance(config, Config) else 1,
        sharding={"units": shard.units},
        device="cpu" if device == "cpu" else "cuda",  # whose operators a trace knows, for any accelerator
    )


def _places(place: str, named: AbstractSet[str], device: str) -> Sequence[str]:
    """Where inputs of recomputed units may wait, as the space has it."""
    if "shard.offload" in named:
        return [ON_DISK if place.startswith(DISK) else place]
    return [DEVICE] if device == "cpu" else [DEVICE, HOST]  # a disk takes a folder that nobody named


def smaller_of(config: JobConfig, named: AbstractSet[str], num_ranks: int, space: Space) -> Space | None:
    """The same with smaller micro-batches and as much of them in a step; None where they were named or cannot be cut."""
    size, samples = config.train.micro_batch, config.train.micro_batch * config.train.accumulate
    cut = [n for n in range(size // 2, 0, -1) if size % n == 0]
    if not cut or named & {"train.micro_batch", "train.accumulate"}:
        return None
    return replace(space, micro_batches=sorted(cut), global_batch=samples * num_ranks)


def with_choice(config: Job, choice: Choice, space: Space) -> Job:
    """`config` that trains as the plan says. Places that were named, a folder on disk among them, are those of `config`."""
    shard = replace(
        config.shard,
        strategy=strategy_named(choice.strategy),
        secondary=choice.secondary,
        checkpoint_activations=choice.checkpoint_activations,
    )
    if choice.units != AUTO:
        shard = replace(shard, units=units_named(choice.units))
    if len(space.activations) > 1:
        shard = replace(shard, offload=replace(shard.offload, activations=choice.activations))
    if len(space.offloads) > 1:
        params, optimizer = OFFLOADS[choice.offload]
        shard = replace(shard, offload=replace(shard.offload, params=params, optimizer=optimizer))
    train = replace(config.train, micro_batch=choice.micro_batch, accumulate=choice.accumulate)
    return replace(config, shard=shard, train=train)


def offload_named(params: str, optimizer: str) -> str:
    """What a plan calls these places. With states on disk and parameters on the device it counts the states as the host's."""
    if optimizer == DEVICE:
        return NO_OFFLOAD
    if params == DEVICE:
        return "optimizer"
    return "disk" if optimizer.startswith(DISK) else "all"


def host_gib() -> float:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def _subject(config: Config, micro_batch: int) -> Subject:
    """Training on text; of examples in rows with the mask that keeps them apart; with adapters where there are some."""
    model, data, where = config.model, config.data, config.model.path or config.model.preset
    subject = language_subject(
        configuration(model, data), where, micro_batch, data.seq_len, partial(trained_model, config)
    )
    if data.format == "text" or data.packing != "documents":
        return subject
    return replace(subject, loss=loss_in_rows)


def loss_in_rows(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean loss of tokens and labels, each (b, tokens), two examples in each row."""
    tokens, labels = batch
    half = torch.arange(tokens.shape[1], device=tokens.device) % max(1, tokens.shape[1] // 2)
    total, count = answer_losses(
        model, {"input_ids": tokens, "labels": labels, "position_ids": half.expand(tokens.shape).contiguous()}
    )
    return total / count


def _subject_of_task(task: LoadedTask, model: nn.Module, micro_batch: int) -> Subject:
    with of_the_task("dataset('train')"):
        batch = example_of(task, micro_batch)
    return subject_of(model, partial(mean_loss, task), batch)


def _expected(best: Candidate) -> Expected:
    assert best.memory is not None
    assert best.steps is not None
    seconds = [step.seconds for step in best.steps.values()]
    return Expected(
        choice=_said(best.choice),
        peak_bytes=best.memory.peak.num_bytes,
        step_s=(min(seconds), max(seconds)),
    )


def _said(choice: Choice) -> str:
    parts = [choice.strategy, f"checkpoint_activations {choice.checkpoint_activations}"]
    parts += [f"secondary {choice.secondary}"] if choice.secondary else []
    parts += [f"offload {choice.offload}"] if choice.offload != NO_OFFLOAD else []
    parts += [f"offload_activations {choice.activations}"] if choice.activations != DEVICE else []
    parts += [f"units {choice.units}"] if choice.units != AUTO else []
    return ", ".join([*parts, f"micro_batch {choice.micro_batch}, accumulate {choice.accumulate}"])


def card_of(device: str, num_ranks: int) -> Gpu:
    """The card of this machine, with its own memory; of CPU ranks, a share of the machine, with rates of a guess."""
    if device == "cpu":
        memory = host_gib() / num_ranks
        return Gpu(
            name="cpu",
            memory_gib=memory,
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
            f"train.plan: the card {card!r} is not in the planner's table; choose with `accordion plan` and "
            "--gpu-memory-gib and its kin, and pass what it says to train."
        )
    return replace(min(known, key=lambda gpu: abs(gpu.memory_gib - memory)), memory_gib=memory)


def beside(expected: Expected, steps: Sequence[StepMetrics], device: str) -> str:
    """One line: the plan's peak and step time, and those measured. The first step makes optimizer state, and is left out."""
    later = steps[1:] or steps
    peak, seconds = max(s.peak_bytes for s in steps), median(s.step_s for s in later)
    what = "allocated" if device != "cpu" else "resident, with Python and torch"
    low, high = expected.step_s
    return (
        f"plan: {expected.peak_bytes / GIB:.3g} GiB allocated, {low:.2g} to {high:.2g} s a step (uncalibrated); "
        f"measured: {peak / GIB:.3g} GiB {what}, {seconds:.2g} s"
    )
