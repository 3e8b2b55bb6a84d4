"""The notes and tables of a plan, for the screen."""

from __future__ import annotations

from collections.abc import Sequence

from accordion.pages.page import Page, Table
from accordion.plan.hardware import GIB, MARGIN, OUTSIDE_BYTES, TELLABLE
from accordion.plan.replay.peak import MemoryPeak
from accordion.plan.replay.timeline import TimePart, by_kind, by_unit
from accordion.plan.result import NOT_KNOWN, UNCALIBRATED, Plan, gib
from accordion.plan.search.evaluate import Candidate

SHOWN = 24  # number of candidates in the table; JSON has all
NOTHING_FITS = (
    "nothing fits: leave out flags that fix a value, so that others are tried; --gpus 8,16,32,64 names the fewest GPUs that fit, "
    "and host_memory_gib in --gpu gives offload more memory"
)


def of_plan(plan: Plan, shows_free: bool = False) -> Page:
    """Return a plan as a page of notes and tables. `shows_free`: add a table of free GPU memory, if that is known."""
    tables, memory = [_verdict(plan)], plan.chosen.memory
    if shows_free and plan.free_bytes:
        rows = [[phase, gib(num_bytes)] for phase, num_bytes in plan.free_bytes.items()]
        tables.append(Table(title="free beside the inference engine", columns=["while", "GiB"], rows=rows))
    if memory is not None:
        tables += [*_time(plan), *_memory(memory.peak)]
    tables.append(_candidates(plan))
    return Page(name="plan", notes=_notes(plan), tables=tables)


def _verdict(plan: Plan) -> Table:
    c = plan.chosen
    rows = [["verdict", plan.verdict], ["configuration", str(c.choice)], ["planned for", plan.planned_for]]
    if c.memory is not None and c.steps is not None:
        reserved, peak = sorted(c.memory.reserved_bytes.values()), c.memory.peak
        needed, possible = c.memory.needed_bytes, c.memory.possible_bytes
        more = f", {gib(possible)} if {peak.unsure_operator} allocates the most it may" if possible > needed else ""
        rates = {name: c.tokens_per_s(plan.space.tokens, name) for name in c.steps}
        rows += [
            ["allocated, peak", f"{gib(peak.num_bytes)} GiB"],
            ["reserved, peak", f"{gib(reserved[0])} to {gib(reserved[-1])} GiB, depending on expandable_segments"],
            ["GPU memory needed", f"{gib(needed)} of {gib(plan.cluster.card_bytes)} GiB{more}"],
            ["step, uncalibrated", _range([s.seconds for s in c.steps.values()], "s")],
            ["of it waiting", _range([s.exposed_s for s in c.steps.values()], "s")],
            [f"{plan.task.counted}/s per GPU", _range(list(rates.values()), "")],
            ["MFU", _range([plan.mfu(c, name) * 100 for name in c.steps], "%")],
        ]
    cost = plan.run_cost
    if cost is not None:
        name = f"{plan.workload.tokens:,.0f} {plan.task.counted} take"
        rows.append([name, ", ".join(_range(values, key.replace("gpu_", "GPU-")) for key, values in cost.items())])
    if c.host_bytes:
        rows.append(["host memory of a machine", f"{gib(c.host_bytes)} of {gib(plan.cluster.host_bytes)} GiB"])
    if c.disk_bytes:
        rows.append(["on the disk of a machine", f"{gib(c.disk_bytes)} GiB"])
    if plan.found.fewest is not None:
        rows.append(["fewest GPUs that fit", str(plan.found.fewest.choice)])
    title = f"{plan.task.name}, {plan.num_params:,} parameters, on {plan.cluster.gpu.name}"
    return Table(title=title, columns=["", ""], rows=rows)


def _time(plan: Plan) -> list[Table]:
    """Return two tables of the step's time at middle rates, by kind of work and by unit; [] if the step was not traced."""
    steps = plan.chosen.steps
    if steps is None or plan.log is None:
        return []
    step = steps["middle"]

    def share(part: TimePart) -> str:
        return "other stream" if part.hidden else f"{part.seconds / step.seconds:.0%}"

    kinds = [[p.name, _ms(p.seconds), share(p)] for p in by_kind(step)]
    units = [[p.name, _ms(p.seconds), _ms(p.waited), share(p)] for p in by_unit(step, plan.log.units)]
    return [
        Table(title="where the time goes, by kind", columns=["", "ms", "of the step"], rows=kinds),
        Table(title="where the time goes, by unit", columns=["", "ms", "waiting", "of the step"], rows=units),
    ]


def _ms(seconds: float) -> str:
    return _digits(seconds * 1e3) if seconds else "0"


def _range(values: Sequence[float], unit: str) -> str:
    """Return text such as "1.2 to 1.5 s": the least and the largest of `values`, rounded to about 3 digits."""
    low, high = min(values), max(values)
    return f"{_digits(low)} to {_digits(high)} {unit}".rstrip()


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _gib(num_bytes: int) -> str:
    return gib(num_bytes) if num_bytes >= 10 * GIB else f"{num_bytes / GIB:.3f}"


def _memory(peak: MemoryPeak) -> list[Table]:
    """Return the tables of the bytes by category, and of the largest allocations that are live at the peak."""
    rows = [[key, _gib(value), _gib(peak.highest[key])] for key, value in peak.breakdown.items()]
    rows.append(["all", _gib(peak.num_bytes), ""])
    place = " ".join(part for part in (peak.phase, peak.unit, peak.operator) if part)
    title = f"where the bytes go; the peak is at {place}"
    live = [[h.operator, h.category, str(h.count), _gib(h.num_bytes)] for h in peak.live[:8]]
    return [
        Table(title=title, columns=["", "at the peak, GiB", "most, GiB"], rows=rows),
        Table(title="live at the peak, by operator", columns=["allocated by", "for", "tensors", "GiB"], rows=live),
    ]


def _candidates(plan: Plan) -> Table:
    order = sorted(plan.found.candidates, key=lambda c: (not c.fits, -_speed(plan, c), c.needed_bytes))
    rows = []
    for c in order[:SHOWN]:
        times = ["", ""]
        if c.steps is not None:
            times = [_digits(c.steps["middle"].seconds), _digits(_speed(plan, c))]
        need = gib(c.needed_bytes)
        if c.memory is None or "at_least" in c.memory.reserved_bytes:  # a lower bound
            need = f"over {need}" if c.needed_bytes > GIB // 10 else ""
        rows.append([str(c.choice), need, *times, "chosen" if c is plan.found.best else c.why])
    left = len(order) - len(rows)
    title = "configurations" + (f" ({left} more in --json)" if left > 0 else "")
    columns = ["", "needs GiB", "step s", f"{plan.task.counted}/s per GPU", "why not"]
    return Table(title=title, columns=columns, rows=rows)


def _speed(plan: Plan, c: Candidate) -> float:
    return 0.0 if c.steps is None else c.tokens_per_s(plan.space.tokens)


def _notes(plan: Plan) -> list[str]:
    assumed = plan.assumptions()
    notes = [
        *([] if plan.fits else [NOTHING_FITS]),
        *plan.task.remarks,
        f"fits: reserved x {MARGIN} + {OUTSIDE_BYTES / GIB:.0f} GiB (context, NCCL) is below the GPU's memory",
        f"torch {assumed['torch']}, {plan.space.optimizer}; GPU: {plan.cluster.gpu.source}",
        f"efficiency: {plan.cluster.gpu.efficiency_is}",
        f"times are {UNCALIBRATED}; choices closer than {TELLABLE:.0%} count as equal",
    ]
    if plan.is_tight:
        lost = "published runs lost 15 to 35 % of their speed there, to the allocator"
        notes.insert(0, f"less than 2 GiB of the GPU is left: {lost}")
    notes.append(assumed["host"])
    if plan.log is not None:
        notes += [f"traced instead of {name}: {what}" for name, what in plan.log.substituted.items()]
        notes += [f"not modelled: {name}: {what}" for name, what in plan.log.unmodelled.items()]
    return [*notes, NOT_KNOWN]
