"""Growth of a step with the number of ranks: host time, memory and messages of one of up to 4096 simulated ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from accordion.bench import command
from accordion.bench.contenders import chosen
from accordion.bench.host import HostLoop, HostTime, check, summary
from accordion.bench.meters import Wire
from accordion.cli import main
from accordion.errors import UsageError
from accordion.observe.allocations import Allocations
from accordion.options import read
from accordion.pages.machine import describe
from accordion.pages.page import Page, Table, mebi, spread
from accordion.workers.ranks import RankSetup, WorkerTeam, World, interleaved

SIZES = (8, 64, 512, 4096)
BLOCKS = 16


class ScaleLoop(HostLoop):
    """A `HostLoop` that also counts the memory of its storages, and messages."""

    def __init__(self, setup: RankSetup, contender: str, rows: int, blocks: int) -> None:
        self._meter = Allocations()
        with self._meter:
            super().__init__(setup, contender, rows, blocks)

    def facts(self) -> dict[str, int]:
        """Run a step, and return a dict: bytes of storages after it ("rest") and at its "peak", bytes "sent", and "launches"."""
        with self._meter:
            self._meter.mark("start")
            with Wire() as wire:
                self._step()
            self._meter.mark("end")
        return {
            "rest": self._meter.live("end"),
            "peak": self._meter.peak("start", "end"),
            "sent": sum(wire.num_bytes.values()),
            "launches": sum(wire.launches.values()),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A model of a network that gives the time of messages. `gbps`: Gbit/s of a rank. `latency_us`: of each collective."""

    gbps: float = 400.0
    latency_us: float = 10.0

    def seconds(self, num_bytes: int, launches: int) -> float:
        """Return the seconds for `num_bytes` in `launches` collectives: bytes / bandwidth plus a latency for each collective."""
        return num_bytes * 8 / (self.gbps * 1e9) + launches * self.latency_us * 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Figures of one contender at one number of ranks. Bytes, `launches` (collectives) and `wire_s` (seconds that the `Network`
    needs for these) are of one step of one rank."""

    num_ranks: int
    host: HostTime
    rest_bytes: int
    peak_bytes: int
    sent_bytes: int
    launches: int
    wire_s: float


def grow(
    contenders: Sequence[str], sizes: Sequence[int], rounds: int, count: int, network: Network
) -> dict[str, list[Point]]:
    """Measure each contender at each number of ranks in `sizes`. Return contender -> a `Point` for each size. `count`: measured
    steps per turn. All models have enough rows for the largest number of ranks."""
    rows = max(64, *sizes)
    facts = {}
    for size in sizes:
        for name in contenders:
            with WorkerTeam(name, World(num_ranks=size, group="fake"), ScaleLoop, (name, rows, BLOCKS)) as team:
                facts[name, size] = team.ask("facts")[0]
    with ExitStack() as stack:
        keys = [("plain", sizes[0]), *((name, size) for size in sizes for name in contenders)]
        teams = [
            stack.enter_context(
                WorkerTeam(f"{name} {size}", World(num_ranks=size, group="still"), HostLoop, (name, rows, BLOCKS))
            )
            for name, size in keys
        ]
        answers = interleaved(teams, rounds, "turn", count)
    turns = {team.name: [ranks[0] for ranks in answers[team.name]] for team in teams}
    turns["plain"] = turns.pop(f"plain {sizes[0]}")
    host = summary(turns)
    return {
        name: [_point(size, host[f"{name} {size}"], facts[name, size], network) for size in sizes]
        for name in contenders
    }


def _point(size: int, host: HostTime, facts: dict[str, int], network: Network) -> Point:
    return Point(
        num_ranks=size,
        host=host,
        rest_bytes=facts["rest"],
        peak_bytes=facts["peak"],
        sent_bytes=facts["sent"],
        launches=facts["launches"],
        wire_s=network.seconds(facts["sent"], facts["launches"]),
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure how host time, memory and messages of one rank grow with the simulated ranks.

    Args:
        against: contenders next to `accordion`, separated by commas: fsdp2, fsdp1, or a strategy: accordion:shard_grad_op
        sizes: numbers of ranks, separated by commas
        gbps: bandwidth of the simulated network, Gbit/s per rank
        latency_us: latency of each collective on the simulated network
        rounds: turns of each contender, interleaved
        steps: measured steps per turn
    """

    against: str = "fsdp2"
    sizes: str = ",".join(map(str, SIZES))
    gbps: float = 400.0
    latency_us: float = 10.0
    rounds: int = 5
    steps: int = 5


def page(o: Options) -> Page:
    names, _ = chosen(o.against)
    check(names)
    try:
        sizes = [int(size) for size in o.sizes.split(",")]
    except ValueError:
        raise UsageError(f"sizes is {o.sizes!r}; it takes numbers of ranks, such as 8,64,512.") from None
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise UsageError(f"sizes is {o.sizes}; it takes different numbers of ranks, each 1 or more.")
    if not (o.gbps > 0 and o.latency_us >= 0):
        raise UsageError(
            f"gbps is {o.gbps:g} and latency_us is {o.latency_us:g}; they take more than 0, and 0 or more."
        )
    network = Network(gbps=o.gbps, latency_us=o.latency_us)
    return of_scale(grow(names, sizes, o.rounds, o.steps, network), network, describe("cpu"))


def of_scale(points: Mapping[str, Sequence[Point]], network: Network, machine: dict[str, Any]) -> Page:
    notes = [
        "the first of so many simulated ranks; host time in a group that does nothing, over plain (lowest-highest of rounds)",
        f"wire: simulated, bytes sent / {network.gbps:g} Gbit/s + {network.latency_us:g} us for each collective launched",
    ]
    rows = [
        [
            name,
            str(p.num_ranks),
            spread(p.host.extra, 1e6, 0),
            *(mebi(n) for n in (p.rest_bytes, p.peak_bytes, p.sent_bytes)),
            str(p.launches),
            f"{p.wire_s * 1e6:,.0f}",
        ]
        for name, line in points.items()
        for p in line
    ]
    columns = ["contender", "ranks", "host us/unit", "kept MiB", "peak MiB", "sent MiB", "collectives", "wire us"]
    return Page(
        name="scale",
        notes=notes,
        tables=[Table(title="growth", columns=columns, rows=rows)],
        data={"machine": machine, "network": network, "points": points},
    )


def run(words: list[str]) -> int:
    options = read(Options, words, "benchmarks/scale.py", (Options.__doc__ or "").splitlines()[0])
    return 0 if options is None else command.measure(options, page)


if __name__ == "__main__":
    sys.exit(main(run=run))
