"""Parts (a) and (e) of `gpu.py`: contenders in interleaved turns on one rank, of which some may not run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from gpu_found import Findings, not_run
from gpu_programs import Case, shape_trainer

from accordion.bench.contenders import OURS
from accordion.bench.machine import describe, known_peak_flops
from accordion.bench.page import Table, spread
from accordion.bench.ranks import BenchError, Team
from accordion.bench.stats import compare_losses, extremes, flat, quartiles, ratio
from accordion.train.config import Preset

NAMES = ("plain", OURS, "fsdp2")
BF16_TOLERANCE = 2e-2  # of losses, relative
GIB = 2**30


def params_of(p: Preset) -> int:
    """Parameters of a Llama of that shape."""
    head = p.hidden // p.heads
    attention = 2 * p.hidden**2 + 2 * p.hidden * p.kv_heads * head
    return p.layers * (attention + 3 * p.hidden * p.mlp + 2 * p.hidden) + 2 * p.vocab * p.hidden + p.hidden


def step_flops(case: Case) -> float:
    """Of one step of one rank, as MFU counts: 6 a parameter and token (head included, embedding not), causal attention halved."""
    p, tokens = case.preset, case.batch * case.seq
    return 6 * tokens * (params_of(p) - p.vocab * p.hidden) + 6 * p.layers * tokens * case.seq * p.hidden


def turns_of(cases: Mapping[str, Case], device: str, rounds: int, steps: int, out: Findings) -> dict[str, Any]:
    """Interleaved turns; a key is a contender, or a contender, a blank and what is particular. One that fails is told of."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        teams: list[Team] = []
        for name, case in cases.items():
            start = time.perf_counter()
            try:
                team = stack.enter_context(Team(name, out.world(device), shape_trainer, (name.split()[0], case)))
                found[name] = {"losses": team.ask("losses", 3)[0], "started_s": time.perf_counter() - start}
                found[name] |= {"memory": team.ask("memory")[0], "turns": []}
                teams.append(team)
            except BenchError as error:
                found[name] = out.fail(name, error)
        for _ in range(rounds):
            for team in list(teams):
                try:
                    found[team.name]["turns"].append(team.ask("turn", 2, steps)[0])
                except BenchError as error:
                    found[team.name] = out.fail(team.name, error)
                    teams.remove(team)
    for one in found.values():
        if "failed" not in one:
            turns = one.pop("turns")
            one["steps"] = [[t["step"] for t in turn] for turn in turns]
            one["host_ms"] = 1e3 * quartiles([t["host"] for turn in turns for t in turn]).median
    return found


def one_rank(case: Case, device: str, rounds: int, steps: int, out: Findings) -> None:
    """(a) Step time, MFU and memory of one rank."""
    # Masters take twice the memory, and three contenders are alive at once: half the layers.
    halved = replace(case.preset, layers=max(1, case.preset.layers // 2))
    for name, one in {"bf16": case, "fp32 masters": replace(case, preset=halved, masters=True)}.items():
        found = out.data[name] = turns_of(dict.fromkeys(NAMES, one), device, rounds, steps, out)
        title = f"(a) one rank, {name}, {params_of(one.preset) / 1e9:.2f} B, batch {one.batch} x {one.seq}"
        columns = ["", "step ms", "MFU %", "over plain", "of what FSDP2 adds", "host ms", "peak GiB", "third loss"]
        peak = known_peak_flops(describe(device)["device"], bf16=True)
        out.keep(Table(title=title, columns=columns, rows=_rows(found, one, peak, columns)))


def _rows(found: Mapping[str, Any], case: Case, peak: float | None, columns: Sequence[str]) -> list[list[str]]:
    rows, ran = [], {name: f for name, f in found.items() if "failed" not in f}
    wrong = compare_losses({name: f["losses"] for name, f in ran.items()}, BF16_TOLERANCE).wrong if ran else []
    for name, f in found.items():
        if name not in ran:
            rows.append(not_run(name, f, columns))
            continue
        step = quartiles(flat(f["steps"]))
        mfu = f"{100 * step_flops(case) / step.median / peak:.1f}" if peak else "peak unknown"
        share = spread(extremes(added(found)), 1, 3) if name == OURS and len(ran) == len(NAMES) else ""
        loss = f"{f['losses'][-1]:.4f}{' WRONG' if name in wrong else ''}"
        memory = f"{f['memory']['allocated'] / GIB:.2f}"
        rows.append([name, spread(step, 1e3, 2), mfu, _over(found, name), share, f"{f['host_ms']:.2f}", memory, loss])
    return rows


def _over(found: Mapping[str, Any], name: str) -> str:
    """Its step over that of plain, of the same kind."""
    base = found["plain" + name.removeprefix(name.split()[0])]
    return "" if "failed" in base else spread(ratio(found[name]["steps"], base["steps"]), 1, 4)


def added(found: Mapping[str, Any]) -> list[float]:
    """What ours adds to plain over what FSDP2 adds, by round."""
    by_round = {n: [quartiles(turn).median for turn in f["steps"]] for n, f in found.items()}
    plain, ours, theirs = by_round["plain"], by_round[OURS], by_round["fsdp2"]
    return [(a - p) / (b - p) if b != p else 0.0 for p, a, b in zip(plain, ours, theirs, strict=True)]


def compiled(case: Case, compiler: str, device: str, rounds: int, steps: int, out: Findings) -> None:
    """(e) Blocks compiled and not."""
    case = replace(case, preset=replace(case.preset, layers=max(1, case.preset.layers // 4)))
    cases = dict.fromkeys(NAMES, case) | {f"{n} compiled": replace(case, compiled=compiler) for n in NAMES}
    found = turns_of(cases, device, rounds, steps, out)
    columns = ["", "step ms", "over plain", "start and 3 steps, s", "third loss"]
    rows = [
        not_run(name, f, columns)
        if "failed" in f
        else [
            name,
            spread(quartiles(flat(f["steps"])), 1e3, 2),
            _over(found, name),
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
