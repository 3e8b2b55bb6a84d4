"""Part (f): what the planner says of one rank, beside what the device then counts and the clock shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import accordion as acc
from accordion.bench.contenders import OURS
from accordion.bench.gpu.cases import BF16, Case, shape_trainer
from accordion.bench.gpu.findings import Findings
from accordion.bench.gpu.measure import MeasureSizes, measured
from accordion.bench.model import Llama, batch_of, loss_of
from accordion.pages.machine import describe
from accordion.pages.page import Table
from accordion.pages.stats import quartiles
from accordion.plan.hardware import GIB, GPUS, REACHED, Cluster, Gpu
from accordion.plan.replay.predict import MemoryNeed, memory_of, step_of
from accordion.plan.trace.setup import Subject, TrainingSetup
from accordion.plan.trace.trace import trace
from accordion.workers.ranks import BenchError, WorkerTeam


def subject_of(case: Case) -> Subject:
    """What `shape_trainer` trains, without memory."""

    def make() -> nn.Module:
        with torch.device("meta"):
            return Llama(case.preset, recompute=case.recompute).train()

    return Subject(
        make=make,
        batch=lambda: batch_of(0, 0, (case.batch, case.seq), case.preset.vocab),
        loss=lambda model, batch: loss_of(model(batch[0]), batch[1]),
    )


def card_of(device: str, sizes: MeasureSizes | None = None) -> Gpu:
    """The card of this machine as the planner's table has it; one that it has not, and a CPU, is measured, with `sizes`."""
    if device != "cpu":
        name = describe(device)["device"].lower().replace(" ", "")
        memory_gib = torch.accelerator.get_memory_info()[1] / GIB
        known = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in name]
        if known:
            return replace(min(known, key=lambda gpu: abs(gpu.memory_gib - memory_gib)), memory_gib=memory_gib)
    return Gpu(**measured(device, 1, sizes)["card"])


def planned(cases: Sequence[Case], card: MeasureSizes | None, device: str, steps: int, out: Findings) -> None:
    """Masters in float32, bf16 inside, fused AdamW. The first size's measured step calibrates the times of the others.

    `card`: with which sizes a card is measured that the planner does not know; None for those of `accordion bench machine`.
    """
    run = TrainingSetup(ranks=1, node=1, sharding={"precision": acc.Precision(params=BF16)}, device=device)  # type: ignore[arg-type]
    cluster, rows = Cluster(gpu=card_of(device, card), node=1), list[list[str]]()
    columns = ["", "peak GiB", "planned", "", "reserved GiB", "planned", "", "step ms", "planned", "", "calibrated", ""]
    title = f"(f) planned and measured, one rank, {cluster.gpu.name} ({cluster.gpu.source})"
    found: list[dict[str, Any]] = []
    out.data |= {"card": cluster.gpu.name, "sizes": found}
    for case in cases:
        log = trace(subject_of(case), run)
        memory, times = memory_of(log), {name: step_of(log, run, cluster, name).seconds for name in REACHED}
        try:
            with WorkerTeam(OURS, out.world(device), shape_trainer, (OURS, case)) as team:
                team.ask("losses", 3)
                turns = team.ask("turn", 2, steps)[0]
                seen = team.ask("memory")[0]
        except BenchError as error:
            out.fail(f"{case.preset.layers} layers", error)
            continue
        seconds = quartiles([t["step"] for t in turns]).median
        scale = found[0]["seconds"] / found[0]["planned_s"]["middle"] if found else 0.0
        one = {"memory": seen, "seconds": seconds, "planned_s": times, "calibrated_s": scale * times["middle"]}
        one |= {"planned_allocated": memory.peak.num_bytes, "planned_reserved": dict(memory.reserved_bytes)}
        found.append(one)
        rows.append(_row(case, memory, one))
        out.keep(Table(title=title, columns=columns, rows=list(rows)))


def _row(case: Case, memory: MemoryNeed, one: dict[str, Any]) -> list[str]:
    seen, seconds = one["memory"], one["seconds"]
    cells = [f"{case.preset.layers} layers of {case.preset.hidden}, {case.batch} x {case.seq}"]
    for key, said in (("allocated", memory.peak.num_bytes), ("reserved", memory.largest_reserved)):
        cells += [f"{seen[key] / GIB:.2f}", f"{said / GIB:.2f}", _off(said, seen[key])]
    middle, after = one["planned_s"]["middle"], one["calibrated_s"]
    cells += [f"{seconds * 1e3:.1f}", f"{middle * 1e3:.1f}", _off(middle, seconds)]
    return [*cells, *([f"{after * 1e3:.1f}", _off(after, seconds)] if after else ["given", ""])]


def _off(said: float, seen: float) -> str:
    return f"{100 * (said / seen - 1):+.1f} %" if seen else ""
