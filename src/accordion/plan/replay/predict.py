"""One configuration on one cluster: traced, replayed and timed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from accordion.config import Place, checkpointing_named
from accordion.plan.events import Log
from accordion.plan.experts import experts_in
from accordion.plan.extrapolate.depth import IrregularError, Shortened, extend, num_traced
from accordion.plan.hardware import MARGIN, OUTSIDE_BYTES, REACHED, Cluster
from accordion.plan.replay.allocator import reserved_bytes
from accordion.plan.replay.cost import costs_of
from accordion.plan.replay.peak import MemoryPeak, peak_of
from accordion.plan.replay.timeline import Step, simulate
from accordion.plan.trace.setup import Subject, TrainingSetup
from accordion.plan.trace.trace import trace
from accordion.plan.trained_models import longest_run, shortened


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """`reserved_bytes`: by how the allocator takes memory. `needed_bytes`: of the card: the larger of both with a margin, and
    what is outside of torch.
    """

    peak: MemoryPeak
    reserved_bytes: dict[str, int]

    @property
    def largest_reserved(self) -> int:
        return max(self.reserved_bytes.values())

    @property
    def needed_bytes(self) -> int:
        return int(self.largest_reserved * MARGIN) + OUTSIDE_BYTES

    @property
    def possible_bytes(self) -> int:
        """What is needed if the operators whose inside is not known take the most they may."""
        return int((self.largest_reserved + self.peak.unsure_bytes) * MARGIN) + OUTSIDE_BYTES

    def fits(self, cluster: Cluster) -> bool:
        return self.possible_bytes < cluster.card_bytes

    def is_open(self, cluster: Cluster) -> bool:
        """Neither yes nor no: it fits, unless an operator takes inside what it may."""
        return self.needed_bytes < cluster.card_bytes <= self.possible_bytes


def log_of(subject: Subject, run: TrainingSetup, *, quick: bool = True) -> tuple[Log, str]:
    """The log of a step, and how many blocks were traced for it: some of the equal ones where `quick` and that is exact."""
    model = subject.make()
    blocks = longest_run(model, run.units)
    if not quick or blocks is None or run.optimizer == "adamw_foreach":
        return trace(subject, run), "all blocks"
    period = max(1, checkpointing_named(run.sharding.get("checkpoint_activations", "none")).every)
    later = _later(run)
    count = num_traced(blocks.count, period, later)
    if count == blocks.count:
        return trace(subject, run), "all blocks"
    whole = _num_stepped(model, run)
    short = shortened(model, blocks, count)
    grows = whole / _num_stepped(short, run)
    try:
        log = trace(replace(subject, make=lambda: short), run)
        how = Shortened(
            first_unit=blocks.first_unit,
            traced=count,
            total=blocks.count,
            period=period,
            optimizer_scale=grows,
            each=blocks.each,
            later=later,
        )
        extended = extend(log, how)
    except (IrregularError, IndexError, KeyError):
        return trace(subject, run), "all blocks"
    return extended, f"{count} of {blocks.count} equal blocks"


def _num_stepped(model: nn.Module, run: TrainingSetup) -> int:
    """Elements that a rank steps; or all of them, where it steps an equal part of each."""
    num = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if run.strategy.optim is Place.REPLICATE and run.expert_parallel > 1:
        experts = [p for module in experts_in(model).values() for p in module.parameters() if p.requires_grad]
        num -= sum(p.numel() for p in experts) * (run.expert_parallel - 1) // run.expert_parallel
    return num


def _later(run: TrainingSetup) -> int:
    """A reduce between a hybrid's groups lands two blocks later than one inside of them, a copy to the host one later."""
    return 2 * run.strategy.hybrid + (run.sharding.get("offload") is not None)


def memory_of(log: Log, enough_bytes: int | None = None) -> MemoryNeed:
    """`enough_bytes`: where what is allocated is more already, the allocator is not asked."""
    peak = peak_of(log)
    if enough_bytes is not None and peak.num_bytes > enough_bytes:
        return MemoryNeed(peak=peak, reserved_bytes={"at_least": peak.num_bytes})
    reserved = {
        "expandable_segments": reserved_bytes(log, expandable=True),
        "classic": reserved_bytes(log, expandable=False),
    }
    return MemoryNeed(peak=peak, reserved_bytes=reserved)


def step_of(log: Log, run: TrainingSetup, cluster: Cluster, rate: str = "middle", *, drawn: bool = False) -> Step:
    """A step at one of the assumed rates. `drawn`: with its stretches."""
    scale = cluster.scales.get(rate)
    secondary = run.sharding.get("secondary") or 0
    costs = costs_of(
        cluster,
        REACHED[rate],
        run.ranks,
        run.strategy.hybrid,
        run.shards,
        scale,
        secondary,
        run.expert_parallel,
    )
    return simulate(log, costs, drawn=drawn)
