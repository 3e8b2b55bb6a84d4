"""How a step grows with the ranks: host time, memory and messages as one of up to thousands of simulated ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from accordion.bench.host import HostLoop, HostTime, summary
from accordion.workers.ranks import WorkerTeam, World, interleaved

SIZES = (8, 64, 512, 4096)
BLOCKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The wire that is simulated: nobody sends anything."""

    gbps: float = 400.0
    latency_us: float = 10.0

    def seconds(self, num_bytes: int, launches: int) -> float:
        """Bytes over bandwidth, and a latency for each launch."""
        return num_bytes * 8 / (self.gbps * 1e9) + launches * self.latency_us * 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One contender at one number of ranks; bytes and launches of one step of one rank."""

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
    """By contender: a point for each number of ranks. The model is the same for all of them, with rows for the most ranks."""
    rows = max(64, *sizes)
    facts = {}
    for size in sizes:
        for name in contenders:
            with WorkerTeam(name, World(num_ranks=size, group="fake"), HostLoop, (name, rows, BLOCKS)) as team:
                facts[name, size] = team.ask("facts")[0]
    with ExitStack() as stack:
        keys = [("plain", sizes[0]), *((name, size) for size in sizes for name in contenders)]
        teams = [
            stack.enter_context(
                WorkerTeam(f"{name} {size}", World(num_ranks=size, group="still"), HostLoop, (name, rows, BLOCKS))
            )
            for name, size in keys
        ]
        asked = interleaved(teams, rounds, "turn", count)
    turns = {team.name: [answers[0] for answers in asked[team.name]] for team in teams}
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
