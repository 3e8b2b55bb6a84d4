"""Part (a): step time, MFU and memory of one rank, beside no sharding and FSDP2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from accordion.bench.contenders import OURS
from accordion.bench.gpu.cases import Case, params_of, step_flops
from accordion.bench.gpu.findings import Findings, not_run
from accordion.bench.gpu.turns import NAMES, over_plain, turns_of
from accordion.pages.machine import describe, known_peak_flops
from accordion.pages.page import Table, spread
from accordion.pages.stats import compare_losses, extremes, flat, quartiles

BF16_TOLERANCE = 2e-2  # of losses, relative
GIB = 2**30


def one_rank(case: Case, device: str, rounds: int, steps: int, out: Findings) -> None:
    """(a) Step time, MFU and memory of one rank."""
    # Masters take twice the memory, and three contenders are alive at once: half the layers.
    halved = replace(case.preset, layers=max(1, case.preset.layers // 2))
    peak = known_peak_flops(describe(device)["device"], bf16=True)
    if not peak:
        out.tell_not("MFU: nobody knows this device's peak rate; that of NVIDIA's cards of a datacentre is known")
    for name, one in {"bf16": case, "fp32 masters": replace(case, preset=halved, masters=True)}.items():
        found = out.data[name] = turns_of(dict.fromkeys(NAMES, one), device, rounds, steps, out)
        title = f"(a) one rank, {name}, {params_of(one.preset) / 1e9:.2f} B, batch {one.batch} x {one.seq}"
        columns = ["", "step ms", "MFU %", "over plain", "of what FSDP2 adds", "host ms", "peak GiB", "third loss"]
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
        rows.append(
            [name, spread(step, 1e3, 2), mfu, over_plain(found, name), share, f"{f['host_ms']:.2f}", memory, loss]
        )
    return rows


def added(found: Mapping[str, Any]) -> list[float]:
    """What ours adds to plain over what FSDP2 adds, by round."""
    by_round = {n: [quartiles(turn).median for turn in f["steps"]] for n, f in found.items()}
    plain, ours, theirs = by_round["plain"], by_round[OURS], by_round["fsdp2"]
    return [(a - p) / (b - p) if b != p else 0.0 for p, a, b in zip(plain, ours, theirs, strict=True)]
