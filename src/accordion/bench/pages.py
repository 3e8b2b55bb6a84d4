"""The page of each subcommand: which figures stand where, in which units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accordion.bench.compare import PARTS, Comparison
from accordion.bench.contenders import OURS
from accordion.bench.host import HostTime, ratio_of
from accordion.pages.page import Chart, Page, Table, mebi, plain_data, spread
from accordion.pages.stats import extremes

ROUNDS = "ratios: median (least-most) over rounds"
ON_CPU = "bytes on CPU: storages that operators made (the inside of operators and of gloo left out); reserved: the resident set"


def of_comparison(c: Comparison, host: Mapping[str, HostTime], left_out: Mapping[str, str]) -> Page:
    s, found = c.setting, c.contenders
    over_ranks = f"{c.num_ranks} ranks, {s.model}, batch {s.batch}{'' if s.task else f' x {s.seq}'}"
    over_ranks += f", {'bf16 over fp32' if s.bf16 else 'fp32'}"
    notes = [
        f"{over_ranks}, fused AdamW; {c.rounds} interleaved rounds",
        f"losses agree to {c.verdict.tolerance:g} over {max(map(len, c.verdict.losses.values()))} steps",
        "times: median (quartiles) of steps, ms, the mean over ranks; cpu: of the process, all threads; " + ROUNDS,
        f"MFU: of {c.peak.flops / 1e12:.3f} TFLOP/s, {c.peak.source}",
        *([ON_CPU] if c.machine["device"] == "cpu" else []),
        "host time: of a unit of 9 parameters over plain, 8 simulated ranks, see `accordion bench host`",
        *(f"left out: {name}, {why}" for name, why in left_out.items()),
    ]
    columns, rate = (*PARTS, "step", "cpu"), "samples/s" if s.task else "tokens/s"
    times = Table(
        title="time",
        columns=["contender", *(f"{part} ms" for part in columns), rate, "MFU %", "host us/unit"],
        rows=[
            [
                name,
                *(spread(m.times[part], 1e3) for part in columns),
                f"{m.tokens_per_s:,.0f}",
                f"{100 * m.mfu:.1f}",
                spread(host[name].extra, 1e6, 0) if name in host else "",
            ]
            for name, m in found.items()
        ],
    )
    sizes = Table(
        title="bytes of a rank, MiB",
        columns=["contender", "between steps", "peak allocated", "peak reserved", "sent in a step", "collectives"],
        rows=[
            [
                name,
                *(mebi(n) for n in (m.rest_bytes, m.allocated_bytes, m.reserved_bytes, sum(m.sent_bytes.values()))),
                str(sum(m.launches.values())),
            ]
            for name, m in found.items()
        ],
    )
    mine = list(dict.fromkeys(a for a, _ in c.ratios))
    theirs = list(dict.fromkeys(b for _, b in c.ratios))
    ratios = [
        Table(title=title, columns=["", *theirs], rows=[[a, *(spread(of[a, b], 1, 3) for b in theirs)] for a in mine])
        for title, of in (
            ("step time, row over column", c.ratios),
            ("processor time of a step, row over column", c.cpu_ratios),
        )
    ]
    parts = {part: {n: m.times[part].median * 1e3 for n, m in found.items()} for part in PARTS}
    memory = {
        "allocated": {n: m.allocated_bytes / 2**20 for n, m in found.items()},
        "sent": {n: sum(m.sent_bytes.values()) / 2**20 for n, m in found.items()},
    }
    return Page(
        name="bench",
        title="A step under each contender",
        notes=notes,
        tables=[times, sizes, *(ratios if theirs else [])],
        charts=[
            Chart(title="step", unit="ms", kind="stacked", series=parts),
            Chart(title="bytes of a rank", unit="MiB", kind="grouped", series=memory),
        ],
        data=plain_data({"comparison": c, "host": host, "left_out": left_out}),
    )


def of_host(times: Mapping[str, dict[str, HostTime]], num_ranks: int, machine: dict[str, Any]) -> Page:
    notes = [
        f"forward and backward of units of 9 parameters as one of {num_ranks} simulated ranks; CPU time of one thread, us a unit",
        "still: collectives do nothing and return finished work; fake: torch's fake group, which copies every chunk",
        "over plain: what the engine adds to the same model without it; " + ROUNDS,
    ]
    rows, first = [], next(iter(times.values()))
    for group, found in times.items():
        for name, t in found.items():
            peers = [n for n in found if n.partition(":")[0] not in (OURS, "plain")]
            is_ours = name.partition(":")[0] == OURS
            over = ", ".join(f"{spread(ratio_of(found, name, p), 1, 3)} of {p}" for p in peers) if is_ours else ""
            added = "" if name == "plain" else spread(t.extra, 1e6, 0)
            rows.append([group, name, spread(t.unit, 1e6, 0), added, over])
    series = {group: {n: found[n].extra.median * 1e6 for n in first if n != "plain"} for group, found in times.items()}
    return Page(
        name="host",
        title="Host time of a sharded unit",
        notes=notes,
        tables=[Table(title="host time", columns=["group", "contender", "us/unit", "over plain", "ratio"], rows=rows)],
        charts=[Chart(title="host time over plain", unit="us a unit and step", kind="grouped", series=series)],
        data=plain_data({"num_ranks": num_ranks, "machine": machine, "host": times}),
    )


def of_memory(found: Mapping[str, list[dict[str, int]]], what: str, machine: dict[str, Any]) -> Page:
    """`found`: by contender, the bytes of each round."""
    peaks = {name: extremes([float(r["allocated"]) for r in rounds]) for name, rounds in found.items()}
    rests = {name: extremes([float(r["rest"]) for r in rounds]) for name, rounds in found.items()}
    peers = [name for name in found if name.partition(":")[0] != OURS]
    rows = []
    for name in found:
        rounds = [zip(found[name], found[p], strict=True) for p in peers]
        ratios = [spread(extremes([a["allocated"] / b["allocated"] for a, b in pairs]), 1, 3) for pairs in rounds]
        ratios = ratios if name.partition(":")[0] == OURS else [""] * len(peers)
        rows.append([name, spread(rests[name], 2**-20), spread(peaks[name], 2**-20), *ratios])
    series = {
        "between steps": {n: r.median / 2**20 for n, r in rests.items()},
        "in a step": {n: (peaks[n].median - rests[n].median) / 2**20 for n in found},
    }
    return Page(
        name="memory",
        title="Peak bytes of a rank",
        notes=[what, *([ON_CPU] if machine["device"] == "cpu" else []), ROUNDS],
        tables=[
            Table(
                title="bytes, MiB",
                columns=["contender", "between steps", "peak", *(f"over {p}" for p in peers)],
                rows=rows,
            )
        ],
        charts=[Chart(title="bytes of a rank", unit="MiB", kind="stacked", series=series)],
        data=plain_data({"machine": machine, "bytes": found}),
    )
