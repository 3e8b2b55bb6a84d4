"""Seconds of operators and collectives: the slower of arithmetic and memory, and latency plus bytes over bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from accordion.plan.events import (
    ALL_TO_ALL,
    DISK_STREAM,
    EXPERT_DATA,
    EXPERTS,
    FETCH,
    HOST,
    NEAR,
    STEPPER,
    STORE,
    Collective,
    Op,
)
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
    Rates,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """The numbers of ranks of one axis of the mesh."""

    ranks: int  # of the axis
    on_node: int  # those of them on one node; each has its own link to other nodes

    @property
    def far(self) -> bool:
        """True if the axis spans several nodes."""
        return self.ranks > self.on_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Computes the seconds of events on a cluster at assumed rates."""

    cluster: Cluster
    rates: Rates
    axes: Mapping[str, MeshAxis]  # by name, as in `Collective.axis`
    on_machine: int = 1  # ranks of one machine, which share its memory and disk
    drag: float = 1.0  # factor on the time of device work with many ranks, since all wait for the slowest

    def seconds_of(self, event: Op | Collective) -> float:
        return self.of_collective(event) if isinstance(event, Collective) else self.of(event)

    def of(self, op: Op) -> float:
        """Return the seconds of a kernel on the device, of a copy between host and device, or of work on the host or a disk."""
        if op.stream in (FETCH, STORE):  # a copy reads and writes each byte, and sends it over the link once
            return op.num_bytes / 2 / (self.cluster.gpu.host_gbps * GB * self.rates.link) + LATENCY_S["node"]
        if op.stream in (HOST, STEPPER, DISK_STREAM):
            gbps = self.cluster.disk_gbps if op.stream == DISK_STREAM else HOST_MEMORY_GBPS
            return op.num_bytes * self.on_machine / (gbps * GB * self.rates.host)
        return self._of(op) * self.drag

    def _of(self, op: Op) -> float:
        gpu, speed = self.cluster.gpu, self.rates.kernels(self.cluster.gpu)
        by_memory = op.num_bytes / (gpu.bandwidth_gbps * GB * gpu.elementwise * speed)
        if not op.flops:
            return max(by_memory, LAUNCH_S)
        peak = (gpu.fp32_tflops if op.dtype in ("float32", "float64") else gpu.tflops) * 1e12
        if "attention" in op.name:
            reached = gpu.attention * speed * (ATTENTION_BACKWARD if "backward" in op.name else 1.0)
            return max(op.flops / (peak * reached), LAUNCH_S)
        return max(op.flops / (peak * gpu.products * speed), by_memory, LAUNCH_S)

    def of_collective(self, c: Collective) -> float:
        """Return the seconds of one collective of n ranks: latency, plus the time to send (n - 1) / n of its bytes over the
        slowest link. A sum sends twice as many. An all-to-all takes as long as its messages inside the node, or as those to
        other nodes if they are slower."""
        axis = self.axes[c.axis]
        if axis.ranks == 1:
            return 0.0
        latency_s = LATENCY_S["network"] if axis.far else self.cluster.gpu.latency_s
        if c.kind == ALL_TO_ALL:
            seconds = self._all_to_all(c.num_bytes / axis.ranks, axis)
        else:
            sent = c.num_bytes * (axis.ranks - 1) / axis.ranks * (2 if c.kind == "sum" else 1)
            seconds = sent / (self.gbps(axis) * GB)
        return (seconds + latency_s) * self.drag

    def _all_to_all(self, each_bytes: float, axis: MeshAxis) -> float:
        """Return the seconds in which a rank sends `each_bytes` to each other rank; sends within and between nodes overlap."""
        inside = each_bytes * (axis.on_node - 1) / (self.cluster.gpu.link_gbps * GB * self.rates.link)
        outside = each_bytes * (axis.ranks - axis.on_node) / (self.cluster.network_gbps * GB * self.rates.network)
        return max(inside, outside)

    def gbps(self, axis: MeshAxis) -> float:
        """Return the GB/s that one rank of a ring over `axis` sends. Between nodes, the links of a node's ranks add up."""
        inside = self.cluster.gpu.link_gbps * self.rates.link
        if not axis.far:
            return inside
        outside = self.cluster.network_gbps * axis.on_node * self.rates.network
        return min(inside, outside) if axis.on_node > 1 else outside


def costs_of(
    cluster: Cluster, rate: str, ranks: int, *, shards: int | None = None, near: int = 0, experts: int = 1
) -> Costs:
    """Return `Costs`, which computes the seconds of events on one rank.

    Args:
        ranks: number of all ranks.
        rate: name of the assumed rates, a key of `REACHED`.
        shards: ranks over which a hybrid strategy shards; None: the strategy is not hybrid.
        near: number of neighbouring ranks that keep one copy of a unit for its backward; 0: none is kept.
        experts: number of neighbouring ranks that share the experts of the model; 1: experts are not shared.
    """
    machine, inside, near = min(ranks, cluster.node), shards or ranks, max(1, near)
    across = ranks // inside if shards else ranks
    axes = {
        "shard": MeshAxis(ranks=inside, on_node=min(inside, machine)),
        "replicate": MeshAxis(ranks=across, on_node=max(1, machine // inside) if shards else machine),
        NEAR: MeshAxis(ranks=near, on_node=min(near, machine)),
        EXPERTS: MeshAxis(ranks=experts, on_node=min(experts, machine)),
        EXPERT_DATA: MeshAxis(ranks=ranks // experts, on_node=max(1, machine // experts)),
    }
    drag = 1 + DRAG * log2(max(1.0, ranks / MANY_RANKS))
    return Costs(cluster=cluster, rates=REACHED[rate], axes=axes, on_machine=machine, drag=drag)
