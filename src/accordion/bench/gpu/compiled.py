"""Part (e): blocks compiled and not."""

from __future__ import annotations

from dataclasses import replace

from accordion.bench.gpu.cases import Case, params_of
from accordion.bench.gpu.findings import Findings, not_run
from accordion.bench.gpu.turns import NAMES, over_plain, turns_of
from accordion.pages.page import Table, spread
from accordion.pages.stats import flat, quartiles


def compiled(case: Case, compiler: str, device: str, rounds: int, steps: int, out: Findings) -> None:
    """(e) Blocks compiled and not."""
    case = replace(case, preset=replace(case.preset, layers=max(1, case.preset.layers // 4)))
    cases = dict.fromkeys(NAMES, case) | {f"{n} compiled": replace(case, compiled=compiler) for n in NAMES}
    found = turns_of(cases, device, rounds, steps, out)
    if compiler != "inductor":
        out.tell_not(
            f"time of compiled kernels: --tiny compiles with {compiler}, which makes none; without it Inductor does"
        )
    columns = ["", "step ms", "over plain", "start and 3 steps, s", "third loss"]
    rows = [
        not_run(name, f, columns)
        if "failed" in f
        else [
            name,
            spread(quartiles(flat(f["steps"])), 1e3, 2),
            over_plain(found, name),
            f"{f['started_s']:.1f}",
            f"{f['losses'][-1]:.4f}",
        ]
        for name, f in found.items()
    ]
    out.data |= found
    out.keep(
        Table(
            title=f"(e) blocks compiled ({compiler}) and not, {params_of(case.preset) / 1e9:.2f} B",
            columns=columns,
            rows=rows,
        )
    )
