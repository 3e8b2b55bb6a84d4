"""Calibration: scale the assumed rates so that the planned time of one configuration is its measured time."""

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
    """Return (`space` with its cluster calibrated by the measured step, description of that step; empty without one). Raises
    `UsageError` if the step is shorter than at the peaks of the GPU and its links."""
    # One time tells nothing about messages that nothing waited for. So the time of kernels is scaled, once for each of the low,
    # middle and high rates; that of messages only if kernels alone would have to exceed the GPU's peaks. The range that the
    # three rates then give for another configuration is the uncertainty that one measured step leaves.
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
            f"measured_step_s is {measured_s:g}, but {choice} takes {least:.3g} s even at the peaks of {cluster.gpu.name} and "
            "its links; check the time, the configuration that was measured (measured_at), and the GPU."
        )
    scales = {rate: _scale(partial(seconds, rate), _peaks(cluster.gpu, rate), measured_s) for rate in REACHED}
    return replace(space, cluster=replace(cluster, scales=scales)), f"{measured_s:g} s of {choice}"


def _choice_of(text: str, space: Space) -> Choice:
    """Return the configuration of `text`: strategy, checkpointing, micro-batch, GPUs, as "full_shard,selective,2,8"."""
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
    """Return the only configuration of the space. Raises `UsageError` if there are several."""
    choices = [choice for choice in space.choices() if choice.gpus == space.cluster.num_gpus]
    if len(choices) > 1:
        raise UsageError(
            "measured_step_s is the time of one configuration, but this plan looks through several; name the measured one with "
            "measured_at (strategy,checkpointing,micro-batch,GPUs), or fix strategy, checkpoint_activations and micro_batch."
        )
    return choices[0]


def _peaks(gpu: Gpu, rate: str) -> Scale:
    """Return the factors on times at which kernels reach the GPU's peaks, and messages those of the links."""
    rates = REACHED[rate]
    kernels = rates.kernels(gpu) * max(gpu.products, gpu.elementwise, gpu.attention)
    return Scale(kernels=kernels, messages=max(rates.link, rates.network))


def _scale(seconds: Callable[[Scale], float], peaks: Scale, wanted_s: float) -> Scale:
    """Return the factors `scale` with `seconds(scale) == wanted_s`. Messages are scaled only if kernels would exceed `peaks`."""
    if seconds(Scale(kernels=peaks.kernels)) <= wanted_s:
        return Scale(kernels=_root(lambda k: seconds(Scale(kernels=k)) - wanted_s, peaks.kernels))
    if seconds(Scale(messages=peaks.messages)) <= wanted_s:
        return Scale(messages=_root(lambda m: seconds(Scale(messages=m)) - wanted_s, peaks.messages))
    messages = peaks.messages  # beyond both peaks: scale kernels again, which also covers a host assumed too slow
    kernels = _root(lambda k: seconds(Scale(kernels=k, messages=messages)) - wanted_s, 1e-3)
    return Scale(kernels=kernels, messages=messages)


def _root(excess: Callable[[float], float], low: float) -> float:
    """Return the root of the increasing function `excess`, which is <= 0 at `low`, to 0.01 % (regula falsi, Illinois)."""
    high, below = 2 * low, excess(low)
    while (above := excess(high)) < 0:
        high *= 2
    for _ in range(60):
        middle = (low * above - high * below) / (above - below) if above != below else low
        value = excess(middle)
        if value <= 0:
            moved = middle - low
            low, below, above = middle, value, above / 2
        else:
            moved = high - middle
            high, above, below = middle, value, below / 2
        if value == 0 or abs(moved) < 1e-9 * middle or high - low < 1e-4 * low:
            break
    return middle
