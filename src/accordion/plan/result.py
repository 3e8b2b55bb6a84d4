"""`Plan`, the result of planning, and its figures as plain data and as text, for the screen and JSON."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from accordion.errors import UsageError
from accordion.observe.trace import Trace
from accordion.plan.choice import moved_as, traced_as
from accordion.plan.events import Log
from accordion.plan.hardware import GIB, HOST_MEMORY_GBPS, MARGIN, OUTSIDE_BYTES, REACHED, TELLABLE, Cluster
from accordion.plan.replay.drawing import drawn
from accordion.plan.replay.offload import offloaded
from accordion.plan.replay.predict import costs_for
from accordion.plan.replay.timeline import by_kind, by_unit
from accordion.plan.search.evaluate import HOST_MARGIN, Candidate
from accordion.plan.search.search import SearchResult, closest, unsettled
from accordion.plan.search.space import Space
from accordion.plan.workload import TraceableModel, Workload
from accordion.sharding import PRINTERS, Sharding
from accordion.units import AUTO
from accordion.version import VERSION

FIELDS = [
    f.name for f in fields(Sharding) if f.name not in ("precision", "prefetch", "meshes", "state_block", "reduce_op")
]

FIGURES = (
    *("peak_allocated_bytes", "peak_reserved_bytes", "breakdown_bytes"),
    *("step_s", "exposed_comm_s", "tokens_per_s_per_gpu", "mfu"),
)
NUMBERS = (
    "replicas",
    "micro_batch",
    "accumulate",
    "no_sync",
    "gpus",
    "expert_parallel",
    "sequence",
)  # fields of `Choice`
PLACE = ("phase", "unit", "operator")  # fields of `MemoryPeak`
UNCALIBRATED = "uncalibrated: rates are assumed, no step was measured"
NOT_KNOWN = (
    "not in these figures: GPU memory that other libraries take, fragmentation beyond the allocator's own, a slow link or node, "
    "waiting for data and for the host"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of `accordion.plan`. `fits`: True if a configuration fits. `chosen`: the best one, or if none fits, the
    closest to fitting. `as_dict()`: all figures.

    Args:
        task: the workload's model on the meta device, with its loss and batches.
        workload: the model, loss and batches that were passed to `plan`.
        space: the GPUs, and the values that were searched.
        found: all candidates (configurations with their memory and time); its `best` is None if none fits on all GPUs.
    """

    task: TraceableModel
    workload: Workload
    space: Space
    found: SearchResult

    @property
    def cluster(self) -> Cluster:
        return self.space.cluster

    @property
    def num_params(self) -> int:
        """Number of parameters of the whole model."""
        return sum(p.numel() for p in self.task.model.parameters())

    @property
    def seq(self) -> int:
        """Tokens per sample; 0 for a model without a vocabulary."""
        return self.workload.seq if self.task.vocab else 0

    @property
    def is_tight(self) -> bool:
        """True if the chosen configuration fits, but leaves so little GPU memory free that the allocator may slow it down."""
        memory = self.chosen.memory
        return self.fits and memory is not None and memory.is_tight(self.cluster)

    @property
    def chosen(self) -> Candidate:
        """The candidate that needs least memory, of those that fit on all GPUs and are within 2 % of the fastest. If none
        fits, the one for all GPUs that needs least memory, of those not ruled out by a bound if there are any."""
        if self.found.best is not None:
            return self.found.best
        return closest(self.found.candidates, self.space)

    @property
    def log(self) -> Log | None:
        """Log of a step of the chosen configuration with its offload: the traced log, or one derived from the trace without
        offloaded states. None if neither was traced."""
        choice, logs = self.chosen.choice, self.found.logs
        if moved_as(choice) in logs:
            return logs[moved_as(choice)]
        log = logs.get(traced_as(choice))
        return None if log is None else offloaded(log, choice.offload, self.space.compute_bytes)

    @property
    def fits(self) -> bool:
        return self.found.best is not None

    @property
    def verdict(self) -> str:
        """Text: "fits", "does not fit", or the reason why it is not known whether the chosen configuration fits."""
        if self.fits:
            return "fits"
        return unsettled(self.chosen, self.cluster) if self.chosen.is_open(self.cluster) else "does not fit"

    def trace(self) -> Trace:
        """Return the planned step of the chosen configuration, at middle rates, as a trace of one rank. It can be drawn, or be
        the `plan` of `Trace.html` for recorded steps. Raises `UsageError` if no trace was made of the configuration."""
        if self.log is None:
            raise UsageError("the chosen configuration was ruled out without a trace, so there is no step to draw.")
        choice = self.chosen.choice
        costs = costs_for(self.space.setup(choice), self.cluster, "middle")
        return Trace([drawn(self.log, costs, choice.strategy.name)])

    def mfu(self, c: Candidate, rate: str = "middle") -> float:
        """Return FLOP/s of `c`, without recomputation, as a share (0 to 1) of the GPU's `tflops`. `rate`: key of `c.steps`,
        which must not be None."""
        assert c.steps is not None
        return c.steps[rate].flops / c.steps[rate].seconds / (self.cluster.gpu.tflops * 1e12)

    def as_dict(self) -> dict[str, Any]:
        """Return the data that `--json` prints (with `--reserve-gb` next to `free_bytes`): name -> figure of the chosen
        configuration, and as "candidates" a list of those of the others."""
        chosen = self.chosen
        others = [{**self._entry(c), "why": c.why} for c in self.found.candidates if c is not chosen]
        fewest = None if self.found.fewest is None else self._config(self.found.fewest)
        return {
            **self._entry(chosen),
            "fewest_gpus": fewest,
            "counted": self.task.counted,
            "model": {"name": self.task.name, "num_params": self.num_params},
            "hardware": {
                "gpu": self.cluster.gpu.name,
                "memory_bytes": self.cluster.card_bytes,
                "source": self.cluster.gpu.source,
                "ranks_in_a_node": self.cluster.node,
            },
            "inputs": self.inputs(),
            "verdict": self.verdict,
            "time": self._time(chosen),
            "run": self.run_cost,
            "peak": None if chosen.memory is None else {k: getattr(chosen.memory.peak, k) for k in PLACE},
            "ranges": self._ranges(chosen),
            "assumed": self.assumptions(),
            "candidates": others,
        }

    @property
    def planned_for(self) -> str:
        """Text that names the sequence length, loss, precision and nodes for which the figures hold."""
        precision, node = self.space.precision, min(self.chosen.choice.gpus, self.cluster.node)
        num_nodes = self.chosen.choice.gpus // node
        parts = [f"sequence length {self.seq:,}", f"loss {self.workload.kernels.loss}"] if self.seq else []
        parts += [f"MLPs in {self.workload.kernels.mlp_tiles} tiles"] if self.workload.kernels.mlp_tiles > 1 else []
        dtypes = {"computed": precision.params, "reduced": precision.reduce}
        parts += [f"{what} in {dtype or 'its own dtype'}".replace("torch.", "") for what, dtype in dtypes.items()]
        return ", ".join(
            [*parts, f"{num_nodes} node{'s' if num_nodes > 1 else ''} of {node} GPU{'s' if node > 1 else ''}"]
        )

    def inputs(self) -> dict[str, Any]:
        """Return the inputs of the plan as plain data: model, hardware, options and versions of packages."""
        space, cluster, kernels = self.space, self.cluster, self.workload.kernels
        return {
            "model": self.task.name,
            "gpu": cluster.gpu.name,
            **({"seq": self.seq} if self.seq else {}),
            "gpus": list(cluster.gpus),
            "ranks_in_a_node": cluster.node,
            "network_gbps": cluster.network_gbps,
            "host_memory_gib": cluster.host_bytes / GIB,
            "disk_gbps": cluster.disk_gbps,
            "optimizer": space.optimizer,
            "engine": space.engine,
            **{name: getattr(kernels, name) for name in ("loss", "attention", "mlp_tiles", "lora_rank", "quantize")},
            "precision": {
                key: str(getattr(space.precision, key) or "as the model's").removeprefix("torch.")
                for key in ("params", "reduce", "master")
            },
            "versions": versions(),
        }

    def _time(self, c: Candidate) -> dict[str, Any] | None:
        if c.steps is None or self.log is None:
            return None
        step = c.steps["middle"]
        parts = {"by_kind": by_kind(step), "by_unit": by_unit(step, self.log.units)}
        return {name: list(map(asdict, each)) for name, each in parts.items()}

    @property
    def free_bytes(self) -> dict[str, int]:
        """Name -> free bytes of a GPU: "step" during a training step; and while an inference engine generates, "parked" if the
        trained model is parked (moved off the device), "not parked" if it is not. Memory that torch has reserved in a step is
        not free. {} if the memory of the chosen configuration is not known."""
        memory, card = self.chosen.memory, self.cluster.card_bytes
        if memory is None:
            return {}
        not_parked = card - int(memory.peak.held_bytes * MARGIN) - OUTSIDE_BYTES
        return {"parked": card - OUTSIDE_BYTES, "not parked": not_parked, "step": card - memory.needed_bytes}

    @property
    def run_cost(self) -> dict[str, tuple[float, ...]] | None:
        """Cost of a run over the workload's `tokens`: name -> (lowest, highest), for "hours", "gpu_hours", and "dollars" if the
        cluster has a price. None if `tokens` is not set, or if the chosen configuration has no times."""
        c, tokens, price = self.chosen, self.workload.tokens, self.cluster.price
        if tokens is None or c.steps is None:
            return None
        hours = sorted(tokens / c.tokens_per_s(self.space.tokens, rate) / 3600 for rate in c.steps)  # of one GPU
        low_high = hours[0], hours[-1]
        cost = {"hours": tuple(h / c.choice.gpus for h in low_high), "gpu_hours": low_high}
        return cost if price is None else {**cost, "dollars": tuple(price * h for h in low_high)}

    def _entry(self, c: Candidate) -> dict[str, Any]:
        """Return the figures and configuration of `c` as plain data. "fits" is None if that is not known. If `c` was ruled out
        without a trace, each of `FIGURES` is None, and there is an entry "least_bytes"."""
        fits = None if c.bound or c.is_open(self.cluster) else c.fits
        entry = {"fits": fits, **dict.fromkeys(FIGURES), "config": self._config(c)}
        if c.memory is None or c.steps is None:
            return {**entry, "least_bytes": c.least_bytes}
        step = c.steps["middle"]
        return entry | {
            "peak_allocated_bytes": c.memory.peak.num_bytes,
            "peak_reserved_bytes": c.memory.largest_reserved,
            "breakdown_bytes": c.memory.peak.breakdown,
            "step_s": step.seconds,
            "exposed_comm_s": step.exposed_s,
            "tokens_per_s_per_gpu": c.tokens_per_s(self.space.tokens),
            "mfu": self.mfu(c),
        }

    def _config(self, c: Candidate) -> dict[str, Any]:
        """Return name -> value of the configuration of `c`. Strategy, offload and units are text, if text can describe them."""
        choice = c.choice
        words = {name: PRINTERS.get(name, lambda value: value)(getattr(choice.sharding, name)) for name in FIELDS}
        return {
            **words,
            "units": AUTO if choice.sharding.units is None else words["units"],
            **{name: getattr(choice, name) for name in NUMBERS},
            "optimizer": self.space.optimizer,
            "engine": self.space.engine,
        }

    def _ranges(self, c: Candidate) -> dict[str, Any] | None:
        if c.memory is None or c.steps is None:
            return None
        return {
            "reserved_bytes": c.memory.reserved_bytes,
            "needed_bytes": c.memory.needed_bytes,
            "possible_bytes": c.memory.possible_bytes,
            "host_bytes_of_a_machine": c.host_bytes,
            "disk_bytes_of_a_machine": c.disk_bytes,
            "step_s": {name: step.seconds for name, step in c.steps.items()},
            "tokens_per_s_per_gpu": {name: c.tokens_per_s(self.space.tokens, name) for name in c.steps},
        }

    def assumptions(self) -> dict[str, Any]:
        """Return the assumptions behind the figures as plain data: rates, margins, and what was not modelled."""
        gpu = self.cluster.gpu
        return {
            "torch": torch.__version__,
            "time": UNCALIBRATED,
            "tight": self.is_tight,
            "efficiency": {
                "is": gpu.efficiency_is,
                **{key: getattr(gpu, key) for key in ("products", "elementwise", "attention", "slow", "fast")},
            },
            "tellable": TELLABLE,
            "rates": {name: asdict(rates) for name, rates in REACHED.items()},
            "fits": f"the larger reserved x {MARGIN} + {OUTSIDE_BYTES / GIB:.0f} GiB (context, NCCL) is below the GPU's memory",
            "optimizer": self.space.optimizer,
            "host": (
                f"{self.cluster.host_is}; offloaded bytes x {HOST_MARGIN} must fit into it; {gpu.host_gbps:g} GB/s to it per "
                f"GPU; optimizers there reach {HOST_MEMORY_GBPS:g} GB/s together (a guess); disk {self.cluster.disk_gbps:g} GB/s"
            ),
            "substituted": {} if self.log is None else self.log.substituted,
            "unmodelled": {} if self.log is None else self.log.unmodelled,
            "remarks": list(self.task.remarks),
            "not_known": NOT_KNOWN,
        }


def versions() -> dict[str, str]:
    """Return name -> version of Python and of the packages that a plan depends on; transformers only if it is installed."""
    names = {"accordion": VERSION, "torch": torch.__version__, "python": platform.python_version()}
    return {**names, "transformers": version("transformers")} if find_spec("transformers") is not None else names


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f}"
