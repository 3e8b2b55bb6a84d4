"""Part (b): memory and time of one of many simulated ranks, as a job of several nodes has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accordion.bench.contenders import OURS
from accordion.bench.gpu.cases import Case, params_of, shape_trainer
from accordion.bench.gpu.findings import Findings
from accordion.pages.page import Table, spread
from accordion.pages.stats import quartiles
from accordion.workers.ranks import BenchError, WorkerTeam

GIB = 2**30
STATE_BYTES = 12  # a parameter: 2 of itself, 2 of its gradient, 8 of the optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A shape as one of `num_ranks`. `seconds`: thought to be enough on an H100, for ours and FSDP2 together."""

    shape: str
    case: Case
    num_ranks: int
    seconds: float = 0.0


def simulated(todo: Sequence[Row], device: str, out: Findings) -> None:
    """(b) Peak memory and compute-side time as one of many ranks, one contender at a time on the device.

    Ranks of more than one node of 8 reduce as such a job does. Both sum in float32. Nothing is sent: gathers of the fake group
    copy one chunk for each rank, and the host's time for these is in the step's.
    """
    columns = [
        "shape",
        "ranks",
        "",
        "12 B a parameter, GiB",
        "held GiB",
        "peak GiB",
        "reserved GiB",
        "step ms",
        "peak ratio",
    ]
    title = "(b) one of many simulated ranks, nodes of 8, bf16 summed in float32, optimizer of 8 bytes a parameter, recomputed"
    rows: list[list[str]] = []
    for row in todo:
        if out.has(row.seconds):
            here = {name: alone(name, row.case, row.num_ranks, device, out) for name in (OURS, "fsdp2")}
            out.data[f"{row.shape} at {row.num_ranks}"] = here
            rows.extend(_rows(row, here))
        else:
            rows.append([row.shape, str(row.num_ranks), "left out: no time; --parts b", *[""] * 6])
        out.keep(Table(title=title, columns=columns, rows=list(rows)))


def _rows(row: Row, here: Mapping[str, Any]) -> list[list[str]]:
    state = STATE_BYTES * params_of(row.case.preset) / row.num_ranks / GIB
    peaks = {name: f["memory"]["allocated"] for name, f in here.items() if "memory" in f}
    over = f"{peaks[OURS] / peaks['fsdp2']:.3f}" if len(peaks) == 2 and peaks["fsdp2"] else ""
    rows = []
    for name, f in here.items():
        if "failed" in f:
            cells = ["does not run: " + f["failed"][:90], "", "", ""]
        else:
            sizes_gib = [f"{f['memory'][key] / GIB:.2f}" for key in ("rest", "allocated", "reserved")]
            cells = [*sizes_gib, spread(quartiles(f["steps"]), 1e3, 1)]
        rows.append([row.shape, str(row.num_ranks), name, f"{state:.2f}", *cells, over if name == OURS else ""])
    return rows


def alone(name: str, case: Case, num_ranks: int, device: str, out: Findings) -> dict[str, Any]:
    try:
        with WorkerTeam(name, out.world(device, num_ranks, group="fake"), shape_trainer, (name, case)) as team:
            team.ask("losses", 2)
            memory, times = team.ask("memory")[0], team.ask("turn", 0, 3)[0]
    except BenchError as error:
        if "OutOfMemoryError" in str(error):  # a result
            return {"failed": str(error)[:300]}
        return out.fail(f"{name} at {num_ranks}", error)
    return {"memory": memory, "steps": [t["step"] for t in times]}
