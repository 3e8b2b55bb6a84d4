"""Host time of a sharded unit: CPU time of the engine, with collectives that do nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accordion.bench.contenders import WRAPPERS
from accordion.bench.model import NineNet
from accordion.errors import UsageError
from accordion.pages.stats import Spread, extremes, quartiles
from accordion.workers.ranks import RankSetup, StillGroup, WorkerTeam, World, interleaved

WARM = 5
STEPS = 5  # measured steps per turn
PEERS = ("fsdp2", "fsdp1")


class HostLoop:
    """Steps (forward and backward) of a model of `blocks` tiny units on one simulated rank, sharded as `contender` does; `turn`
    measures them. A `WorkerTeam` takes the class as `make`. `rows`: rows of each parameter. The constructor runs `WARM` steps.
    Afterwards collectives of a `StillGroup` copy nothing, and garbage collections ignore the objects that exist by then."""

    def __init__(self, setup: RankSetup, contender: str, rows: int, blocks: int) -> None:
        torch.manual_seed(0)
        self._blocks = blocks
        self._model = WRAPPERS[contender](NineNet(rows, blocks), setup, False)
        self._x = torch.randn(4, 8)
        for _ in range(WARM):  # the engine learns the order of units and allocates buffers
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
        """Run one unmeasured step, then `count` measured ones. Return the CPU seconds per unit of each measured step."""
        self._step()
        times = []
        for _ in range(count):
            start = time.process_time()  # of this process only: other programs on the machine do not count
            self._step()
            times.append((time.process_time() - start) / self._blocks)
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Host time of one contender in CPU seconds per unit and step: spreads over rounds of each round's median step. `unit`: all
    of it. `extra`: the time that the contender adds to the unsharded model ("plain"). `by_round`: `extra` in each round."""

    unit: Spread
    extra: Spread
    by_round: list[float]


def check(contenders: Sequence[str]) -> None:
    """Raise `UsageError` if one of `contenders` does not shard, or cannot be simulated (deepspeed)."""
    for name in contenders:
        if name in ("plain", "ddp", "deepspeed", "floor"):
            raise UsageError(
                f"host time is measured for engines that shard, not for {name!r}; take {', '.join(PEERS)} or a strategy."
            )


def measure(contenders: Sequence[str], num_ranks: int, rounds: int, *, blocks: int = 32) -> dict[str, HostTime]:
    """Measure the host time of "plain" and of `contenders`, each as rank 0 of `num_ranks` simulated ranks in a new process, with
    a model of `blocks` units, in interleaved rounds. Returns contender or "plain" -> time. Raises `BenchError` if one fails."""
    names, args = ["plain", *contenders], (max(64, num_ranks), blocks)
    world = World(num_ranks=num_ranks, group="still")
    with ExitStack() as stack:
        teams = [stack.enter_context(WorkerTeam(name, world, HostLoop, (name, *args))) for name in names]
        turns = interleaved(teams, rounds, "turn", STEPS)
    return summary({name: [answers[0] for answers in turns[name]] for name in names})


def summary(turns: dict[str, list[list[float]]]) -> dict[str, HostTime]:
    """Return contender -> host time. `turns`: contender (including "plain") -> round -> CPU seconds per unit of each step."""
    medians = {name: [quartiles(turn).median for turn in rounds] for name, rounds in turns.items()}
    times = {}
    for name, ours in medians.items():
        extra = [a - b for a, b in zip(ours, medians["plain"], strict=True)]
        times[name] = HostTime(unit=extremes(ours), extra=extremes(extra), by_round=extra)
    return times


def ratio_of(times: Mapping[str, HostTime], ours: str, theirs: str) -> Spread:
    """Return the spread over rounds of (host time that `ours` adds to "plain") / (host time that `theirs` adds). `ours`,
    `theirs`: contenders, keys of `times`."""
    pairs = zip(times[ours].by_round, times[theirs].by_round, strict=True)
    return extremes([a / b for a, b in pairs])
