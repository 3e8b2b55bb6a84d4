"""What a plan says, as plain data and as text: for the screen, JSON and the page alike."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from accordion.plan.events import HOST, Log
from accordion.plan.hardware import (
    GIB,
    HOST_MEMORY_GBPS,
    MARGIN,
    OUTSIDE_BYTES,
    REACHED,
    TIGHT_BYTES,
    Cluster,
)
from accordion.plan.parts import (
    LOGITS,
    WAITED_FOR,
    PeakPart,
    RunCost,
    TimePart,
    by_kind,
    by_unit,
    cost_of,
    logits_off,
    peak_parts,
)
from accordion.plan.search.evaluate import HOST_MARGIN, Candidate
from accordion.plan.search.search import SearchResult, closest, unsettled
from accordion.plan.search.space import NO_OFFLOAD, OFFLOADS, Space
from accordion.units import AUTO
from accordion.version import VERSION

NOT_KNOWN = (
    "not in these figures: what other libraries take on the card, fragmentation beyond the allocator's own, a slow link or node, "
    "waiting for data and for the host"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer. `found`: every candidate. `log`: of the best one, or of the one that comes closest. `num_params`: in all.

    `measured`: which step, if any, was measured and calibrates the times. `tokens`, `price`: of a whole
    run, and dollars for an hour of a GPU. `counted`: what speed is of. `asked`: the arguments of `plan`. `remarks`: on the model.
    """

    model: str
    cluster: Cluster
    space: Space
    found: SearchResult
    log: Log | None
    num_params: int
    measured: str = ""
    tokens: float | None = None
    price: float | None = None
    seq: int = 0
    vocab: int = 0
    counted: str = "tokens"
    asked: Mapping[str, Any] = field(default_factory=dict)
    remarks: Sequence[str] = ()

    @property
    def time_is(self) -> str:
        """How far times are to be trusted."""
        if self.measured:
            return f"calibrated by one measured step: {self.measured}"
        return "uncalibrated: rates assumed, no step measured"

    @property
    def is_tight(self) -> bool:
        """It fits with so little left that published runs lost time to the allocator."""
        memory = self.chosen.memory
        return self.fits and memory is not None and self.cluster.card_bytes - memory.needed_bytes < TIGHT_BYTES

    @property
    def chosen(self) -> Candidate:
        """The fastest that fits, or what comes closest to fitting."""
        if self.found.best is not None:
            return self.found.best
        return closest(self.found.candidates, self.space)

    @property
    def fits(self) -> bool:
        return self.found.best is not None

    @property
    def verdict(self) -> str:
        """In words: fits, does not fit, or why nobody can say."""
        if self.fits:
            return "fits"
        return unsettled(self.chosen, self.cluster) if self.chosen.is_open(self.cluster) else "does not fit"

    def mfu(self, c: Candidate, rate: str = "middle") -> float:
        """Useful operations over the card's bf16 peak, recomputation left out."""
        assert c.steps is not None
        return c.steps[rate].flops / c.steps[rate].seconds / (self.cluster.gpu.tflops * 1e12)

    def as_dict(self) -> dict[str, Any]:
        """What JSON holds: the chosen configuration, and each other under `candidates`."""
        chosen = self.chosen
        others = [{**self._entry(c), "why": c.why} for c in self.found.candidates if c is not chosen]
        fewest = None if self.found.fewest is None else self._config(self.found.fewest)
        return {
            **self._entry(chosen),
            "fewest_gpus": fewest,
            "counted": self.counted,
            "model": {"name": self.model, "num_params": self.num_params},
            "hardware": {
                "gpu": self.cluster.gpu.name,
                "memory_bytes": self.cluster.card_bytes,
                "source": self.cluster.gpu.source,
                "ranks_in_a_node": self.cluster.node,
            },
            "inputs": self.inputs(),
            "verdict": self.verdict,
            "time": self._time(chosen),
            "peak_parts": [{"name": p.name, "bytes": p.num_bytes, "advice": p.advice} for p in self.peak_parts],
            "run": None if self.run_cost is None else self.run_cost.as_dict(),
            "next": [{"name": n.name, "gain": n.gain, "costs": n.costs} for n in next_gains(self)],
            "peak": self._peak(chosen),
            "ranges": self._ranges(chosen),
            "assumed": self.assumptions(),
            "candidates": others,
        }

    @property
    def planned_for(self) -> str:
        """The sequence length, precision, loss and nodes that figures hold for."""
        precision, node = self.space.precision, min(self.chosen.choice.gpus, self.cluster.node)
        num_nodes = self.chosen.choice.gpus // node
        parts = [f"sequence length {self.seq:,}", f"loss {self.space.kernels.loss}"] if self.seq else []
        dtypes = {"computed": precision.params, "reduced": precision.reduce}
        parts += [f"{what} in {dtype or 'its own dtype'}".replace("torch.", "") for what, dtype in dtypes.items()]
        return ", ".join(
            [*parts, f"{num_nodes} node{'s' if num_nodes > 1 else ''} of {node} GPU{'s' if node > 1 else ''}"]
        )

    def inputs(self) -> dict[str, Any]:
        """All that the plan was made from, versions included."""
        space, cluster, precision = self.space, self.cluster, self.space.precision
        return {
            **self.asked,
            "gpus": list(space.gpus),
            "ranks_in_a_node": cluster.node,
            "network_gbps": cluster.network_gbps,
            "host_memory_gib": cluster.host_bytes / GIB,
            "disk_gbps": cluster.disk_gbps,
            "optimizer": space.optimizer,
            "engine": space.engine,
            "loss": space.kernels.loss,
            "attention": space.kernels.attention,
            "lora_rank": space.kernels.lora_rank,
            "four_bits": space.kernels.four_bits,
            "attention_share": space.kernels.attention_share,
            "precision": {key: _name_of(getattr(precision, key)) for key in ("params", "reduce", "master")},
            "versions": versions(),
        }

    def _time(self, c: Candidate) -> dict[str, Any] | None:
        if c.steps is None or self.log is None:
            return None
        step = c.steps["middle"]
        keys = TimePart.__dataclass_fields__
        return {
            "by_kind": [{key: getattr(part, key) for key in keys} for part in by_kind(step)],
            "by_unit": [{key: getattr(part, key) for key in keys} for part in by_unit(step, self.log.units)],
        }

    @property
    def peak_parts(self) -> list[PeakPart]:
        """The peak of the chosen configuration in people's words."""
        memory = self.chosen.memory
        if memory is None:
            return []
        parts = peak_parts(memory.peak, self.logits_bytes)
        if self.log is None or all(p.name != LOGITS for p in parts):
            return parts
        off = logits_off(self.log, self.logits_bytes)
        return [
            replace(p, advice=f"a chunked loss would take about {gib(off)} GiB off") if p.name == LOGITS else p
            for p in parts
        ]

    @property
    def logits_bytes(self) -> int:
        """Of a micro-batch's logits in float32; 0 for a model without a vocabulary."""
        return 4 * self.vocab * self.seq * self.chosen.choice.micro_batch

    @property
    def run_cost(self) -> RunCost | None:
        """Of a run over `tokens`; None where none were asked for."""
        c = self.chosen
        if self.tokens is None or c.steps is None:
            return None
        rates = [c.tokens_per_s(self.space.tokens, rate) for rate in c.steps]
        return cost_of(self.tokens, rates, c.choice.gpus, self.cluster, self.price)

    def _entry(self, c: Candidate) -> dict[str, Any]:
        memory, steps = c.memory, c.steps
        if memory is None or steps is None:
            keys = ("peak_allocated_bytes", "peak_reserved_bytes", "breakdown_bytes", "step_s", "exposed_comm_s")
            nothing = dict.fromkeys((*keys, "tokens_per_s_per_gpu", "mfu"))
            return {
                "fits": None if c.bound else False,
                **nothing,
                "config": self._config(c),
                "least_bytes": c.least_bytes,
            }
        step = steps["middle"]
        return {
            "fits": None if c.is_open(self.cluster) else c.fits,
            "peak_allocated_bytes": memory.peak.num_bytes,
            "peak_reserved_bytes": memory.largest_reserved,
            "breakdown_bytes": memory.peak.breakdown,
            "step_s": step.seconds,
            "exposed_comm_s": step.exposed_s,
            "tokens_per_s_per_gpu": c.tokens_per_s(self.space.tokens),
            "mfu": self.mfu(c),
            "config": self._config(c),
        }

    def _config(self, c: Candidate) -> dict[str, Any]:
        return {
            "strategy": c.choice.strategy,
            "replicas": c.choice.replicas,
            "secondary": c.choice.secondary,
            "units": self._units(c),
            "checkpoint_activations": c.choice.checkpoint_activations,
            "micro_batch": c.choice.micro_batch,
            "accumulate": c.choice.accumulate,
            "no_sync": c.choice.no_sync,
            "gpus": c.choice.gpus,
            "expert_parallel": c.choice.expert_parallel,
            "offload": c.choice.offload,
            "offload_params": OFFLOADS[c.choice.offload][0],
            "offload_optimizer": OFFLOADS[c.choice.offload][1],
            "offload_activations": c.choice.activations,
            "optimizer": self.space.optimizer,
            "engine": self.space.engine,
        }

    def _units(self, c: Candidate) -> str:
        if c.choice.units != AUTO:
            return c.choice.units
        own = "repeated blocks" if self.space.engine == "fsdp2" else "repeated blocks, large embeddings and heads"
        return str(self.space.sharding.get("units") or own)

    def _peak(self, c: Candidate) -> dict[str, Any] | None:
        if c.memory is None:
            return None
        peak = c.memory.peak
        return {"phase": peak.phase, "unit": peak.unit, "operator": peak.operator}

    def _ranges(self, c: Candidate) -> dict[str, Any] | None:
        if c.memory is None or c.steps is None:
            return None
        rates = {name: c.tokens_per_s(self.space.tokens, name) for name in c.steps}
        return {
            "reserved_bytes": c.memory.reserved_bytes,
            "needed_bytes": c.memory.needed_bytes,
            "possible_bytes": c.memory.possible_bytes,
            "host_bytes_of_a_machine": c.host_bytes,
            "disk_bytes_of_a_machine": c.disk_bytes,
            "step_s": {name: step.seconds for name, step in c.steps.items()},
            "tokens_per_s_per_gpu": rates,
        }

    def assumptions(self) -> dict[str, Any]:
        """What the figures rest on."""
        return {
            "torch": torch.__version__,
            "time": self.time_is,
            "tight": self.is_tight,
            "efficiency": {
                "is": self.cluster.gpu.efficiency_is,
                **{
                    key: getattr(self.cluster.gpu, key)
                    for key in ("products", "elementwise", "attention", "slow", "fast")
                },
            },
            "tellable": self.cluster.tellable,
            "rates": {name: {k: getattr(r, k) for k in r.__slots__} for name, r in REACHED.items()},
            "fits": f"the larger reserved x {MARGIN} + {OUTSIDE_BYTES / GIB:.0f} GiB (context, NCCL) is below the card's memory",
            "optimizer": self.space.optimizer,
            "host": host_assumed(self.cluster),
            "substituted": {} if self.log is None else self.log.substituted,
            "unmodelled": {} if self.log is None else self.log.unmodelled,
            "remarks": list(self.remarks),
            "not_known": NOT_KNOWN,
        }


def _name_of(dtype: object) -> str:
    return "as the model's" if dtype is None else str(dtype).removeprefix("torch.")


def versions() -> dict[str, str]:
    """Of what a plan depends on."""
    found = {"accordion": VERSION, "torch": torch.__version__, "python": platform.python_version()}
    return {**found, "transformers": version("transformers")} if find_spec("transformers") is not None else found


@dataclass(frozen=True, slots=True, kw_only=True)
class NextGain:
    """Another configuration, by how much it is faster, and what it costs."""

    name: str
    gain: float
    costs: str


def next_gains(plan: Plan) -> list[NextGain]:
    """What would make a step faster by the tenth that can be told apart, the cheapest of each kind: memory, or other cards."""
    best = plan.found.best
    if best is None or best.steps is None:
        return []
    own, found = best.tokens_per_s(plan.space.tokens), list[tuple[float, NextGain]]()
    for c in plan.found.candidates:
        if c.fits or c.memory is None or c.steps is None or c.choice.gpus != best.choice.gpus:
            continue
        gain = c.tokens_per_s(plan.space.tokens) / own - 1
        card = (c.needed_bytes - plan.cluster.card_bytes) / GIB
        host = (c.host_bytes * HOST_MARGIN - plan.cluster.host_bytes) / GIB
        lacks = [f"{card:,.1f} GiB more on each card"] if card >= 0 else []
        lacks += [f"{host:,.0f} GiB more in each machine"] if host > 0 else []
        if gain >= plan.cluster.tellable and lacks:
            found.append((max(card, 0.0), NextGain(name=str(c.choice), gain=gain, costs=" and ".join(lacks))))
    found.sort(key=lambda pair: (pair[0], -pair[1].gain))
    step = best.steps["middle"]
    without = step.exposed_s / (step.seconds - step.exposed_s) if step.seconds > step.exposed_s else 0.0
    host = sum(s for stream, s in step.waits.items() if WAITED_FOR.get(stream) == WAITED_FOR[HOST])
    costs = "another host, or disk" if host > step.exposed_s / 2 else "another network"
    faster = [NextGain(name="links and a host that nothing waits for", gain=without, costs=costs)]
    return [*(n for _, n in found[:2]), *(faster if without >= plan.cluster.tellable else [])]


def host_assumed(cluster: Cluster) -> str:
    """What is taken for granted of a machine, where anything is offloaded."""
    return (
        f"{cluster.host_is}; what is offloaded x {HOST_MARGIN} must fit into it; "
        f"{cluster.gpu.host_gbps:g} GB/s to it a GPU; optimizers there reach {HOST_MEMORY_GBPS:g} GB/s together (a guess); "
        f"disk {cluster.disk_gbps:g} GB/s"
    )


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f}"


TEXTBOOK = (("parameters, bf16", 2), ("gradients, bf16", 2), ("Adam's two moments, float32", 8))
MASTER = ("masters, float32", 4)


def explanation(plan: Plan) -> list[tuple[str, str, str]]:
    """(line, by hand, traced): the textbook's arithmetic beside what the trace counted on one rank."""
    n, chosen = plan.num_params, plan.chosen
    gpus = chosen.choice.gpus
    per_param = sum(size for _, size in TEXTBOOK)
    lines = [("example: 70 B parameters", _sizes(70e9, per_param, (1, 8, 16)), "")]
    lines.append((f"this model: {n / 1e9:.2f} B parameters", _sizes(n, per_param, (1, gpus)), ""))
    lines += [(f"  {name}", f"{size} B x {n:,} = {n * size / 1e9:,.1f} GB", "") for name, size in (*TEXTBOOK, MASTER)]
    lines.append(("with float32 masters", _sizes(n, per_param + MASTER[1], (1, gpus)), ""))
    if chosen.memory is None:
        return lines
    highest, at_peak = chosen.memory.peak.highest, chosen.memory.peak.breakdown
    over, away = chosen.choice.shards, chosen.choice.offload != NO_OFFLOAD
    by_hand: Mapping[str, str] = {
        "parameters": f"4 B x {n:,} / {over} = {4 * n / over / GIB:,.2f} GiB, as masters",
        "gradients": f"4 B x {n:,} / {over} = {4 * n / over / GIB:,.2f} GiB at the end of the backward, reduced in float32",
        "optimizer": f"8 B x {n:,} / {over} = {8 * n / over / GIB:,.2f} GiB",
        "gathered": "full parameters of the units that stand: one and the next, the root and the last",
        "activations": "not in the textbook: what the backward needs, logits and loss",
        "other": "not in the textbook: gradients of activations, temporaries, workspaces",
    }
    for key, text in by_hand.items():
        text += ", offloaded" if away and "GiB" in text else ""
        traced = f"most {highest[key] / GIB:,.2f} GiB, at the peak {at_peak[key] / GIB:,.2f}"
        lines.append((key, text, traced))
    lines.append(("peak, allocated", "", f"{chosen.memory.peak.num_bytes / GIB:,.2f} GiB"))
    return lines


def _sizes(num_params: float, size: int, gpus: Sequence[int]) -> str:
    total = num_params * size / 1e9
    on = [f"{total / n:,.1f}".removesuffix(".0") + f" GB on {n} GPUs" for n in dict.fromkeys(gpus) if n > 1]
    return ", ".join([f"{size} B each: " + f"{total:,.1f}".removesuffix(".0") + " GB", *on])
