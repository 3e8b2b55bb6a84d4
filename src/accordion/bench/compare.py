"""`accordion bench`: train the same model under each contender in its own processes, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean
from typing import Any

from accordion.bench.contenders import ALONE, ENVIRON, FLOOR, Setting, is_ours
from accordion.bench.trainer import Trainer
from accordion.pages.machine import describe
from accordion.pages.stats import Spread, Verdict, compare_losses, flat, quartiles, ratio
from accordion.workers.ranks import BenchError, WorkerTeam, World, interleaved

LOSS_STEPS = 3
STEPS = 4  # measured steps per turn
WARM = 1  # first steps of a turn, not measured, because the caches have another contender's data
TOLERANCE = {False: 1e-4, True: 1e-2}  # relative tolerance of losses by `Setting.bf16`
PARTS = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderResult:
    """The figures of one contender. Seconds are means over ranks. Each memory figure is that of the rank with the most.

    `times`: name -> spread of seconds over all measured steps; names are "forward", "backward", "optimizer", their sum "step",
    and "cpu" (CPU time of all threads). `steps`, `cpu`: [round][step] -> seconds of "step" and "cpu". `tokens_per_s`: of all
    ranks. `rest_bytes`: memory between steps. `allocated_bytes`, `reserved_bytes`: peaks. `sent_bytes`, `launches`: kind of
    collective -> bytes sent and number of collectives in a step, of the rank that sends most.
    """

    times: dict[str, Spread]
    steps: list[list[float]]
    cpu: list[list[float]]
    tokens_per_s: float
    rest_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    sent_bytes: dict[str, int]
    launches: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All figures of `accordion bench`. `contenders`: name -> figures. `ratios`, `cpu_ratios`: (this engine under one strategy,
    other contender) or (any contender, "floor") -> `steps` or `cpu` of the former divided by that of the latter, as a spread
    over rounds. `left_out`: contender that did not start -> reason. `machine`: its hardware and versions."""

    machine: dict[str, Any]
    setting: Setting
    num_ranks: int
    rounds: int
    verdict: Verdict
    contenders: dict[str, ContenderResult]
    ratios: dict[tuple[str, str], Spread]
    cpu_ratios: dict[tuple[str, str], Spread]
    left_out: dict[str, str]


def compare(
    names: Sequence[str], setting: Setting, world: World, rounds: int, make: Callable[..., Trainer]
) -> Comparison:
    """Train under each contender in `names`, compare their losses, then measure all in `rounds` interleaved turns.

    Starts the processes of `world` for each contender, and prints progress. A contender that does not start is left out, unless
    it is this engine. `make(setup, name, setting)` is called on each rank with its `RankSetup`, and returns its trainer; `make`
    is pickled by name. Raises `BenchError` if this engine does not start, if losses differ too much (before times are
    measured), or if any contender fails after its start.
    """
    with ExitStack() as stack:
        teams, left_out = [], {}
        for name in names:
            print(f"starting {name}")
            environ = ENVIRON.get(name) if world.device_type == "cpu" else None
            try:
                teams.append(stack.enter_context(WorkerTeam(name, world, make, (name, setting), environ)))
            except BenchError as error:
                if is_ours(name):
                    raise
                left_out[name] = str(error)
                print(f"left out: {error}")
        names = [team.name for team in teams]
        verdict = same_losses(teams, setting)
        print(f"losses of {LOSS_STEPS} steps agree to {verdict.tolerance:g}: {_short(verdict.losses)}")
        facts = {team.name: (team.ask("memory"), team.ask("wire")) for team in teams}
        print(f"measuring {rounds} rounds of {STEPS} steps each")
        turns = interleaved(teams, rounds, "turn", WARM, STEPS)
    tokens = world.num_ranks * setting.batch * setting.seq
    results = {name: _result(turns[name], *facts[name], tokens) for name in names}
    ours = [name for name in names if is_ours(name)]
    pairs = [(a, b) for a in names for b in names if b not in ours and (a in ours or b == FLOOR != a)]
    return Comparison(
        machine=describe(world.device_type),
        setting=setting,
        num_ranks=world.num_ranks,
        rounds=rounds,
        verdict=verdict,
        contenders=results,
        ratios={(a, b): ratio(results[a].steps, results[b].steps) for a, b in pairs},
        cpu_ratios={(a, b): ratio(results[a].cpu, results[b].cpu) for a, b in pairs},
        left_out=left_out,
    )


def same_losses(teams: Sequence[WorkerTeam], setting: Setting) -> Verdict:
    """Train each contender for `LOSS_STEPS` steps, and return the `Verdict` on their losses, which are means over ranks. Of
    contenders without communication only the first loss is compared. Raises `BenchError` if losses differ too much."""
    losses = {}
    for team in teams:
        by_rank = team.ask("losses", LOSS_STEPS)
        means = [mean(step) for step in zip(*by_rank, strict=True)]
        # Without communication ranks diverge from the second step on, so only their first loss counts.
        losses[team.name] = means[:1] if team.name in ALONE else means
    verdict = compare_losses(losses, TOLERANCE[setting.bf16])
    if verdict.wrong:
        raise BenchError(
            f"the losses of {', '.join(verdict.wrong)} differ from those of the others, so nothing is measured: {_short(losses)} "
            f"(tolerance {verdict.tolerance:g}); leave a contender out with --against, or report it."
        )
    return verdict


def _short(losses: dict[str, list[float]]) -> str:
    return "; ".join(f"{name} {' '.join(f'{v:.5f}' for v in values)}" for name, values in losses.items())


def _result(turns: list[list[Any]], memory: list[Any], wire: list[Any], tokens: int) -> ContenderResult:
    """Return one contender's figures. `turns`: [round][rank] -> result of `Trainer.turn`. `memory`, `wire`: for each rank, the
    result of the `Trainer` method of that name. `tokens`: tokens of all ranks in a step."""
    steps: dict[str, list[list[float]]] = {  # part -> round -> step: the mean over ranks
        part: [[mean(rank[i][part] for rank in turn) for i in range(len(turn[0]))] for turn in turns]
        for part in (*PARTS, "step", "cpu")
    }
    times = {part: quartiles(flat(rounds)) for part, rounds in steps.items()}
    largest = max(wire, key=lambda rank: sum(rank["bytes"].values()))
    return ContenderResult(
        times=times,
        steps=steps["step"],
        cpu=steps["cpu"],
        tokens_per_s=tokens / times["step"].median,
        rest_bytes=max(rank["rest"] for rank in memory),
        allocated_bytes=max(rank["allocated"] for rank in memory),
        reserved_bytes=max(rank["reserved"] for rank in memory),
        sent_bytes=largest["bytes"],
        launches=largest["launches"],
    )
