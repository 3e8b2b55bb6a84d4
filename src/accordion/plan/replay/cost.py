"""How long an operator and a collective take: the slower of arithmetic and memory, latency and bytes over bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    Scale,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """An axis of the mesh. `ranks`: along it. `on_node`: how many of them one node has, each with a link of its own to others."""

    ranks: int
    on_node: int

    @property
    def far(self) -> bool:
        """It leaves the node."""
        return self.ranks > self.on_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds on a cluster at assumed rates. `axes`: of the mesh. `on_machine`: ranks of one machine, which share its memory and
    its disk. `scale`: what a measured step on the device made of kernels and messages; of copies to the host and of work there it
    says nothing. `drag`: how much longer all ranks take together than one of them alone.
    """

    cluster: Cluster
    rates: Rates
    axes: Mapping[str, MeshAxis]
    on_machine: int = 1
    scale: Scale = field(default_factory=Scale)
    drag: float = 1.0

    @property
    def caller_s(self) -> float:
        """Seconds of the host for one kernel."""
        return self.rates.caller_s * self.scale.kernels

    def seconds_of(self, event: Op | Collective) -> float:
        return self.of_collective(event) if isinstance(event, Collective) else self.of(event)

    def of(self, op: Op) -> float:
        """Seconds of an operator on the device, or of a copy, a kernel or files of the host."""
        if op.stream in (FETCH, STORE):  # half of what it reads and writes goes over the link
            return op.num_bytes / 2 / (self.cluster.gpu.host_gbps * GB * self.rates.link) + LATENCY_S["node"]
        if op.stream in (HOST, STEPPER, DISK_STREAM):
            gbps = self.cluster.disk_gbps if op.stream == DISK_STREAM else HOST_MEMORY_GBPS
            return op.num_bytes * self.on_machine / (gbps * GB * self.rates.host)
        return self._of(op) * self.scale.kernels * self.drag

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
        """Seconds of one launch: (n - 1) / n of the full tensors over the slowest link on the way, twice that for a sum; of an
        all-to-all see `_all_to_all`.
        """
        axis = self.axes[c.axis]
        if axis.ranks == 1:
            return 0.0
        latency_s = LATENCY_S["network"] if axis.far else self.cluster.gpu.latency_s
        if c.kind == ALL_TO_ALL:
            seconds = self._all_to_all(c.num_bytes / axis.ranks, axis)
        else:
            sent = c.num_bytes * (axis.ranks - 1) / axis.ranks * (2 if c.kind == "sum" else 1)
            seconds = sent / (self.gbps(axis) * GB)
        return (seconds + latency_s) * self.scale.messages * self.drag

    def _all_to_all(self, each_bytes: float, axis: MeshAxis) -> float:
        """Seconds in which a rank sends as much to each other: inside of its node, and by its own link to others, at once."""
        inside = each_bytes * (axis.on_node - 1) / (self.cluster.gpu.link_gbps * GB * self.rates.link)
        outside = each_bytes * (axis.ranks - axis.on_node) / (self.cluster.network_gbps * GB * self.rates.network)
        return max(inside, outside)

    def gbps(self, axis: MeshAxis) -> float:
        """What one rank of an axis sends, and receives, in a second. A ring over nodes enters and leaves a node by the links of
        all ranks that it has there.
        """
        inside = self.cluster.gpu.link_gbps * self.rates.link
        if not axis.far:
            return inside
        outside = self.cluster.network_gbps * axis.on_node * self.rates.network
        return min(inside, outside) if axis.on_node > 1 else outside


def costs_of(
    cluster: Cluster, rate: str, ranks: int, *, shards: int | None = None, near: int = 0, experts: int = 1
) -> Costs:
    """Return the costs of a rank of so many, at one of the assumed rates.

    Args:
        shards: ranks over which a hybrid strategy shards. None: all, with one axis.
        near: neighbours that keep one copy of a unit from a forward to its backward.
        experts: neighbours that share the experts of a mixture.
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
    scale = cluster.scales.get(rate, Scale())
    return Costs(cluster=cluster, rates=REACHED[rate], axes=axes, on_machine=machine, scale=scale, drag=drag)
