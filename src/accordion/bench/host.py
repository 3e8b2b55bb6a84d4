"""Host time of a sharded unit: what the engine takes of the processor, with collectives that cost nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from accordion.bench.contenders import WRAPPERS
from accordion.bench.model import NineNet
from accordion.errors import UsageError
from accordion.pages.stats import Spread, extremes, quartiles
from accordion.workers.null_group import StillGroup
from accordion.workers.ranks import Seat, WorkerTeam, World, interleaved

WARM = 5
STEPS = 5  # counted steps of a turn
PEERS = ("fsdp2", "fsdp1")
Group = Literal["still", "fake"]


class HostLoop:
    """One rank of a world that does not exist, with tiny units under one contender."""

    def __init__(self, seat: Seat, contender: str, rows: int, blocks: int) -> None:
        torch.manual_seed(0)
        self._blocks = blocks
        self._model = WRAPPERS[contender](NineNet(rows, blocks), seat, False)
        self._x = torch.randn(4, 8)
        for _ in range(WARM):  # orders are learned, buffers made
            self._step()
        group: Any = dist.group.WORLD
        if isinstance(group, StillGroup):
            group.moves = False
        gc.collect()
        gc.freeze()

    def _step(self) -> None:
        self._model(self._x).sum().backward()
        for p in self._model.parameters():
            p.grad = None

    def turn(self, count: int) -> list[float]:
        """CPU seconds a unit of `count` steps (forward and backward), after one that is not counted.

        The time of this process and not of the wall: other programs of the machine do not count.
        """
        self._step()
        found = []
        for _ in range(count):
            start = time.process_time()
            self._step()
            found.append((time.process_time() - start) / self._blocks)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Of one contender in one kind of group. `unit`: seconds a unit and step; `extra`: over plain, by round."""

    unit: Spread
    extra: Spread
    by_round: list[float]


def check(contenders: Sequence[str]) -> None:
    """Raise `UsageError` for a contender that does not shard."""
    for name in contenders:
        if name in ("plain", "ddp", "deepspeed"):
            raise UsageError(
                f"host time is of engines that shard, not of {name!r}; take {', '.join(PEERS)} or a strategy."
            )


def measure(
    contenders: Sequence[str], num_ranks: int, rounds: int, groups: Sequence[Group], *, blocks: int = 32
) -> dict[str, dict[str, HostTime]]:
    """Return the host time of each contender, by kind of group, as the first of `num_ranks` ranks."""
    names = ["plain", *contenders]
    args = (max(64, num_ranks), blocks)
    times: dict[str, dict[str, HostTime]] = {}
    for group in groups:
        world = World(num_ranks=num_ranks, group=group)
        with ExitStack() as stack:
            teams = [stack.enter_context(WorkerTeam(name, world, HostLoop, (name, *args))) for name in names]
            asked = interleaved(teams, rounds, "turn", STEPS)
        times[group] = summary({name: [answers[0] for answers in asked[name]] for name in names})
    return times


def summary(turns: dict[str, list[list[float]]]) -> dict[str, HostTime]:
    """`turns`: seconds a unit, by contender and round; plain among them, over which all others are."""
    medians = {name: [quartiles(turn).median for turn in rounds] for name, rounds in turns.items()}
    found = {}
    for name, ours in medians.items():
        extra = [a - b for a, b in zip(ours, medians["plain"], strict=True)]
        found[name] = HostTime(unit=extremes(ours), extra=extremes(extra), by_round=extra)
    return found


def ratio_of(times: dict[str, HostTime], ours: str, theirs: str) -> Spread:
    """Ours over theirs, of what each adds to plain, by rounds."""
    pairs = zip(times[ours].by_round, times[theirs].by_round, strict=True)
    return extremes([a / b for a, b in pairs])
