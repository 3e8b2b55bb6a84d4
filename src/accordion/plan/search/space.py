"""`Space`: the workload, the GPUs, and all configurations that a plan tries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from accordion.config import DEVICE, Offload, Place, Precision
from accordion.errors import UsageError
from accordion.plan.choice import Choice, Search, moved_as
from accordion.plan.hardware import Cluster
from accordion.plan.trace.optimizers import OPTIMIZERS
from accordion.plan.trace.setup import Subject, TrainingSetup
from accordion.sharding import Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The workload, the GPUs and the resolved values of a search, from which all configurations follow.

    Args:
        subject_for: function of a micro-batch size that returns the training to trace.
        num_params: number of trained elements.
        cluster: the GPUs.
        sharding: values of all fields that `search` does not try.
        search: the values to try.
        tokens: tokens per sample; 1 if samples are counted instead.
        optimizer: a key of `OPTIMIZERS`.
        engine: "accordion" or "fsdp2".
        sequences: numbers of ranks that share each sequence, to try in this order if nothing fits.
        master_bytes: bytes of an element of the parameters that the optimizer steps, and so of its states: 4, or 2 for bf16.
    """

    subject_for: Callable[[int], Subject]
    num_params: int
    cluster: Cluster
    sharding: Sharding = field(default_factory=Sharding)
    search: Search = field(default_factory=Search)
    tokens: int = 1
    optimizer: str = "adamw"
    engine: str = "accordion"
    sequences: Sequence[int] = ()
    master_bytes: int = 4

    def setup(self, choice: Choice) -> TrainingSetup:
        """Return the setup of a trace of `moved_as(choice)`: `num_traced` micro-batches, and the host in place of a disk."""
        choice = moved_as(choice)
        return TrainingSetup(
            engine=self.engine,
            ranks=choice.gpus,
            node=self.cluster.node,
            replicas=choice.replicas,
            expert_parallel=choice.expert_parallel,
            sequence=choice.sequence,
            accumulate=choice.accumulate,
            no_sync=choice.no_sync,
            optimizer=self.optimizer,
            sharding=choice.sharding,
        )

    @property
    def precision(self) -> Precision:
        return self.sharding.precision or Precision()

    @property
    def compute_bytes(self) -> int:
        """Bytes per element in the dtype in which the model computes; 4 if the precision sets none."""
        return self.precision.params.itemsize if self.precision.params is not None else 4

    @property
    def state_bytes(self) -> float:
        """Lower bound of the bytes of optimizer states for each element of a trained parameter."""
        return OPTIMIZERS[self.optimizer].state_bytes * self.master_bytes / 4

    def offloads_of(self, choice: Choice) -> Sequence[Offload]:
        """Return the offloads to try for `choice`, in order. It is only the first if the strategy keeps full parameters from
        forward to backward, or full gradients."""
        offloads = self.search.offloads
        searched = choice.strategy.grads is Place.SHARD and not choice.strategy.keep_until_backward
        return offloads if searched or len(offloads) == 1 else offloads[:1]

    def choices(self) -> list[Choice]:
        """Return every choice to evaluate first, without offload of parameters and states, and without those that `sequences`
        adds if nothing fits. Raises `UsageError` if there is none."""
        if choices := list(self.choices_over(self.search.sequence or 1)):
            return choices
        search = self.search
        raise UsageError(
            f"there is no configuration to try: strategies {', '.join(s.name for s in search.strategies)}, replicas "
            f"{search.replicas or 'by node'}, --global-batch {search.global_batch}, {self.cluster.num_gpus} GPUs. Hybrid "
            "strategies need several nodes, or replicas that are more than one, fewer than the GPUs, and divide them; GPUs x "
            "micro-batch must divide a global batch."
        )

    def choices_over(self, sequence: int) -> Iterator[Choice]:
        """Yield every choice in which `sequence` ranks share each sequence, without offload of parameters and states. Leaves
        out numbers of GPUs that do not suit `sequence` or experts, and on one GPU all strategies but the first and no_shard."""
        search = self.search
        first, inputs = search.strategies[0], Offload(activations=search.activations[0])
        for gpus in [n for n in self.cluster.gpus if n % search.expert_parallel == n % sequence == 0]:
            strategies = [s for s in search.strategies if gpus > 1 or s is first or s.name == "no_shard"]
            for strategy in strategies:
                ways = [way for way in search.checkpointing if way != "none" or inputs.activations == DEVICE]
                batches = [(n, times) for n in search.micro_batches if (times := self._accumulate(n, gpus // sequence))]
                for replicas, way, (n, times) in product(self._replicas(strategy.hybrid, gpus), ways, batches):
                    choice = Choice(
                        sharding=replace(self.sharding, strategy=strategy, checkpoint_activations=way, offload=inputs),
                        micro_batch=n,
                        gpus=gpus,
                        accumulate=times,
                        replicas=replicas,
                        no_sync=search.no_sync,
                        expert_parallel=search.expert_parallel,
                        sequence=sequence,
                    )
                    yield choice.keeping(self.sharding.kept_over)

    def _replicas(self, hybrid: bool, gpus: int) -> Sequence[int]:
        """Return the numbers of replicas to try on `gpus` GPUs: [1] unless the strategy is `hybrid`; else the number in the
        search, or those that shard over 1, 2 and 4 nodes. If none of them is above 1 and divides `gpus`, return []."""
        asked, node = self.search.replicas, self.cluster.node
        if not hybrid:
            return [1]
        if asked:
            return [asked] if gpus % asked == 0 and gpus > asked > 1 else []
        return [gpus // size for size in (node, 2 * node, 4 * node) if size < gpus and gpus % size == 0]

    def _accumulate(self, micro_batch: int, ranks: int) -> int:
        """Return the number of micro-batches per step, if `ranks` ranks have batches of their own. Return 0 if there is a
        global batch that is no multiple of `ranks * micro_batch`."""
        batch = self.search.global_batch
        if batch is None:
            return self.search.accumulate
        return 0 if batch % (ranks * micro_batch) else batch // (ranks * micro_batch)
