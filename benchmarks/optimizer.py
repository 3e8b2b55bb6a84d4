"""Time clipping and the optimizer step on shards, compared with the same optimizer on plain tensors of the same sizes."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.bench import command
from accordion.bench.contenders import Setting, optimizer_of, ours
from accordion.bench.model import batch_of, loss_of, shape_of
from accordion.bench.pages import ROUNDS
from accordion.cli import main
from accordion.optimizers.wrap import clip_grad_norm_, wrap_optimizer
from accordion.options import read
from accordion.pages.machine import describe
from accordion.pages.page import Page, Table, spread
from accordion.pages.stats import flat, quartiles, ratio
from accordion.workers.ranks import BenchError, RankSetup, WorkerTeam, interleaved

KINDS = ("accordion", "local", "dtensor")
MAX_NORM = 1.0
SAME_NORM = 1e-4


class OptimizerLoop:
    """One rank that clips gradients and steps fused AdamW, with constant gradients. `kind`: "accordion": on shards, with this
    library; "local": on plain copies of the shards; "dtensor": on shards, with torch's operators on DTensors."""

    def __init__(self, setup: RankSetup, kind: str, setting: Setting) -> None:
        torch.manual_seed(setting.seed)
        shape = shape_of(setting.model)
        self._kind, self._model = kind, ours(shape.make(), setup, setting.bf16)
        tokens, targets = batch_of(0, setup.rank, (setting.batch, setting.seq), shape.vocab)
        loss_of(self._model(tokens), targets).backward()
        self._params: list[nn.Parameter] = list(self._model.parameters())
        if kind == "local":
            self._params = [_clone(p) for p in self._params]
        self._norm = 0.0
        self._optimizer = optimizer_of(self._params, setting)
        if kind == "accordion":
            self._optimizer = wrap_optimizer(self._optimizer)

    def turn(self, warm: int, count: int) -> list[tuple[float, float]]:
        """Clip and step `warm` times, then `count` times more, and return (wall, CPU) seconds of each of these. Collective."""
        times = []
        for _ in range(warm + count):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            norm = self._clip()
            self._optimizer.step()
            times.append((time.perf_counter() - start, time.process_time() - cpu))
            self._norm = self._norm or float(norm)
        return times[warm:]

    def norm(self) -> float:
        """Return the gradient norm that the first clip computed; later clips see gradients that are clipped already."""
        return self._norm

    def _clip(self) -> Tensor:
        if self._kind == "accordion":
            return clip_grad_norm_(self._model, MAX_NORM)
        if self._kind == "dtensor":
            norm = nn.utils.clip_grad_norm_(self._params, MAX_NORM, foreach=True)
            assert isinstance(norm, DTensor)
            full: Tensor = norm.full_tensor()
            return full
        grads = [p.grad for p in self._params if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(list(_torch.foreach_norm(grads))))
        power = norm.square()
        dist.all_reduce(power)
        norm = power.sqrt()
        _torch.foreach_mul_(grads, torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0))
        return norm  # type: ignore[no-any-return]


def _clone(p: nn.Parameter) -> nn.Parameter:
    local = nn.Parameter(_torch.local_of(p).detach().clone())
    assert p.grad is not None
    local.grad = _torch.local_of(p.grad).clone()
    return local


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure clipping and a step of fused AdamW on shards, compared with local clones and with DTensors.

    Args:
        model: as for accordion bench
        nproc: number of CPU ranks
        rounds: turns of each, interleaved
        steps: measured steps per turn
    """

    model: str = "gpt-30m"
    nproc: int = 2
    rounds: int = 7
    steps: int = 10


def page(o: Options) -> Page:
    world, shape = command.world_of(o.nproc, "cpu"), shape_of(o.model)
    setting = Setting(model=o.model, batch=shape.batch, seq=shape.seq)
    with ExitStack() as stack:
        teams = [stack.enter_context(WorkerTeam(kind, world, OptimizerLoop, (kind, setting))) for kind in KINDS]
        turns = interleaved(teams, o.rounds, "turn", 2, o.steps)
        norms = {team.name: team.ask("norm")[0] for team in teams}
    difference = max(norms.values()) - min(norms.values())
    if not difference <= SAME_NORM * max(norms.values()):
        raise BenchError(f"the norms of the gradients differ, so nothing is compared: {norms}.")
    wall, cpu = (
        {
            kind: [[max(rank[i] for rank in step) for step in zip(*turn, strict=True)] for turn in turns[kind]]
            for kind in KINDS
        }
        for i in range(2)
    )
    what = (
        f"{o.model}, fused AdamW, gradients clipped to 1, {world.num_ranks} ranks on CPU; the slowest rank of each step"
    )
    return of_optimizer(wall, cpu, what, describe("cpu"))


def of_optimizer(
    wall: Mapping[str, list[list[float]]], cpu: Mapping[str, list[list[float]]], what: str, machine: dict[str, Any]
) -> Page:
    """Return the result page. `wall`, `cpu`: kind -> [round][step] seconds. `what`: first note. `machine`: from `describe`."""
    names = {
        "accordion": "wrap_optimizer(AdamW) and accordion.clip_grad_norm_",
        "local": "AdamW and foreach norm on local clones, one scalar all-reduce",
        "dtensor": "AdamW and torch's clip_grad_norm_ on DTensors",
    }
    ratios = {
        kind: {name: ratio(turns[name], turns["local"]) for name in names if name != "local"}
        for kind, turns in (("wall", wall), ("cpu", cpu))
    }
    times = {name: quartiles(flat(rounds)) for name, rounds in wall.items()}
    rows = [
        [
            name,
            what,
            spread(times[name], 1e3, 2),
            *(spread(r[name], 1, 3) if name in r else "" for r in ratios.values()),
        ]
        for name, what in names.items()
    ]
    columns = ["", "what", "ms", "over local", "CPU time over local"]
    return Page(
        name="optimizer",
        notes=[what, "median (quartiles); " + ROUNDS],
        tables=[Table(title="clip and step", columns=columns, rows=rows)],
        data={"machine": machine, "wall": wall, "cpu": cpu, "ratios": ratios},
    )


def run(words: list[str]) -> int:
    options = read(Options, words, "benchmarks/optimizer.py", (Options.__doc__ or "").splitlines()[0])
    return 0 if options is None else command.measure(options, page)


if __name__ == "__main__":
    sys.exit(main(run=run))
