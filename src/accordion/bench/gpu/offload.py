"""Part (g): a Llama whose states are on the host, ours beside FSDP2's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import accordion as acc
from accordion.bench.contenders import mesh_of
from accordion.bench.gpu.findings import Findings
from accordion.bench.model import Llama, batch_of, loss_of
from accordion.models.llama import LlamaShape
from accordion.offload.arena import Arena
from accordion.offload.estimate import MemoryEstimate, estimate_memory
from accordion.offload.tiers import Tiers
from accordion.pages.page import Table, spread
from accordion.pages.stats import Spread, quartiles
from accordion.plan.replay.peak import peak_of
from accordion.plan.trace.setup import Subject, TrainingSetup
from accordion.plan.trace.trace import trace
from accordion.state import sharded_engine
from accordion.workers.ranks import BenchError, Seat, WorkerTeam

BF16 = torch.bfloat16
GIB = 2**30
STEPPED_ON_HOST, STEPPED_HERE, PEER = "accordion host", "accordion device", "fsdp2 host"


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadCase:
    """A Llama in bf16 over float32 masters, recomputed. `host_bytes`: the rest of what is offloaded stays on the device."""

    preset: LlamaShape
    batch: int
    seq: int
    host_bytes: int | None = None


def place_of(kind: str, case: OffloadCase) -> acc.Offload:
    """Where a kind keeps its states, so that the host holds at most what the case gives."""
    return acc.Offload(optimizer="host", step="device" if kind == STEPPED_HERE else "host", host_bytes=case.host_bytes)


def on_meta(case: OffloadCase) -> nn.Module:
    with torch.device("meta"):
        return Llama(case.preset, recompute=True).to(BF16)


def said_of(place: acc.Offload, case: OffloadCase) -> MemoryEstimate:
    return estimate_memory(on_meta(case), place, 1, precision=acc.Precision(params=BF16))


def planned_peak(kind: str, case: OffloadCase, device: str) -> int:
    """Bytes of the device at the peak of a step, as the planner has them before the run."""
    sharding = {"precision": acc.Precision(params=BF16), "offload": place_of(kind, case)}
    subject = Subject(
        make=lambda: on_meta(case),
        batch=lambda: batch_of(0, 0, (case.batch, case.seq), case.preset.vocab),
        loss=lambda model, batch: loss_of(model(batch[0]), batch[1]),
    )
    return peak_of(trace(subject, TrainingSetup(ranks=1, node=1, sharding=sharding, device=device))).num_bytes  # type: ignore[arg-type]


class OffloadTrainer:
    """One rank that trains a case in one way."""

    def __init__(self, seat: Seat, kind: str, case: OffloadCase) -> None:
        torch.manual_seed(0)
        self._seat, self._case, self._num_steps, self._ours = seat, case, 0, kind != PEER
        self._said = said_of(place_of(kind, case), case) if self._ours else None
        self._model = self._made(kind)
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        self._optimizer = acc.wrap_optimizer(optimizer) if self._ours else optimizer

    def _made(self, kind: str) -> Any:
        model: Any = on_meta(self._case)
        if self._ours:
            offload = place_of(kind, self._case)
            model = acc.shard(model, mesh_of(self._seat), precision=acc.Precision(params=BF16), offload=offload)
        else:
            model = model.float()
            policy = CPUOffloadPolicy(pin_memory=self._seat.device.type != "cpu")
            precision = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh_of(self._seat), offload_policy=policy, mp_policy=precision)
            model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters():
                (p.to_local() if isinstance(p, DTensor) else p).normal_(std=0.02)
        return model

    def _wait(self) -> None:
        if self._ours:
            acc.synchronize(self._model)
        if self._seat.device.type != "cpu":
            torch.accelerator.synchronize()

    def turn(self, warm: int, count: int) -> list[dict[str, float]]:
        """Seconds of each step; of its optimizer, waited for, in the last one, which is not a step's time."""
        found = []
        for i in range(warm + count + 1):
            shape = (self._case.batch, self._case.seq)
            tokens, targets = (
                t.to(self._seat.device) for t in batch_of(self._num_steps, 0, shape, self._case.preset.vocab)
            )
            self._num_steps += 1
            start = time.perf_counter()
            loss = loss_of(self._model(tokens), targets)
            loss.backward()
            if i == warm + count:
                self._wait()
                before = time.perf_counter()
            self._optimizer.step()
            if i == warm + count:
                self._wait()
                found.append({"optimizer": time.perf_counter() - before})
            self._optimizer.zero_grad()
            value = float(loss)  # the device is waited for, the host's step is not
            if i < warm + count:
                found.append({"step": time.perf_counter() - start, "loss": value})
        self._wait()
        return found[warm:]

    def bytes(self) -> dict[str, int]:
        """Peak of the device, what was stated before, and what a step on the device copies in a step."""
        peak = 0 if self._seat.device.type == "cpu" else torch.accelerator.memory.max_memory_allocated()
        if self._said is None:
            return {"peak": peak}
        tiers = sharded_engine(self._model, "bench").context.shard_buffers
        assert isinstance(tiers, Tiers)
        states = list(tiers.states.values())
        copied = 2 * sum(one.host_bytes for one in states)
        said = {"said_device": self._said.device + self._said.device_buffers, "said_host": self._said.host}
        return {"peak": peak, "arena": tiers.arena.num_bytes, "copied": copied, **said}


def link(seat: Seat, num_bytes: int = GIB) -> dict[str, float]:
    """Bytes a second between pinned host memory and the device, one way and the other, measured now."""
    there = Arena(num_bytes, seat.device).take(num_bytes, torch.uint8)
    here = torch.empty(num_bytes, dtype=torch.uint8, device=seat.device)

    def timed(copy: Callable[[], Tensor]) -> float:
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            copy()
            if seat.device.type != "cpu":
                torch.accelerator.synchronize()
            best = min(best, time.perf_counter() - start)
        return num_bytes / best

    return {
        "to_device": timed(lambda: here.copy_(there, non_blocking=True)),
        "to_host": timed(lambda: there.copy_(here, non_blocking=True)),
    }


class Links:
    """One rank that measures its link."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def measure(self, num_bytes: int) -> dict[str, Any]:
        return link(self._seat, num_bytes)


def offloaded(
    cases: Mapping[str, tuple[OffloadCase, tuple[str, ...]]], link_bytes: int, steps: int, device: str, out: Findings
) -> None:
    """(g) States on the host, one kind at a time on the device and in the host's memory; the peer, which takes most, last."""
    with WorkerTeam("link", out.world(device, threads=16), Links) as team:
        out.data["link"] = team.ask("measure", link_bytes)[0]
    todo = [(shape, case, kind) for shape, (case, kinds) in cases.items() for kind in kinds]
    for shape, case, kind in sorted(todo, key=lambda one: one[2] == PEER):
        try:
            planned = {} if kind == PEER else {"planned": planned_peak(kind, case, device)}
            with WorkerTeam(kind, out.world(device, threads=16), OffloadTrainer, (kind, case)) as team:
                times = team.ask("turn", 1, steps)[0]
                held = team.ask("bytes")[0] | planned
            out.data[f"{shape} {kind}"] = {"times": times, "bytes": held}
        except BenchError as error:
            out.data[f"{shape} {kind}"] = out.fail(f"{shape} {kind}", error)
        out.keep(_table([(shape, kind) for shape, _, kind in todo if f"{shape} {kind}" in out.data], out.data))


def _table(ran: Sequence[tuple[str, str]], found: Mapping[str, Any]) -> Table:
    columns = [
        "shape",
        "",
        "step ms",
        f"over {PEER}",
        "optimizer ms",
        "copies of the link",
        "peak GiB",
        "planned GiB",
        "said, device GiB",
        "said, host GiB",
    ]
    slower = min(found["link"].values())
    title = f"(g) bf16 over float32 masters, states on the host; the link's slower way {slower / 1e9:.1f} GB/s"
    return Table(title=title, columns=columns, rows=[_row(shape, kind, found, slower) for shape, kind in ran])


def _row(shape: str, kind: str, found: Mapping[str, Any], link: float) -> list[str]:
    """`link`: bytes a second of its slower way."""
    if "failed" in found[f"{shape} {kind}"]:
        return [shape, kind, f"does not run: {found[f'{shape} {kind}']['failed']}"[:90], *[""] * 7]
    times, held = found[f"{shape} {kind}"]["times"], found[f"{shape} {kind}"]["bytes"]
    step, last, peer = _step_s(times), times[-1]["optimizer"], found.get(f"{shape} {PEER}")
    over = (
        "" if kind == PEER or peer is None or "failed" in peer else f"{step.median / _step_s(peer['times']).median:.2f}"
    )
    rate = "" if not held.get("copied") else f"{held['copied'] / 2 / last / link:.2f}"
    sizes_gib = [
        f"{held[key] / GIB:.2f}" if key in held else "" for key in ("peak", "planned", "said_device", "said_host")
    ]
    return [shape, kind, spread(step, 1e3, 1), over, f"{1e3 * last:.1f}", rate, *sizes_gib]


def _step_s(times: Sequence[Mapping[str, float]]) -> Spread:
    return quartiles([t["step"] for t in times if "step" in t])
