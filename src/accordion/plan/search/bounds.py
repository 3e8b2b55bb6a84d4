"""Lower bounds on a configuration's memory and time, which rule it out before it is traced."""

from __future__ import annotations

from dataclasses import dataclass, replace

from accordion.config import DEVICE, FULL_SHARD, HOST, ActivationCheckpointing, Place
from accordion.plan.choice import NO_OFFLOAD, Choice
from accordion.plan.events import START, Collective, Enter, Log, Op, StepPhase, Streams
from accordion.plan.hardware import Cluster
from accordion.plan.replay.cost import Costs
from accordion.plan.replay.timeline import Step
from accordion.plan.search.space import Space

SCATTERS = ("scatter_sum", "exchange")
ROUNDING = 0.99  # factor on bounds by messages, since the padding of their sizes depends on the number of ranks
# Least share of a block's forward that is recomputed: torch stops at the last tensor that the backward needs, and so leaves out
# a block's last product.
RECOMPUTED = 0.7


def least_bytes(choice: Choice, space: Space) -> int:
    """Return a lower bound, in bytes, of the GPU memory of one rank in a step of `choice`: its shards and optimizer states
    unless they are offloaded, and full parameters if the strategy keeps them."""
    strategy = choice.strategy
    over = choice.gpus if strategy.optim_over_replicas else choice.shards
    if strategy.optim is Place.REPLICATE:
        over = choice.expert_parallel  # a lower bound: parameters that are no experts are whole on each rank
    stays = strategy.params is Place.REPLICATE or strategy.keep_until_backward
    copies = space.compute_bytes / choice.expert_parallel if stays and choice.gpus > 1 else 0
    if not choice.offload.is_any:
        return int(space.num_params * ((space.master_bytes + space.state_bytes) / over + copies))
    return int(space.num_params * (space.compute_bytes / over * (choice.offload.params == DEVICE) + copies))


def least_host_bytes(choice: Choice, space: Space) -> int:
    """Return a lower bound, in bytes, of the host memory of one machine that `choice` takes for offloaded parameters, gradients
    and optimizer states. `choice` must offload some of them."""
    over = choice.gpus if choice.strategy.optim_over_replicas else choice.shards
    # Parameters, gradients, and shards in the compute dtype unless parameters are stored in it.
    each: float = 2 * space.master_bytes + (space.compute_bytes if space.compute_bytes != space.master_bytes else 0)
    each += space.state_bytes if choice.offload.optimizer == HOST else 0
    return int(space.num_params / over * each * min(choice.gpus, space.cluster.node))


@dataclass(frozen=True, slots=True)
class Floor:
    """The memory and time of a FULL_SHARD step: lower bounds for all other strategies.

    Args:
        num_bytes: the most allocated bytes at any time.
        seconds: time of the step without waits for other streams.
        gathered, reduced: bytes of each all-gather in the forward of one micro-batch, and of each reduction in its backward.
            Other strategies reduce as many bytes, over their own mesh axes, and gather as many if they shard parameters.
        far: True if these gathers and reductions are between nodes.
        blocks_s: seconds of the repeated blocks' forwards, over all micro-batches.
        light_s: the part of `blocks_s` that is neither a matrix product nor attention.
    """

    num_bytes: int
    seconds: float
    gathered: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()
    far: bool = False
    blocks_s: float = 0.0
    light_s: float = 0.0

    def recomputing(self, how: ActivationCheckpointing) -> Floor:
        """Return a copy for a step with recomputation `how`: its time is longer by a lower bound of the recomputation, and
        `num_bytes` is 0 (no bound), since recomputation takes less memory."""
        again_s = self.light_s if how.selective else self.blocks_s / how.every
        return replace(self, num_bytes=0, seconds=self.seconds + RECOMPUTED * again_s)


def floor_of(log: Log, num_bytes: int, step: Step, choice: Choice, cluster: Cluster) -> Floor:
    """Return the `Floor` (lower bounds) of a FULL_SHARD step. `log`, `step`, `choice`: the events, time and configuration of
    the step. `num_bytes`: its peak of allocated bytes."""
    last = max((i for i, e in enumerate(log.events) if isinstance(e, Enter) and e.place == START), default=0)
    gathered: list[int] = []
    reduced: list[int] = []
    phase = StepPhase.FORWARD
    costs = Costs(cluster, "middle", choice.gpus, shards=choice.shards if choice.strategy.hybrid else None)
    blocks_s = light_s = 0.0
    is_block = False
    for event in log.events[last:]:
        if isinstance(event, Enter):
            phase = event.place.phase
            name = log.units[event.place.unit] if event.place.unit >= 0 else ""
            is_block = phase is StepPhase.FORWARD and any(map(str.isdecimal, name.split(".")))
        elif isinstance(event, Op):
            if is_block and event.stream == Streams.COMPUTE:
                blocks_s += costs.of(event)
                light_s += 0.0 if event.flops else costs.of(event)
        elif isinstance(event, Collective) and event.axis == "shard":
            if event.kind == "gather" and phase is StepPhase.FORWARD:
                gathered.append(event.num_bytes)
            elif event.kind in SCATTERS:
                reduced.append(event.num_bytes)
    return Floor(
        num_bytes,
        step.seconds - step.exposed_s,
        tuple(gathered),
        tuple(reduced),
        far=choice.shards > cluster.node,
        blocks_s=blocks_s * choice.accumulate,
        light_s=light_s * choice.accumulate,
    )


def messages_s(choice: Choice, floor: Floor, space: Space) -> float:
    """Return a lower bound of the seconds of a step of `choice`: the time of its gathers in forwards, or the time of its
    reductions, whichever is longer. `floor`: floor of the choice that `as_full_shard(choice)` returns."""
    strategy, cluster = choice.strategy, space.cluster
    costs = Costs(cluster, "middle", choice.gpus, shards=choice.shards if strategy.hybrid else None)

    def seconds(kind: str, sizes: tuple[int, ...], axis: str, share: float) -> float:
        return sum(costs.of_collective(Collective(kind, int(n * share), axis, kind)) for n in sizes)

    # In a node the engine may send gradients in the dtype of the computation and sum them itself.
    narrow = min(1.0, space.compute_bytes / 4)
    inside = choice.shards <= cluster.node
    reduces = seconds("scatter_sum", floor.reduced, "shard", narrow if floor.far and inside else 1.0)
    if strategy.hybrid:
        kind = "scatter_sum" if strategy.optim_over_replicas else "sum"
        reduces += seconds(kind, floor.reduced, "replicate", narrow / choice.shards)
    if strategy.grads is Place.SHARD and not choice.no_sync:
        reduces *= choice.accumulate
    gathers = 0.0
    if strategy.params is Place.SHARD:
        gathers = seconds("gather", floor.gathered, "shard", 1.0) * choice.accumulate
    return max(gathers, reduces) * ROUNDING


def as_full_shard(choice: Choice) -> Choice:
    """Return the FULL_SHARD choice whose memory and time are lower bounds for `choice`: a copy without replicas, without copies
    of units that groups of ranks keep, and with parameters and states on the device."""
    inputs = replace(NO_OFFLOAD, activations=choice.offload.activations)
    return replace(choice.but(strategy=FULL_SHARD, offload=inputs), replicas=1).keeping(0)
