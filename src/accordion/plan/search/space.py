"""The configurations that a search looks through: one choice as plain data, and all that are left by what is fixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from accordion.config import DEVICE, DISK, HOST, NO_SHARD, Offload, Place, Precision, strategy_named
from accordion.errors import UsageError, nearest
from accordion.plan.hardware import Cluster
from accordion.plan.trace.optimizers import OPTIMIZERS
from accordion.plan.trace.setup import TrainingSetup
from accordion.plan.trained_models import Kernels
from accordion.units import AUTO, only_blocks, units_named

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_optim", "shard_optim", "no_shard")
CHECKPOINTING = ("none", "selective", "every:2", "full")
MICRO_BATCHES = (1, 2, 4, 8)
LARGEST_GPUS = 1 << 16  # a trace knows each rank of its world by number
NO_OFFLOAD = "none"
OFFLOADS: Mapping[str, tuple[str, str]] = {  # where parameters rest, and the optimizer
    NO_OFFLOAD: (DEVICE, DEVICE),
    "optimizer": (DEVICE, HOST),
    "all": (HOST, HOST),
    "disk": (HOST, DISK),
}
ON_DISK = "disk"
ACTIVATIONS = (DEVICE, HOST, ON_DISK)
"""Where the inputs of recomputed units wait for their recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One configuration. `accumulate`: micro-batches of a step. `replicas`: of a hybrid, or 1. `offload`: of OFFLOADS.
    `secondary`: what `shard` takes under that name; 0: nothing. `no_sync`: micro-batches but the last reduce nothing.
    `activations`: of ACTIVATIONS. `expert_parallel`: ranks that share the experts of a mixture; 1: each has all.
    `units`: "auto" is what the space says of them, else a rule such as "min_params:1000000".
    """

    strategy: str
    checkpoint_activations: str
    micro_batch: int
    gpus: int
    accumulate: int = 1
    replicas: int = 1
    offload: str = NO_OFFLOAD
    units: str = AUTO
    secondary: int = 0
    no_sync: bool = False
    activations: str = DEVICE
    expert_parallel: int = 1

    def __str__(self) -> str:
        parts = [self.strategy + (f" x {self.replicas} replicas" if self.replicas > 1 else "")]
        parts += [f"secondary shards over {self.secondary}"] if self.secondary else []
        parts += [f"experts over {self.expert_parallel}"] if self.expert_parallel > 1 else []
        inputs = f" with inputs on the {self.activations}" if self.activations != DEVICE else ""
        parts += [f"checkpointing {self.checkpoint_activations}{inputs}", f"micro-batch {self.micro_batch}"]
        apart = " without reducing" if self.no_sync else ""
        parts += [f"accumulate {self.accumulate}{apart}"] if self.accumulate > 1 else []
        parts += [f"offload {self.offload}"] if self.offload != NO_OFFLOAD else []
        parts += [f"units {self.units}"] if self.units != AUTO else []
        return ", ".join([*parts, f"{self.gpus} GPUs"])

    @property
    def num_traced(self) -> int:
        """Micro-batches that are traced: all others are like the second, which is like the last where each one reduces."""
        each_reduces = strategy_named(self.strategy).grads is Place.SHARD and not self.no_sync
        return min(self.accumulate, 2 if each_reduces else 3)

    @property
    def shards(self) -> int:
        """Ranks over which parameters are cut."""
        return self.gpus // self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is looked through: every combination. `tokens`: of one sample; `sharding`: more keyword arguments of `shard`.

    `global_batch`: samples of a step over all GPUs, from which `accumulate` follows then. `replicas`: 0 looks for it. `offloads`:
    in the order in which they are tried, each where the one before does not fit. `units`: the first one everywhere, the others
    beside what is fastest. `activations`: the first one everywhere, the others beside what comes closest where nothing fits.
    `secondary`: wherever it can be had; None tries the ranks of a node beside what is fastest.
    """

    strategies: Sequence[str] = STRATEGIES
    checkpointing: Sequence[str] = CHECKPOINTING
    micro_batches: Sequence[int] = MICRO_BATCHES
    gpus: Sequence[int] = (8,)
    accumulate: int = 1
    no_sync: bool = False
    global_batch: int | None = None
    replicas: int = 0
    offloads: Sequence[str] = tuple(OFFLOADS)
    activations: Sequence[str] = (DEVICE,)
    expert_parallel: int = 1
    units: Sequence[str] = (AUTO,)
    secondary: int | None = 0
    optimizer: str = "adamw"
    engine: str = "accordion"
    precision: Precision = field(default_factory=Precision)
    kernels: Kernels = field(default_factory=Kernels)
    tokens: int = 1
    device: Literal["cuda", "cpu"] = "cuda"
    sharding: Mapping[str, Any] = field(default_factory=dict)

    def run_of(self, choice: Choice, cluster: Cluster) -> TrainingSetup:
        """What is traced for a choice: no more micro-batches than differ, and what is on any tier on the host."""
        sharding = {
            **self.sharding,
            "precision": self.precision,
            "strategy": strategy_named(choice.strategy),
            "checkpoint_activations": choice.checkpoint_activations,
        }
        if choice.secondary:
            sharding["secondary"] = choice.secondary
        if choice.units != AUTO:
            sharding["units"] = units_named(choice.units)
        elif self.engine == "fsdp2":
            sharding.setdefault("units", only_blocks())  # as programs write it
        if choice.offload != NO_OFFLOAD or choice.activations != DEVICE:
            sharding["offload"] = _offload_of(choice)
        return TrainingSetup(
            engine=self.engine,
            ranks=choice.gpus,
            node=cluster.node,
            replicas=choice.replicas,
            expert_parallel=choice.expert_parallel,
            accumulate=choice.num_traced,
            no_sync=choice.no_sync,
            optimizer=self.optimizer,
            sharding=sharding,
            device=self.device,
        )

    @property
    def compute_bytes(self) -> int:
        """Of an element in the dtype of the computation."""
        return self.precision.params.itemsize if self.precision.params is not None else 4

    @property
    def master_bytes(self) -> float:
        """Of an element that is trained, and of the optimizer's states of it."""
        return 4 * self.master_share + self.state_bytes

    @property
    def master_share(self) -> float:
        """Of float32, in the dtype of what is stepped."""
        return 0.5 if self.kernels.pure else 1.0

    @property
    def state_bytes(self) -> float:
        """Of the optimizer's states of an element, at least; in the dtype of what is stepped."""
        return OPTIMIZERS[self.optimizer].state_bytes * self.master_share

    @property
    def divided_gpus(self) -> Sequence[int]:
        """Those of `gpus` that ranks which share experts divide."""
        return [n for n in self.gpus if n % self.expert_parallel == 0]

    def tiers_of(self, choice: Choice) -> Sequence[str]:
        """The offloads to try for a choice. In a search offload goes with what keeps no full copies."""
        strategy = strategy_named(choice.strategy)
        if len(self.offloads) == 1:
            return self.offloads
        searched = strategy.grads is Place.SHARD and not strategy.keep_until_backward
        return self.offloads if searched else self.offloads[:1]


def _offload_of(choice: Choice) -> Offload:
    """In memory alone: a trace has no files."""
    away = choice.offload != NO_OFFLOAD
    return Offload(
        params=OFFLOADS[choice.offload][0],
        optimizer=HOST if away else DEVICE,
        activations=DEVICE if choice.activations == DEVICE else HOST,
    )


def choices(space: Space, cluster: Cluster) -> list[Choice]:
    """Every choice, without offload. Raises `UsageError` where what is fixed leaves none."""
    found = list(_choices(space, cluster))
    if found:
        return found
    batch = (
        f", or a --global-batch that GPUs x micro-batch divide, not {space.global_batch}" if space.global_batch else ""
    )
    hybrid = "hybrid strategies need more than one node"
    if space.replicas:
        hybrid = f"{space.replicas} replicas of a hybrid strategy must be more than one, fewer than the GPUs, and divide them"
    raise UsageError(
        f"no configuration is left to try: strategies {', '.join(space.strategies)} on {', '.join(map(str, space.gpus))} "
        f"GPUs, micro-batches {', '.join(map(str, space.micro_batches))}; {hybrid}, or take another --strategy{batch}."
    )


def _choices(space: Space, cluster: Cluster) -> Iterator[Choice]:
    for gpus in space.divided_gpus:
        for name in space.strategies:
            if gpus == 1 and name not in (NO_SHARD.name, space.strategies[0]):
                continue
            for replicas in _replicas(space, strategy_named(name).hybrid, gpus, cluster.node):
                for checkpointing in space.checkpointing:
                    if checkpointing == "none" and space.activations[0] != DEVICE:
                        continue
                    for micro_batch in space.micro_batches:
                        accumulate = _accumulate(space, micro_batch, gpus)
                        if accumulate:
                            choice = Choice(
                                strategy=name, checkpoint_activations=checkpointing, micro_batch=micro_batch,
                                gpus=gpus, accumulate=accumulate, replicas=replicas, no_sync=space.no_sync,
                                activations=space.activations[0], expert_parallel=space.expert_parallel,
                            )  # fmt: skip
                            yield with_secondary(choice, space.secondary or 0) or choice


def with_secondary(choice: Choice, ranks: int) -> Choice | None:
    """The choice with secondary shards over so many ranks; None where these are no part of those that shard, or no gain."""
    strategy = strategy_named(choice.strategy)
    copies = strategy.params is Place.REPLICATE or strategy.keep_until_backward or strategy.optim_over_replicas
    if copies or not 1 < ranks < choice.shards or choice.shards % ranks:
        return None
    return replace(choice, secondary=ranks)


def _replicas(space: Space, hybrid: bool, gpus: int, node: int) -> Sequence[int]:
    """Numbers of replicas to try: shards over one node, two, and four."""
    if not hybrid:
        return [1]
    if space.replicas:
        return [space.replicas] if gpus % space.replicas == 0 and gpus > space.replicas > 1 else []
    return [gpus // size for size in (node, 2 * node, 4 * node) if size < gpus and gpus % size == 0]


def _accumulate(space: Space, micro_batch: int, ranks: int) -> int:
    """Micro-batches of a step; 0 where the global batch is no multiple."""
    if space.global_batch is None:
        return space.accumulate
    return 0 if space.global_batch % (ranks * micro_batch) else space.global_batch // (ranks * micro_batch)


def check_activations(activations: str, checkpointing: str | None) -> None:
    """Raises `UsageError`."""
    if activations not in ACTIVATIONS:
        raise UsageError(f"offload_activations {activations!r} is no place; {nearest(activations, list(ACTIVATIONS))}")
    if activations != DEVICE and checkpointing == "none":
        raise UsageError(
            f"offload_activations is {activations!r}, which takes the inputs of recomputed units off the device, and "
            "checkpoint_activations is 'none'; take full, selective or every:2, or leave one of them out."
        )


def check_offload(offload: str, strategy: str | None) -> None:
    """Raises `UsageError`."""
    if offload not in OFFLOADS:
        raise UsageError(f"offload {offload!r} does not exist; {nearest(offload, OFFLOADS)}")
    if offload != NO_OFFLOAD and strategy is not None and strategy_named(strategy).grads is not Place.SHARD:
        raise UsageError(
            f"offload {offload!r} with strategy {strategy!r} is not planned: gradients are whole on each rank; take full_shard."
        )
