"""How long an operator and a collective take: the slower of arithmetic and memory, latency and bytes over bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from accordion.plan.events import DISK_STREAM, FETCH, HOST, SECONDARY, STEPPER, STORE, Collective, Op
from accordion.plan.hardware import GB, HOST_MEMORY_GBPS, LATENCY_S, LAUNCH_S, Cluster, Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds on a cluster at assumed rates. `ranks`: by axis of the mesh. `spans_nodes`: which axes leave a node.

    `on_machine`: ranks of one machine, which share its memory and its disk. `scale`: of all times of kernels and collectives:
    what a measured step on the device says nothing of, copies to the host and work there, keeps its assumed rates.
    """

    cluster: Cluster
    rates: Rates
    ranks: dict[str, int]
    spans_nodes: dict[str, bool]
    on_machine: int = 1
    scale: float = 1.0

    @property
    def caller_s(self) -> float:
        """Seconds of the host for one kernel."""
        return self.rates.caller_s * self.scale

    def of(self, op: Op) -> float:
        """Seconds of an operator on the device, or of a copy, a kernel or files of the host."""
        if op.stream in (FETCH, STORE):  # half of what it reads and writes goes over the link
            return op.num_bytes / 2 / (self.cluster.gpu.host_gbps * GB * self.rates.link) + LATENCY_S["node"]
        if op.stream in (HOST, STEPPER, DISK_STREAM):
            gbps = self.cluster.disk_gbps if op.stream == DISK_STREAM else HOST_MEMORY_GBPS
            return op.num_bytes * self.on_machine / (gbps * GB * self.rates.host)
        return self._of(op) * self.scale

    def _of(self, op: Op) -> float:
        gpu, rates = self.cluster.gpu, self.rates
        by_memory = op.num_bytes / (gpu.bandwidth_gbps * GB * rates.memory)
        if not op.flops:
            return max(by_memory, LAUNCH_S)
        peak = (gpu.fp32_tflops if op.dtype in ("float32", "float64") else gpu.tflops) * 1e12
        if "attention" in op.name:
            reached = rates.attention_backward if "backward" in op.name else rates.attention
            return max(op.flops / (peak * gpu.attention * reached), LAUNCH_S)
        return max(op.flops / (peak * gpu.products * rates.products), by_memory, LAUNCH_S)

    def of_collective(self, c: Collective) -> float:
        """Seconds of one launch: (n - 1) / n of the full tensors over the slowest link on the way, twice that for a sum."""
        num = self.ranks[c.axis]
        if num == 1:
            return 0.0
        far = self.spans_nodes[c.axis]
        gbps = self.cluster.network_gbps if far else self.cluster.gpu.link_gbps
        sent = c.num_bytes * (num - 1) / num * (2 if c.kind == "sum" else 1)
        return (
            sent / (gbps * GB * self.rates.link) + (LATENCY_S["network"] if far else self.cluster.gpu.latency_s)
        ) * self.scale


def costs_of(
    cluster: Cluster,
    rates: Rates,
    ranks: int,
    hybrid: bool,
    shards: int = 0,
    scale: float = 1.0,
    secondary: int = 0,
) -> Costs:
    """The costs of a rank of so many: one axis over all, or one over `shards` ranks (0: of a node) and one across.

    `secondary`: neighbours that keep one copy from a forward to its backward.
    """
    if hybrid:
        inside = shards or min(ranks, cluster.node)
        sizes = {"shard": inside, "replicate": ranks // inside}
        far = {"shard": inside > cluster.node, "replicate": ranks > cluster.node}
    else:
        sizes = {"shard": ranks, "replicate": ranks}
        far = dict.fromkeys(sizes, ranks > cluster.node)
    sizes[SECONDARY], far[SECONDARY] = max(1, secondary), secondary > cluster.node
    machine = min(ranks, cluster.node)
    return Costs(cluster=cluster, rates=rates, ranks=sizes, spans_nodes=far, on_machine=machine, scale=scale)
