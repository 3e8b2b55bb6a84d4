"""One configuration as plain data (`Choice`), and the values that a plan tries (`Search`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accordion.config import (
    DEVICE,
    DISK,
    HOST,
    Offload,
    Place,
    Strategy,
    checkpointing_named,
    folder_of,
    strategy_named,
)
from accordion.errors import UsageError
from accordion.plan.hardware import LARGEST
from accordion.sharding import Sharding, offload_named, offload_words, unit_words

ON_DISK = f"{DISK}FOLDER"  # a disk in a folder that is not chosen yet; a plan prints it like this
STRATEGIES = tuple(
    map(
        strategy_named, ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_optim", "shard_optim", "no_shard")
    )
)
CHECKPOINTING = ("none", "selective", "every:2", "full")
MICRO_BATCHES = (1, 2, 4, 8)
NO_OFFLOAD = Offload()
OFFLOADS = tuple(
    map(offload_named, ("none", "optimizer=host", "params=host,optimizer=host", f"params=host,optimizer={ON_DISK}"))
)
ACTIVATIONS = (DEVICE, HOST, ON_DISK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One configuration of a training step.

    Args:
        sharding: the arguments of `accordion.shard`.
        micro_batch: samples of one rank in one forward.
        gpus: number of ranks.
        accumulate: micro-batches per step.
        replicas: copies of the model under a hybrid strategy, otherwise 1.
        no_sync: True if gradients are reduced in the last micro-batch of a step only.
        expert_parallel: number of neighbouring ranks that share the experts of a mixture; 1: each rank has all of them.
        sequence: number of neighbouring ranks that share each sequence; 1: each rank has whole sequences.
    """

    sharding: Sharding
    micro_batch: int
    gpus: int
    accumulate: int = 1
    replicas: int = 1
    no_sync: bool = False
    expert_parallel: int = 1
    sequence: int = 1

    def __hash__(self) -> int:  # a sharding may hold mappings, which have no hash
        return hash((self.strategy.name, self.checkpointing, self.micro_batch, self.gpus, self.replicas))

    def __str__(self) -> str:
        offload, copies = self.offload, self.sharding.kept_over
        parts = [self.strategy.name + (f" x {self.replicas} replicas" if self.replicas > 1 else "")]
        parts += [f"copies kept over {copies}"] if copies else []
        parts += [f"experts over {self.expert_parallel}"] if self.expert_parallel > 1 else []
        parts += [f"sequences over {self.sequence}"] if self.sequence > 1 else []
        inputs = "disk" if folder_of(offload.activations) else offload.activations
        inputs = f" with inputs on the {inputs}" if inputs != DEVICE else ""
        parts += [f"checkpointing {self.checkpointing}{inputs}", f"micro-batch {self.micro_batch}"]
        unreduced = " without reducing" if self.no_sync else ""
        parts += [f"accumulate {self.accumulate}{unreduced}"] if self.accumulate > 1 else []
        parts += [f"offload {offload_words(replace(offload, activations=DEVICE))}"] if offload.is_any else []
        parts += [f"units {unit_words(self.sharding.units)}"] if self.sharding.units is not None else []
        return ", ".join([*parts, f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"])

    @property
    def strategy(self) -> Strategy:
        return self.sharding.strategy

    @property
    def checkpointing(self) -> str:
        return self.sharding.checkpoint_activations

    @property
    def offload(self) -> Offload:
        return self.sharding.offload

    @property
    def samples(self) -> float:
        """Number of samples of one rank in a step. A sample that `sequence` ranks share counts as 1 / `sequence`."""
        return self.micro_batch * self.accumulate / self.sequence

    @property
    def num_traced(self) -> int:
        """Number of micro-batches to trace, up to `accumulate`: the first, one later one, and the last if it alone reduces."""
        return min(self.accumulate, 2 if self.each_reduces else 3)

    @property
    def each_reduces(self) -> bool:
        """True if every micro-batch reduces its gradients, False if the last one reduces the sum."""
        return self.strategy.grads is Place.SHARD and not self.no_sync

    @property
    def shards(self) -> int:
        """Number of ranks over which the strategy shards: all, or under a hybrid strategy those of one replica."""
        return self.gpus // self.replicas

    def but(self, **fields: Any) -> Choice:
        """Return a copy of this choice in which `fields` of its sharding have new values, for example `strategy=FULL_SHARD`."""
        return replace(self, sharding=replace(self.sharding, **fields))

    def keeping(self, ranks: int) -> Choice:
        """Return a copy with `secondary` set to `ranks`: each group of `ranks` neighbouring ranks keeps one copy of a unit's
        full parameters from its forward to its backward. `secondary` is None instead if the strategy keeps copies of its own,
        or if `ranks` is not between 1 and the number of shards (both excluded) or does not divide that number."""
        s = self.strategy
        has_copies = s.params is Place.REPLICATE or s.keep_until_backward or s.optim_over_replicas
        gains = not has_copies and 1 < ranks < self.shards and self.shards % ranks == 0
        return self.but(secondary=ranks if gains else None)


def traced_as(choice: Choice) -> Choice:
    """Return the choice to trace for a log of `choice` with parameters and states on the device. It is that of `moved_as`, but
    offloads only the inputs of recomputed units. So choices that differ only in other offload share a trace."""
    return moved_as(choice.but(offload=Offload(activations=choice.offload.activations)))


def moved_as(choice: Choice) -> Choice:
    """Return the choice to trace for a log of `choice` with its offload: a copy with `num_traced` micro-batches, and with the
    host in place of a disk. A trace has no files, and the device's memory and work are equal for both."""
    on_host: dict[str, Any] = {k: HOST for k in ("optimizer", "activations") if folder_of(getattr(choice.offload, k))}
    return replace(choice.but(offload=replace(choice.offload, **on_host)), accumulate=choice.num_traced)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The values that a plan tries for fields that the caller does not fix. Raises `UsageError` for wrong values.

    Args:
        strategies: strategies, or their names.
        checkpointing: values of `Sharding.checkpoint_activations`.
        micro_batches: samples of one rank in one forward.
        offloads: placements of parameters and states, or texts that describe them, tried in order until one fits; those that
            bounds rule out are skipped. Parameters can be offloaded to the host only, and only with the optimizer states.
        activations: placements of the inputs of recomputed units; all but the first are tried only if nothing fits.
        replicas: copies of the model under a hybrid strategy. None: try those that shard each copy over one, two or four nodes.
        copies: also try the fastest configurations with `Sharding.secondary` set to the number of ranks of a node.
        accumulate: micro-batches per step.
        global_batch: samples per step over all GPUs; replaces `accumulate`.
        no_sync: reduce gradients in the last micro-batch of a step only.
        expert_parallel: number of neighbouring ranks that share the experts of a mixture; each expert gets equally many tokens.
        sequence: number of neighbouring ranks that share each sequence of a model of transformers. None: if nothing fits, try
            powers of two until something fits.
    """

    strategies: Sequence[Strategy] = STRATEGIES
    checkpointing: Sequence[str] = CHECKPOINTING
    micro_batches: Sequence[int] = MICRO_BATCHES
    offloads: Sequence[Offload] = OFFLOADS
    activations: Sequence[str] = ACTIVATIONS
    replicas: int | None = None
    copies: bool = True
    accumulate: int = 1
    global_batch: int | None = None
    no_sync: bool = False
    expert_parallel: int = 1
    sequence: int | None = None

    def __post_init__(self) -> None:
        unparsed: Any = self
        object.__setattr__(self, "strategies", tuple(map(strategy_named, unparsed.strategies)))
        parsed = tuple(offload_named(o) if isinstance(o, str) else o for o in unparsed.offloads)
        object.__setattr__(self, "offloads", parsed)
        for way in self.checkpointing:
            checkpointing_named(way)
        names = ("accumulate", "expert_parallel", "sequence", "replicas", "global_batch")
        numbers = [("micro_batch", n) for n in self.micro_batches] + [(name, getattr(self, name)) for name in names]
        for name, value in numbers:
            if value is not None and not 1 <= value <= LARGEST:
                raise UsageError(f"{name} is {value}; it takes 1 or more{f', up to {LARGEST:,}' if value > 1 else ''}.")
        if self.no_sync and self.accumulate == 1 and self.global_batch is None:
            raise UsageError("no_sync is for micro-batches of one step; give accumulate, 2 or more, or a global_batch.")
        for offload in self.offloads:
            planned = Offload(params=offload.params, optimizer=offload.optimizer, activations=offload.activations)
            params_alone = offload.params != DEVICE and offload.optimizer == DEVICE
            if offload != planned or folder_of(offload.params) or params_alone:
                raise UsageError(
                    f"offload {offload_words(offload)!r} is not planned; take optimizer=host or optimizer=disk:/folder, with or "
                    "without params=host, and activations= at any place."
                )

    def narrowed(self, sharding: Sharding, fixed: Collection[str]) -> Search:
        """Return a copy that tries fewer values. If `fixed` names the strategy, checkpointing or offload (as fields of
        `Sharding`), the copy tries only the value in `sharding` for it. The copy never offloads states with `no_sync`, or
        inputs of recomputed units if checkpointing is fixed to "none". It has no `copies` if the strategy or `secondary` is
        fixed, or if experts are shared. Raises `UsageError` if values contradict each other."""
        narrow: dict[str, Any] = {}
        if "strategy" in fixed:
            narrow |= {"strategies": [sharding.strategy], "copies": False}
            self._check_strategy(sharding)
        if "checkpoint_activations" in fixed:
            narrow["checkpointing"] = [sharding.checkpoint_activations]
        if "offload" in fixed:
            offload = sharding.offload
            if offload.activations != DEVICE and narrow.get("checkpointing") == ["none"]:
                raise UsageError(
                    f"offload {offload_words(offload)!r} moves the inputs of recomputed units off the device, but "
                    "checkpoint_activations is 'none'; take full, selective or every:2, or leave one of them out."
                )
            narrow |= {"offloads": [replace(offload, activations=DEVICE)], "activations": [offload.activations]}
        elif narrow.get("checkpointing") == ["none"]:
            narrow["activations"] = [DEVICE]
        if self.no_sync:
            if sharding.offload.is_any:
                raise UsageError(
                    f"no_sync keeps full gradients on the device; leave offload {offload_words(sharding.offload)!r} out."
                )
            narrow["offloads"] = [NO_OFFLOAD]
        if "secondary" in fixed or self.expert_parallel > 1:
            narrow["copies"] = False
        return replace(self, **narrow)

    def _check_strategy(self, sharding: Sharding) -> None:
        s, offload = sharding.strategy, sharding.offload
        if self.replicas is not None and not s.hybrid:
            raise UsageError(
                f"replicas is {self.replicas}, but strategy {s.name!r} has no replicas; take hybrid_shard, or leave it out."
            )
        if offload.is_any and s.grads is not Place.SHARD:
            raise UsageError(
                f"offload {offload_words(offload)!r} cannot be planned with strategy {s.name!r}, which does not shard gradients; "
                "take full_shard."
            )
