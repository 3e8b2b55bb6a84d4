"""One measured step, and what it says of every other: each assumed rate is scaled until it gives the measured time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from accordion.config import checkpointing_named, strategy_named
from accordion.errors import UsageError
from accordion.plan.extrapolate.accumulate import step_of_choice
from accordion.plan.hardware import REACHED, Cluster
from accordion.plan.replay.predict import log_of
from accordion.plan.search.space import Choice, Space, choices
from accordion.plan.trace.setup import Subject


def choice_of(text: str) -> Choice:
    """The configuration that `text` names, as "full_shard,selective,2,8": strategy, checkpointing, micro-batch, GPUs."""
    words = [word.strip() for word in text.split(",")]
    if len(words) != 4 or not all(word.isdecimal() and int(word) for word in words[2:]):
        raise UsageError(
            f"measured_at {text!r} is not understood; name the measured configuration as "
            "strategy,checkpointing,micro-batch,GPUs, such as full_shard,selective,2,8."
        )
    strategy_named(words[0])
    checkpointing_named(words[1])
    return Choice(strategy=words[0], checkpoint_activations=words[1], micro_batch=int(words[2]), gpus=int(words[3]))


def only_choice(space: Space, cluster: Cluster) -> Choice:
    """The configuration that a plan is of, where it leaves nothing open. Raises `UsageError`."""
    found = [choice for choice in choices(space, cluster) if choice.gpus == max(space.gpus)]
    if len(found) > 1:
        raise UsageError(
            "measured_step_s is the time of one configuration, and this plan looks through several; say with measured_at which "
            "it was (strategy,checkpointing,micro-batch,GPUs), or fix strategy, checkpoint_activations and micro_batch."
        )
    return found[0]


def calibrated(
    cluster: Cluster, subject_for: Callable[[int], Subject], space: Space, choice: Choice, measured_s: float
) -> Cluster:
    """`cluster` with the scales at which each of its assumed rates gives `measured_s` for a step of `choice`.

    Kernels and collectives are scaled alike. What the low, middle and high rates then say of another configuration differs by
    as much as its mixture of work does, which is what one measured step leaves open.
    """
    if not 0 < measured_s < 1e6:
        raise UsageError(f"measured_step_s is {measured_s:g}; it takes the seconds of a step, a positive number.")
    if strategy_named(choice.strategy).hybrid and choice.replicas == 1:
        choice = replace(choice, replicas=max(1, choice.gpus // cluster.node))
    choice = replace(choice, accumulate=max(choice.accumulate, space.accumulate))
    run = space.run_of(choice, cluster)
    log, _ = log_of(subject_for(choice.micro_batch), run)
    plain = replace(cluster, scales={})
    scales = {name: measured_s / step_of_choice(log, run, choice, plain, name).seconds for name in REACHED}
    return replace(cluster, scales=scales)
