"""Compute the seconds of operators (the slower of arithmetic and memory) and collectives (latency, bytes over bandwidth)."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from accordion.plan.events import ALL_TO_ALL, Axes, Collective, Op, Streams
from accordion.plan.hardware import (
    ATTENTION_BACKWARD,
    DRAG,
    GB,
    HOST_MEMORY_GBPS,
    LATENCY_S,
    LAUNCH_S,
    MANY_RANKS,
    REACHED,
    Cluster,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """Sizes of one mesh axis. `ranks`: its ranks. `on_node`: how many of these are on one node."""

    ranks: int
    on_node: int  # each has its own link to other nodes

    @property
    def far(self) -> bool:
        """True if the axis spans several nodes."""
        return self.ranks > self.on_node


class Costs:
    """Computes the seconds that single operators and collectives of one rank take on `cluster`, at assumed rates.

    Args:
        rate: name of the assumed rates, a key of `REACHED`.
        ranks: number of all ranks.
        shards: ranks over which a hybrid strategy shards; None: the strategy is not hybrid.
        near: number of neighbouring ranks that keep one copy of a unit for its backward; 0: none is kept.
        experts: number of neighbouring ranks that share the experts of the model; 1: experts are not shared.
        sequence: number of neighbouring ranks that share each sequence.
    """

    def __init__(
        self,
        cluster: Cluster,
        rate: str,
        ranks: int,
        *,
        shards: int | None = None,
        near: int = 0,
        experts: int = 1,
        sequence: int = 1,
    ) -> None:
        machine, inside, near = min(ranks, cluster.node), shards or ranks, max(1, near)
        across = ranks // inside if shards else ranks
        self.cluster, self.rates = cluster, REACHED[rate]
        self.on_machine = machine  # ranks of one machine, which share its memory and disk
        self.axes = {  # by name, as in `Collective.axis`
            "shard": MeshAxis(ranks=inside, on_node=min(inside, machine)),
            "replicate": MeshAxis(ranks=across, on_node=max(1, machine // inside) if shards else machine),
            Axes.NEAR: MeshAxis(ranks=near, on_node=min(near, machine)),
            Axes.EXPERTS: MeshAxis(ranks=experts, on_node=min(experts, machine)),
            Axes.SEQUENCE: MeshAxis(ranks=sequence, on_node=min(sequence, machine)),
            Axes.EXPERT_DATA: MeshAxis(ranks=ranks // experts, on_node=max(1, machine // experts)),
        }
        # A factor on the time of device work with many ranks, since all wait for the slowest.
        self.drag = 1 + DRAG * log2(max(1.0, ranks / MANY_RANKS))

    def of(self, op: Op | Collective) -> float:
        """Return the seconds of `op`, without waits. If it is no collective, its stream says what it is: a kernel on the
        device, a copy between host and device, or work of the host or its disk."""
        if isinstance(op, Collective):
            return self.of_collective(op)
        if op.stream in (Streams.FETCH, Streams.STORE):
            # A copy reads and writes each byte, and sends it over the link once.
            return op.num_bytes / 2 / (self.cluster.gpu.host_gbps * GB * self.rates.link) + LATENCY_S["node"]
        if op.stream in (Streams.HOST, Streams.STEPPER, Streams.DISK):
            gbps = self.cluster.disk_gbps if op.stream == Streams.DISK else HOST_MEMORY_GBPS
            return op.num_bytes * self.on_machine / (gbps * GB * self.rates.host)
        gpu = self.cluster.gpu
        speed = (1.0, gpu.fast, gpu.slow)[self.rates.end]
        by_memory = op.num_bytes / (gpu.bandwidth_gbps * GB * gpu.elementwise * speed)
        peak = (gpu.fp32_tflops if op.dtype in ("float32", "float64") else gpu.tflops) * 1e12
        if op.flops and "attention" in op.name:
            reached = gpu.attention * speed * (ATTENTION_BACKWARD if "backward" in op.name else 1.0)
            return max(op.flops / (peak * reached), LAUNCH_S) * self.drag
        return max(op.flops / (peak * gpu.products * speed), by_memory, LAUNCH_S) * self.drag

    def of_collective(self, c: Collective) -> float:
        """Return the seconds of one collective of n ranks; 0 if n is 1. They are, times `drag`, a latency plus the time to send
        (n - 1) / n of its bytes (for a sum twice as many) over the slowest link; for an all-to-all, the latency plus the time
        of the messages inside the node or of those to other nodes, whichever is longer."""
        axis = self.axes[c.axis]
        if axis.ranks == 1:
            return 0.0
        latency_s = LATENCY_S["network"] if axis.far else self.cluster.gpu.latency_s
        if c.kind == ALL_TO_ALL:
            each_bytes, cluster = c.num_bytes / axis.ranks, self.cluster  # sent to each other rank
            inside_s = each_bytes * (axis.on_node - 1) / (cluster.gpu.link_gbps * GB * self.rates.link)
            outside_s = each_bytes * (axis.ranks - axis.on_node) / (cluster.network_gbps * GB * self.rates.network)
            seconds = max(inside_s, outside_s)
        else:
            sent = c.num_bytes * (axis.ranks - 1) / axis.ranks * (2 if c.kind == "sum" else 1)
            gbps = self.cluster.gpu.link_gbps * self.rates.link  # what one rank of a ring sends
            if axis.far:  # between nodes, the links of a node's ranks add up
                outside = self.cluster.network_gbps * axis.on_node * self.rates.network
                gbps = min(gbps, outside) if axis.on_node > 1 else outside
            seconds = sent / (gbps * GB)
        return (seconds + latency_s) * self.drag
