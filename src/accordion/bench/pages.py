"""The result pages of `accordion bench` and its subcommands: tables and notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accordion.bench.compare import PARTS, Comparison
from accordion.bench.contenders import FLOOR, is_ours
from accordion.bench.host import HostTime, ratio_of
from accordion.pages.page import Page, Table, mebi, spread

ROUNDS = "ratios: median (lowest-highest) over rounds"
ON_CPU = "memory on CPU: storages that operators make, not their temporaries nor gloo's; reserved: the resident set"
ON_FLOOR = "floor: the step without communication, with an optimizer for one rank's share; its memory is that of whole parameters"


def of_comparison(c: Comparison, host: Mapping[str, HostTime], left_out: Mapping[str, str]) -> Page:
    """Return the page of `accordion bench`. `host`: contender -> host time, for the unsharded model ("plain") and contenders that
    shard; the cell of any other contender stays empty. `left_out`: contender that was not measured -> reason."""
    s = c.setting
    about = f"{c.num_ranks} ranks, {s.model}, batch {s.batch} x {s.seq}"
    notes = [
        f"{about}, {'bf16 over fp32' if s.bf16 else 'fp32'}, fused AdamW; {c.rounds} interleaved rounds",
        f"losses agree to {c.verdict.tolerance:g} over {max(map(len, c.verdict.losses.values()))} steps",
        "times: median (quartiles) of steps, ms, the mean over ranks; cpu: CPU time of all threads; " + ROUNDS,
        *([ON_CPU] if c.machine["device"] == "cpu" else []),
        *([ON_FLOOR] if FLOOR in c.contenders else []),
        "host time: CPU time added to a unit of 9 parameters, 8 simulated ranks; see `accordion bench host`",
        *(f"left out: {name}, {why}" for name, why in left_out.items()),
    ]
    theirs = [name for name in c.contenders if not is_ours(name)]
    rows = [name for name in c.contenders if any(a == name for a, _ in c.ratios)]
    kinds = {"step time, row / column": c.ratios, "CPU time of a step, row / column": c.cpu_ratios}
    ratios = [
        Table(
            title=title,
            columns=["", *theirs],
            rows=[[a, *(spread(of[a, b], 1, 3) if (a, b) in of else "" for b in theirs)] for a in rows],
        )
        for title, of in (kinds.items() if theirs else ())
    ]
    return Page(
        name="bench",
        notes=notes,
        tables=[_times(c, host), _sizes(c), *ratios],
        data={"comparison": c, "host": host, "left_out": left_out},
    )


def _times(c: Comparison, host: Mapping[str, HostTime]) -> Table:
    columns = (*PARTS, "step", "cpu")
    rows = [
        [
            name,
            *(spread(m.times[part], 1e3) for part in columns),
            f"{m.tokens_per_s:,.0f}",
            spread(host[name].extra, 1e6, 0) if name in host else "",
        ]
        for name, m in c.contenders.items()
    ]
    heads = ["contender", *(f"{part} ms" for part in columns), "tokens/s", "host us/unit"]
    return Table(title="time", columns=heads, rows=rows)


def _sizes(c: Comparison) -> Table:
    rows = [
        [
            name,
            *(mebi(n) for n in (m.rest_bytes, m.allocated_bytes, m.reserved_bytes, sum(m.sent_bytes.values()))),
            str(sum(m.launches.values())),
        ]
        for name, m in c.contenders.items()
    ]
    heads = ["contender", "between steps", "peak allocated", "peak reserved", "sent in a step", "collectives"]
    return Table(title="memory and bytes sent per rank, MiB", columns=heads, rows=rows)


def of_host(times: Mapping[str, HostTime], machine: dict[str, Any]) -> Page:
    """Return the page of `accordion bench host`. `times`: contender -> host time. `machine`: its hardware and versions."""
    rows = []
    peers = [name for name in times if not is_ours(name) and name != "plain"]
    for name, t in times.items():
        ratios = (f"{spread(ratio_of(times, name, peer), 1, 3)} of {peer}" for peer in peers if is_ours(name))
        added = "" if name == "plain" else spread(t.extra, 1e6, 0)
        rows.append([name, spread(t.unit, 1e6, 0), added, ", ".join(ratios)])
    return Page(
        name="host",
        notes=[
            "forward and backward of units of 9 parameters as one of 8 simulated ranks; CPU time of one thread per unit",
            "collectives do nothing and return finished work",
            "over plain: time that the engine adds to the same model; " + ROUNDS,
        ],
        tables=[Table(title="host time", columns=["contender", "us/unit", "over plain", "ratio"], rows=rows)],
        data={"machine": machine, "host": times},
    )


def of_memory(memory: Mapping[str, dict[str, int]], about: str, machine: dict[str, Any]) -> Page:
    """Return the page of `accordion bench memory`. `memory`: contender -> result of `Trainer.memory`. `about`: the page's first
    note. `machine`: its hardware and versions, from `describe`."""
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
        tables=[Table(title="memory per rank, MiB", columns=columns, rows=rows)],
        data={"machine": machine, "bytes": memory},
    )
