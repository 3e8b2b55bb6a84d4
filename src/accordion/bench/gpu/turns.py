"""Contenders in interleaved turns on one rank, of which some may not run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from accordion.bench.contenders import OURS
from accordion.bench.gpu.cases import Case, shape_trainer
from accordion.bench.gpu.findings import Findings
from accordion.pages.page import spread
from accordion.pages.stats import quartiles, ratio
from accordion.workers.ranks import BenchError, WorkerTeam

NAMES = ("plain", OURS, "fsdp2")


def turns_of(cases: Mapping[str, Case], device: str, rounds: int, steps: int, out: Findings) -> dict[str, Any]:
    """Interleaved turns; a key is a contender, or a contender, a blank and what is particular. One that fails is told of."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        teams: list[WorkerTeam] = []
        for name, case in cases.items():
            start = time.perf_counter()
            try:
                team = stack.enter_context(WorkerTeam(name, out.world(device), shape_trainer, (name.split()[0], case)))
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


def over_plain(found: Mapping[str, Any], name: str) -> str:
    """Its step over that of plain, of the same kind."""
    base = found["plain" + name.removeprefix(name.split()[0])]
    return "" if "failed" in base else spread(ratio(found[name]["steps"], base["steps"]), 1, 4)
