"""One measured step, and what it says of every other: each assumed rate is scaled until it gives the measured time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from accordion.config import DEVICE, Offload, strategy_named
from accordion.errors import UsageError
from accordion.plan.choice import Choice
from accordion.plan.hardware import REACHED, Gpu, Scale
from accordion.plan.replay.predict import log_of, step_of_choice
from accordion.plan.search.space import Space
from accordion.plan.trace.setup import with_copies


def calibrated(space: Space) -> tuple[Space, str]:
    """Return the space with a cluster at the speed of its measured step, and what was measured, in words.

    One time says nothing of messages that nothing waited for. So kernels are scaled, once for each of the assumed rates of
    links; messages only if kernels alone would have to be faster than the card's peaks. What the low, middle and high rates
    then say of another configuration differs by as much as one measured step leaves open. Raises `UsageError` if no rates up
    to the peaks give so short a step.
    """
    cluster, measured_s = space.cluster, space.cluster.measured_step_s
    if measured_s is None:
        return space, ""
    if not 0 < measured_s < 1e6:
        raise UsageError(f"measured_step_s is {measured_s:g}; it takes the seconds of a step, a positive number.")
    choice = _choice_of(cluster.measured_at, space) if cluster.measured_at else _only_choice(space)
    run = space.setup(choice)
    log, _ = log_of(space.subject_for(choice.micro_batch), run)

    def seconds(rate: str, scale: Scale) -> float:
        return step_of_choice(log, run, choice, replace(cluster, scales={rate: scale}), rate).seconds

    least = min(seconds(rate, _peaks(cluster.gpu, rate)) for rate in REACHED)
    if least > measured_s:
        raise UsageError(
            f"measured_step_s is {measured_s:g}, and {choice} takes {least:.3g} s at the peaks of {cluster.gpu.name} and of its "
            "links; check the time, what it was measured of (measured_at), and the card."
        )
    scales = {rate: _scale(partial(seconds, rate), _peaks(cluster.gpu, rate), measured_s) for rate in REACHED}
    return replace(space, cluster=replace(cluster, scales=scales)), f"{measured_s:g} s of {choice}"


def _choice_of(text: str, space: Space) -> Choice:
    """The configuration that `text` names, as "full_shard,selective,2,8": strategy, checkpointing, micro-batch, GPUs."""
    words = [word.strip() for word in text.split(",")]
    if len(words) != 4 or not all(word.isdecimal() and int(word) for word in words[2:]):
        raise UsageError(
            f"measured_at {text!r} is not understood; name the measured configuration as "
            "strategy,checkpointing,micro-batch,GPUs, such as full_shard,selective,2,8."
        )
    search, gpus, strategy = space.search, int(words[3]), strategy_named(words[0])
    inputs = Offload(activations=DEVICE if words[1] == "none" else search.activations[0])
    sharding = replace(space.sharding, strategy=strategy, checkpoint_activations=words[1], offload=inputs)
    return Choice(
        sharding=with_copies(sharding, 0),
        micro_batch=int(words[2]),
        gpus=gpus,
        accumulate=search.accumulate,
        replicas=max(1, gpus // space.cluster.node) if strategy.hybrid else 1,
        no_sync=search.no_sync,
        expert_parallel=search.expert_parallel,
    )


def _only_choice(space: Space) -> Choice:
    """The configuration that a plan is of, if it leaves nothing open. Raises `UsageError`."""
    choices = [choice for choice in space.choices() if choice.gpus == space.cluster.num_gpus]
    if len(choices) > 1:
        raise UsageError(
            "measured_step_s is the time of one configuration, and this plan looks through several; say with measured_at which "
            "it was (strategy,checkpointing,micro-batch,GPUs), or fix strategy, checkpoint_activations and micro_batch."
        )
    return choices[0]


def _peaks(gpu: Gpu, rate: str) -> Scale:
    """At which kernels reach the card's peaks, and messages those of the links."""
    rates = REACHED[rate]
    kernels = rates.kernels(gpu) * max(gpu.products, gpu.elementwise, gpu.attention)
    return Scale(kernels=kernels, messages=max(rates.link, rates.network))


def _scale(seconds: Callable[[Scale], float], peaks: Scale, wanted_s: float) -> Scale:
    """The scale with a step of `wanted_s`. `seconds`: of a step, by scale. `peaks`: beyond which messages are scaled first."""
    if seconds(Scale(kernels=peaks.kernels)) <= wanted_s:
        return Scale(kernels=_root(lambda k: seconds(Scale(kernels=k)) - wanted_s, peaks.kernels))
    if seconds(Scale(messages=peaks.messages)) <= wanted_s:
        return Scale(messages=_root(lambda m: seconds(Scale(messages=m)) - wanted_s, peaks.messages))
    messages = peaks.messages  # a host that was assumed too slow for this goes with the kernels
    kernels = _root(lambda k: seconds(Scale(kernels=k, messages=messages)) - wanted_s, 1e-3)
    return Scale(kernels=kernels, messages=messages)


def _root(excess: Callable[[float], float], low: float) -> float:
    """Where a growing function that is not positive at `low` is 0, to 0.01 %: by the line through both ends (Illinois)."""
    high, below = 2 * low, excess(low)
    while (above := excess(high)) < 0:
        high *= 2
    for _ in range(60):
        middle = (low * above - high * below) / (above - below) if above != below else low
        found = excess(middle)
        if found <= 0:
            moved = middle - low
            low, below, above = middle, found, above / 2
        else:
            moved = high - middle
            high, above, below = middle, found, below / 2
        if found == 0 or abs(moved) < 1e-9 * middle or high - low < 1e-4 * low:
            break
    return middle
