"""The page of each subcommand: which figures it shows, in which units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accordion.bench.compare import PARTS, Comparison
from accordion.bench.contenders import OURS
from accordion.bench.host import HostTime, ratio_of
from accordion.pages.page import Page, Table, mebi, spread

ROUNDS = "ratios: median (least-most) over rounds"
ON_CPU = "bytes on CPU: storages that operators made (the inside of operators and of gloo left out); reserved: the resident set"


def of_comparison(c: Comparison, host: Mapping[str, HostTime], left_out: Mapping[str, str]) -> Page:
    s, over = c.setting, "samples/s" if c.setting.task else "tokens/s"
    about = f"{c.num_ranks} ranks, {s.model}, batch {s.batch}{'' if s.task else f' x {s.seq}'}"
    notes = [
        f"{about}, {'bf16 over fp32' if s.bf16 else 'fp32'}, fused AdamW; {c.rounds} interleaved rounds",
        f"losses agree to {c.verdict.tolerance:g} over {max(map(len, c.verdict.losses.values()))} steps",
        "times: median (quartiles) of steps, ms, the mean over ranks; cpu: of the process, all threads; " + ROUNDS,
        f"MFU: of {c.peak_flops / 1e12:.3f} TFLOP/s, {c.peak_source}",
        *([ON_CPU] if c.machine["device"] == "cpu" else []),
        "host time: of a unit of 9 parameters over plain, 8 simulated ranks, see `accordion bench host`",
        *(f"left out: {name}, {why}" for name, why in left_out.items()),
    ]
    columns = (*PARTS, "step", "cpu")
    times = [
        [
            name,
            *(spread(m.times[part], 1e3) for part in columns),
            f"{m.tokens_per_s:,.0f}",
            f"{100 * m.mfu:.1f}",
            spread(host[name].extra, 1e6, 0) if name in host else "",
        ]
        for name, m in c.contenders.items()
    ]
    sizes = [
        [
            name,
            *(mebi(n) for n in (m.rest_bytes, m.allocated_bytes, m.reserved_bytes, sum(m.sent_bytes.values()))),
            str(sum(m.launches.values())),
        ]
        for name, m in c.contenders.items()
    ]
    mine, theirs = (list(dict.fromkeys(names)) for names in zip(*c.ratios, strict=True)) if c.ratios else ([], [])
    ratios = [
        Table(title=title, columns=["", *theirs], rows=[[a, *(spread(of[a, b], 1, 3) for b in theirs)] for a in mine])
        for title, of in (
            ("step time, row over column", c.ratios),
            ("processor time of a step, row over column", c.cpu_ratios),
        )
    ]
    head = ["contender", "between steps", "peak allocated", "peak reserved", "sent in a step", "collectives"]
    return Page(
        name="bench",
        notes=notes,
        tables=[
            Table(
                title="time",
                columns=["contender", *(f"{part} ms" for part in columns), over, "MFU %", "host us/unit"],
                rows=times,
            ),
            Table(title="bytes of a rank, MiB", columns=head, rows=sizes),
            *(ratios if theirs else []),
        ],
        data={"comparison": c, "host": host, "left_out": left_out},
    )


def of_host(times: Mapping[str, dict[str, HostTime]], machine: dict[str, Any]) -> Page:
    rows = []
    for group, by_name in times.items():
        peers = [name for name in by_name if not is_ours(name) and name != "plain"]
        for name, t in by_name.items():
            ratios = (f"{spread(ratio_of(by_name, name, peer), 1, 3)} of {peer}" for peer in peers if is_ours(name))
            added = "" if name == "plain" else spread(t.extra, 1e6, 0)
            rows.append([group, name, spread(t.unit, 1e6, 0), added, ", ".join(ratios)])
    return Page(
        name="host",
        notes=[
            "forward and backward of units of 9 parameters as one of 8 simulated ranks; CPU time of one thread, us a unit",
            "still: collectives do nothing and return finished work; fake: torch's fake group, which copies every chunk",
            "over plain: what the engine adds to the same model without it; " + ROUNDS,
        ],
        tables=[Table(title="host time", columns=["group", "contender", "us/unit", "over plain", "ratio"], rows=rows)],
        data={"machine": machine, "host": times},
    )


def of_memory(memory: Mapping[str, dict[str, int]], about: str, machine: dict[str, Any]) -> Page:
    """Return the page of `accordion bench memory`. `memory`: by contender, bytes between steps and at the peak."""
    peers = [name for name in memory if not is_ours(name)]
    rows = [
        [
            name,
            mebi(m["rest"]),
            mebi(m["allocated"]),
            *(f"{m['allocated'] / memory[peer]['allocated']:.3f}" if is_ours(name) else "" for peer in peers),
        ]
        for name, m in memory.items()
    ]
    columns = ["contender", "between steps", "peak", *(f"over {peer}" for peer in peers)]
    return Page(
        name="memory",
        notes=[about, *([ON_CPU] if machine["device"] == "cpu" else [])],
        tables=[Table(title="bytes of a rank, MiB", columns=columns, rows=rows)],
        data={"machine": machine, "bytes": memory},
    )


def is_ours(name: str) -> bool:
    """Return if a contender is this engine, under whatever strategy."""
    return name.partition(":")[0] == OURS
