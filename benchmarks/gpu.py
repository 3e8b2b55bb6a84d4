"""Measure one accelerator in ten minutes; needs only torch, numpy and safetensors.

Parts, in the order in which they run: (d) gathers and exchanges compared with flat ones that copy, on one rank; (a) a 1 B
Llama in bf16 on one rank, compared with no sharding and FSDP2; (f) `accordion.plan` for three sizes, compared with
measurements; (e) compiled blocks; (b) memory and time of 8 B and 70 B as one of 8 to 64 simulated ranks. Tables are printed,
and figures written, as soon as they are known. What fails, runs out of memory or times out is named; the rest still runs.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import accordion as acc
from accordion import _torch
from accordion.bench.contenders import OURS, WRAPPERS, Loop, mesh_of
from accordion.bench.model import batch_of, batches_of, loss_of
from accordion.bench.trainer import Trainer
from accordion.cli import main
from accordion.devices import devices_here, devices_named
from accordion.engine.communicator import Communicator
from accordion.engine.reduce import sum_rows
from accordion.errors import UsageError
from accordion.models.llama import PUBLISHED, TRAINED, LlamaShape
from accordion.options import read
from accordion.pages.machine import describe
from accordion.pages.page import FOLDER, Page, Table, as_text, check_folder, plain_data, spread, write
from accordion.pages.stats import compare_losses, extremes, flat, quartiles, ratio
from accordion.plan.hardware import GPUS
from accordion.state import sharded_engine
from accordion.workers.ranks import BenchError, RankSetup, WorkerTeam, World

BF16 = torch.bfloat16
GIB = 2**30
NODE = 8  # devices per machine in a job of several machines
STATE_BYTES = 12  # bytes per parameter of (b): 2 for itself, 2 for its gradient, 8 for the optimizer
ROOM_GIB = 70  # device memory that (a) needs: three contenders between steps, and the peak of one
NAMES = ("plain", OURS, "fsdp2")
TOLERANCE = 2e-2  # of losses in bf16, relative
TIMEOUT_S = 110.0  # for one answer of a rank's process
AHEAD = 4  # sleeps of a millisecond that the device does while the host launches the timed work

# -- the model


class LlamaBlock(nn.Module):
    def __init__(self, p: LlamaShape) -> None:
        super().__init__()
        head = p.hidden // p.heads
        self.head, linear = head, partial(nn.Linear, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(p.hidden, eps=1e-5), nn.RMSNorm(p.hidden, eps=1e-5)
        self.q, self.o = linear(p.hidden, p.hidden), linear(p.hidden, p.hidden)
        self.k, self.v = linear(p.hidden, p.kv_heads * head), linear(p.hidden, p.kv_heads * head)
        self.gate, self.up, self.down = linear(p.hidden, p.mlp), linear(p.hidden, p.mlp), linear(p.mlp, p.hidden)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:  # (batch, seq, hidden), (2, seq, head)
        y = self.norm1(x)
        q, k, v = (w(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotated(q, turn), rotated(k, turn), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        y = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + y  # type: ignore[no-any-return]


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Apply rotary positions. `x`: (batch, heads, seq, head). `turn`: (2, seq, head) cosines and sines."""
    a, b = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat((-b, a), -1) * turn[1]


class Llama(nn.Module):
    """A Llama. `recompute`: recompute each block's activations in the backward, with torch's own checkpoint."""

    def __init__(self, p: LlamaShape, *, recompute: bool = False) -> None:
        super().__init__()
        self.head_dim, self.recompute = p.hidden // p.heads, recompute
        self.tokens = nn.Embedding(p.vocab, p.hidden)
        self.blocks = nn.ModuleList(LlamaBlock(p) for _ in range(p.layers))
        self.norm, self.head = nn.RMSNorm(p.hidden, eps=1e-5), nn.Linear(p.hidden, p.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, seq) -> (batch, seq, vocab)
        x = self.tokens(tokens)
        turn = self._turn(tokens.shape[1], x)
        for block in self.blocks:
            x = checkpoint(block, x, turn, use_reentrant=False) if self.recompute else block(x, turn)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def _turn(self, seq: int, like: Tensor) -> Tensor:
        half = torch.arange(0, self.head_dim, 2, device=like.device)
        angles = torch.arange(seq, device=like.device)[:, None] * 500_000.0 ** (-half / self.head_dim)
        return torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2).to(like.dtype)


# -- one rank that trains it


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A Llama to train. `masters`: parameters are float32, and the model computes in bf16; otherwise parameters are bf16 too.

    `recompute`: recompute activations of blocks. `wide`: the optimizer keeps 8 bytes per parameter whatever its dtype. `meta`:
    weights are created after sharding. `compiled`: backend of torch.compile for each block; "": not compiled.
    """

    preset: LlamaShape
    batch: int
    seq: int
    masters: bool = False
    recompute: bool = False
    wide: bool = False
    meta: bool = False
    compiled: str = ""

    @property
    def num_params(self) -> int:
        p = self.preset
        attention = 2 * p.hidden**2 + 2 * p.hidden * p.kv_heads * (p.hidden // p.heads)
        return p.layers * (attention + 3 * p.hidden * p.mlp + 2 * p.hidden) + 2 * p.vocab * p.hidden + p.hidden

    @property
    def flops(self) -> float:
        """FLOPs of one rank's step as MFU counts them: 6 per token and parameter (no embedding), causal attention halved."""
        p, tokens = self.preset, self.batch * self.seq
        return 6 * tokens * (self.num_params - p.vocab * p.hidden) + 6 * p.layers * tokens * self.seq * p.hidden


class WideAdam(torch.optim.Optimizer):
    """Adam with both states in float32, 8 bytes per parameter, for parameters of any dtype."""

    def __init__(self, params: Any, lr: float = 1e-5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p, dtype=torch.float32)
                    state["square"] = torch.zeros_like(p, dtype=torch.float32)
                grad = p.grad.float()
                state["mean"].lerp_(grad, 0.1)
                state["square"].lerp_(grad.square_(), 0.05)
                change = torch.sqrt(state["square"]).add_(1e-8).reciprocal_().mul_(state["mean"])
                p.add_(change.to(p.dtype), alpha=-group["lr"])


class MasterLoop(Loop):
    """A `Loop` that trains an unsharded bf16 model, and steps float32 copies (masters) of its parameters: the least that
    masters cost.

    Autocast is not used, since it keeps some activations in float32, which no other contender does.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        self._params: list[Tensor] = list(model.parameters())
        self._masters: list[Tensor] = [nn.Parameter(p.detach().float()) for p in self._params]
        super().__init__(model, torch.optim.AdamW(self._masters, lr=1e-5, fused=True), False, device)

    def step(self) -> None:
        grads = [torch.empty_like(p) for p in self._masters]
        _torch.foreach_copy_(grads, [p.grad for p in self._params if p.grad is not None])
        for master, p, grad in zip(self._masters, self._params, grads, strict=True):
            master.grad, p.grad = grad, None
        super().step()
        with torch.no_grad():
            _torch.foreach_copy_(self._params, self._masters)


def trainer_of(setup: RankSetup, contender: str, case: Case) -> Trainer:
    """Build the model of `case`, shard it as `contender` ("plain", "fsdp2" or "accordion") does, and return its `Trainer`."""

    def build() -> Loop:
        torch.manual_seed(0)
        by_hand = case.masters and contender == "plain"
        with torch.device("meta" if case.meta else setup.device):
            model = Llama(case.preset, recompute=case.recompute)
            model = model.to(torch.float32 if case.masters and not by_hand else BF16)
        wrapped = _wrapped(contender, model, setup, case)
        for block in model.blocks if case.compiled else ():
            block.compile(backend=case.compiled)
        if by_hand:
            return MasterLoop(wrapped, setup.device.type)
        params = list(wrapped.parameters())
        optimizer = WideAdam(params) if case.wide else torch.optim.AdamW(params, lr=1e-5, fused=True)
        if contender == OURS:
            optimizer = acc.wrap_optimizer(optimizer, elementwise=True)
        return Loop(wrapped, optimizer, False, setup.device.type)

    return Trainer(setup, build, batches_of(setup.rank, (case.batch, case.seq), case.preset.vocab))


def _wrapped(contender: str, model: nn.Module, setup: RankSetup, case: Case) -> nn.Module:
    if contender == OURS:
        precision = acc.Precision(params=BF16, master=torch.float32 if case.masters else BF16)
        model = acc.shard(model, mesh_of(setup), precision=precision)
        if setup.world.group == "fake":  # such a group looks as if all of its ranks were on this machine
            axis = sharded_engine(model, "bench").context.shard
            axis.one_node = setup.num_ranks <= NODE
            # Behave as a group of the device's library, whose copies run on the current stream. Reduces use the same group.
            axis.gather.is_ordered = setup.device.type != "cpu"
    else:
        sums_in_float32 = case.masters or setup.num_ranks > 1  # as accordion does; one rank sums nothing
        model = WRAPPERS[contender](model, setup, sums_in_float32)
        if case.meta:
            model.to_empty(device=setup.device)
    if case.meta:
        with torch.no_grad():
            for p in model.parameters():
                (p.to_local() if isinstance(p, DTensor) else p).normal_(std=0.02)
    return model


def world_of(device: str, num_ranks: int = 1, **more: Any) -> World:
    timeout_s = 1800.0 if device == "cpu" else TIMEOUT_S
    return World(
        num_ranks=num_ranks, device_type=device, threads=1 if device == "cpu" else 8, timeout_s=timeout_s, **more
    )


def attempt(name: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `call`. If it raises `BenchError`, print that with `name` and return {"failed": reason}."""
    try:
        return call()
    except BenchError as error:
        print(f"{name} failed: {error}", flush=True)
        return {"failed": f"does not run: {error}"[:200]}


# -- the parts: each yields its tables with all figures so far

Figures = Iterator[tuple[Table, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of all parts. `one_rank`: of (a), and of (e) with fewer layers. `rounds`, `steps`: turns, and measured steps
    per turn. `unit_bytes`: of (d). `compiler`: of (e). `planned`: cases of (f)."""

    one_rank: Case
    rounds: int
    steps: int
    simulated: tuple[tuple[str, Case, int], ...]
    """For (b): (name of the shape, case, number of simulated ranks)."""
    unit_bytes: tuple[int, ...]
    compiler: str
    planned: tuple[Case, ...]


def full_sizes(memory_gib: float = ROOM_GIB) -> Sizes:
    """Return the sizes for a device of `memory_gib` GiB. Each halving of `ROOM_GIB` halves layers and batch of (a) and (e)."""
    halvings = max(0, math.ceil(math.log2(ROOM_GIB / memory_gib)))
    llama, big = TRAINED["llama-1b"], partial(Case, recompute=True, wide=True, meta=True, batch=1)
    shapes = {
        "8B": big(preset=PUBLISHED["llama3-8b"], seq=2048),
        "70B": big(preset=PUBLISHED["llama3-70b"], seq=1024),
    }
    return Sizes(
        one_rank=Case(
            preset=replace(llama, layers=max(2, llama.layers >> halvings)), batch=max(1, 4 >> halvings), seq=2048
        ),
        rounds=5,
        steps=5,
        simulated=tuple(
            (name, shapes[name], num) for name, num in (("8B", 8), ("70B", 64), ("8B", 64), ("70B", 16), ("8B", 16))
        ),
        unit_bytes=tuple(mb * 10**6 for mb in (25, 50, 100, 225, 450, 900)),
        compiler="inductor",
        planned=tuple(
            Case(preset=replace(llama, layers=layers), batch=batch, seq=2048, masters=True)
            for layers, batch in ((4, 4), (8, 4), (16, 2))
        ),
    )


def tiny_sizes() -> Sizes:
    preset = LlamaShape(vocab=64, hidden=32, layers=2, heads=2, kv_heads=2, mlp=64)
    case = Case(preset=preset, batch=1, seq=16)
    simulated = replace(case, recompute=True, wide=True, meta=True)
    return Sizes(
        one_rank=case,
        rounds=1,
        steps=1,
        simulated=tuple(("tiny", simulated, num) for num in (8, 16)),
        unit_bytes=(10**5,),
        compiler="aot_eager",
        planned=tuple(replace(case, preset=replace(preset, layers=n), masters=True) for n in (1, 2, 3)),
    )


def turns_of(cases: Mapping[str, Case], device: str, sizes: Sizes) -> dict[str, Any]:
    """Measure `cases` on one rank in interleaved turns. `cases`: contender, perhaps with a suffix ("fsdp2 compiled") -> case.

    Returns key of `cases` -> {"losses": of 3 steps, "started_s": seconds of start and these, "memory": `Trainer.memory`, "steps":
    [round][step] seconds, "host_ms": median host time of a step}, or {"failed": reason}.
    """
    results: dict[str, Any] = {}
    teams: dict[str, WorkerTeam] = {}

    def begin(name: str, case: Case) -> dict[str, Any]:
        start = time.perf_counter()
        teams[name] = team = WorkerTeam(name, world_of(device), trainer_of, (name.split()[0], case))
        losses, started_s = team.ask("losses", 3)[0], time.perf_counter() - start
        return {"losses": losses, "started_s": started_s, "memory": team.ask("memory")[0], "turns": []}

    def turn(name: str) -> dict[str, Any]:
        results[name]["turns"].append(teams[name].ask("turn", 2, sizes.steps)[0])
        return results[name]  # type: ignore[no-any-return]

    try:
        for name, case in cases.items():
            results[name] = attempt(name, partial(begin, name, case))
        for _ in range(sizes.rounds):
            for name in teams:
                if "failed" not in results[name]:
                    results[name] = attempt(name, partial(turn, name))
    finally:
        for team in teams.values():
            team.close()
    for one in results.values():
        if "failed" not in one:
            turns = one.pop("turns")
            one["steps"] = [[t["step"] for t in turn] for turn in turns]
            one["host_ms"] = 1e3 * quartiles([t["host"] for turn in turns for t in turn]).median
    return results


def card_of(device: str) -> str:
    """Return the planner's name of this machine's device; "" if the planner does not know it."""
    name = describe(device)["device"].lower().replace(" ", "")
    return next((gpu for gpu in GPUS if gpu.partition("-")[0] in name), "")


def over_plain(results: Mapping[str, Any], name: str) -> str:
    """Return, as text, the step time of `name` divided by that of "plain" with the same suffix; "" if "plain" failed."""
    base = results["plain" + name.removeprefix(name.split()[0])]
    return "" if "failed" in base else spread(ratio(results[name]["steps"], base["steps"]), 1, 4)


def not_run(name: str, result: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    return [name, result["failed"][:90], *[""] * (len(columns) - 2)]


def one_rank(sizes: Sizes, device: str) -> Figures:
    """(a) Measure step time, MFU and memory of one rank, in bf16 and with float32 masters. Masters take twice the memory, so that
    model has half the layers. Yields (table, all results so far)."""
    case, data = sizes.one_rank, {}
    halved = replace(case.preset, layers=max(1, case.preset.layers // 2))
    card = card_of(device)
    peak = GPUS[card].tflops * 1e12 if card else None
    columns = ["", "step ms", "MFU %", "over plain", "of what FSDP2 adds", "host ms", "peak GiB", "third loss"]
    for name, one in {"bf16": case, "fp32 masters": replace(case, preset=halved, masters=True)}.items():
        results = data[name] = turns_of(dict.fromkeys(NAMES, one), device, sizes)
        title = f"(a) one rank, {name}, {one.num_params / 1e9:.2f} B, batch {one.batch} x {one.seq}"
        yield Table(title=title, columns=columns, rows=_rows(results, one, peak, columns)), data


def _rows(results: Mapping[str, Any], case: Case, peak: float | None, columns: Sequence[str]) -> list[list[str]]:
    ran = {name: r for name, r in results.items() if "failed" not in r}
    wrong = compare_losses({name: r["losses"] for name, r in ran.items()}, TOLERANCE).wrong if ran else []
    rows = [not_run(name, r, columns) for name, r in results.items() if name not in ran]
    for name, r in ran.items():
        step = quartiles(flat(r["steps"]))
        share = spread(extremes(added(results)), 1, 3) if name == OURS and len(ran) == len(NAMES) else ""
        rows.append(
            [
                name,
                spread(step, 1e3, 2),
                f"{100 * case.flops / step.median / peak:.1f}" if peak else "peak unknown",
                over_plain(results, name),
                share,
                f"{r['host_ms']:.2f}",
                f"{r['memory']['allocated'] / GIB:.2f}",
                f"{r['losses'][-1]:.4f}{' WRONG' if name in wrong else ''}",
            ]
        )
    return rows


def added(results: Mapping[str, Any]) -> list[float]:
    """Return for each round: (time that accordion adds to a step of "plain") / (time that FSDP2 adds to it)."""
    by_round = {n: [quartiles(turn).median for turn in r["steps"]] for n, r in results.items()}
    plain, ours, theirs = by_round["plain"], by_round[OURS], by_round["fsdp2"]
    return [(a - p) / (b - p) if b != p else 0.0 for p, a, b in zip(plain, ours, theirs, strict=True)]


def compiled(sizes: Sizes, device: str) -> Figures:
    """(e) Measure start and step time with compiled blocks, and with blocks that are not. Yields one (table, results)."""
    case = sizes.one_rank
    case = replace(case, preset=replace(case.preset, layers=max(1, case.preset.layers // 4)))
    cases = dict.fromkeys(NAMES, case) | {f"{n} compiled": replace(case, compiled=sizes.compiler) for n in NAMES}
    results = turns_of(cases, device, sizes)
    columns = ["", "step ms", "over plain", "start and 3 steps, s", "third loss"]
    rows = [
        not_run(name, r, columns)
        if "failed" in r
        else [
            name,
            spread(quartiles(flat(r["steps"])), 1e3, 2),
            over_plain(results, name),
            f"{r['started_s']:.1f}",
            f"{r['losses'][-1]:.4f}",
        ]
        for name, r in results.items()
    ]
    title = f"(e) blocks compiled ({sizes.compiler}) and not, {case.num_params / 1e9:.2f} B"
    yield Table(title=title, columns=columns, rows=rows), results


def simulated(sizes: Sizes, device: str) -> Figures:
    """(b) Measure peak memory and step time as one of many simulated ranks, one contender at a time on the device.

    Ranks of more than one node of 8 use reduce-scatters, as in a real job. Gradients are summed in float32. Nothing is sent:
    gathers of the fake group copy one chunk per rank, and the host's time for these copies is part of the step.
    """
    columns = [
        "shape",
        "ranks",
        "",
        "12 B per parameter, GiB",
        "between steps GiB",
        "peak GiB",
        "reserved GiB",
        "step ms",
        "ratio",
    ]
    title = "(b) one of many simulated ranks, nodes of 8, bf16 summed in float32, 8 optimizer bytes per parameter, recomputed"
    rows, data = list[list[str]](), dict[str, Any]()
    for shape, case, num_ranks in sizes.simulated:
        results = {n: attempt(n, partial(alone, n, case, num_ranks, device)) for n in (OURS, "fsdp2")}
        data[f"{shape} at {num_ranks}"] = results
        peaks = [r["memory"]["allocated"] for r in results.values() if "memory" in r]
        over = f"{peaks[0] / peaks[1]:.3f}" if len(peaks) == 2 and peaks[1] else ""
        for name, r in results.items():
            cells = [r["failed"][:90], "", "", ""] if "failed" in r else [
                *(f"{r['memory'][key] / GIB:.2f}" for key in ("rest", "allocated", "reserved")),
                spread(quartiles(r["steps"]), 1e3, 1),
            ]  # fmt: skip
            state = f"{STATE_BYTES * case.num_params / num_ranks / GIB:.2f}"
            rows.append([shape, str(num_ranks), name, state, *cells, over if name == OURS else ""])
        yield Table(title=title, columns=columns, rows=list(rows)), data


def alone(name: str, case: Case, num_ranks: int, device: str) -> dict[str, Any]:
    with WorkerTeam(name, world_of(device, num_ranks, group="fake"), trainer_of, (name, case)) as team:
        team.ask("losses", 2)
        memory, times = team.ask("memory")[0], team.ask("turn", 0, 3)[0]
    return {"memory": memory, "steps": [t["step"] for t in times]}


def planned(sizes: Sizes, device: str) -> Figures:
    """(f) Compare planned memory and time with measurements (bf16, float32 masters, fused AdamW). The ratio of the first size
    scales the planned times of the others. Yields (table, all results so far)."""
    card = card_of(device)
    rows, data, scale = list[list[str]](), list[dict[str, Any]](), 0.0
    columns = ["", "peak GiB", "planned", "", "reserved GiB", "planned", "", "step ms", "planned", "", "calibrated", ""]
    for case in sizes.planned:
        plan = plan_of(case, card)
        result = attempt(f"{case.preset.layers} layers", partial(measured_of, case, device, sizes.steps))
        if "failed" in result:
            continue
        memory, seconds = result["memory"], result["seconds"]
        middle = plan["step_s"]["middle"] if card else 0.0  # no times for a GPU that the planner does not know
        data.append({**result, "planned": plan, "calibrated_s": scale * middle})
        pairs = [(memory["allocated"], plan["peak_allocated_bytes"]), (memory["reserved"], plan["peak_reserved_bytes"])]
        cells = [c for a, b in pairs for c in (f"{a / GIB:.2f}", f"{b / GIB:.2f}", _off(b, a))]
        cells += [f"{seconds * 1e3:.1f}", f"{middle * 1e3:.1f}", _off(middle, seconds)]
        cells += [f"{scale * middle * 1e3:.1f}", _off(scale * middle, seconds)] if scale else ["calibrates", ""]
        rows.append([f"{case.preset.layers} layers of {case.preset.hidden}, {case.batch} x {case.seq}", *cells])
        scale = scale or (seconds / middle if middle else 0.0)
        title = f"(f) planned and measured, one rank, {card or 'a GPU that the planner does not know'}"
        yield Table(title=title, columns=columns, rows=list(rows)), data


def plan_of(case: Case, card: str) -> dict[str, Any]:
    """Return, as a dict, the plan of training `case` on one GPU `card`, or an H100 if that is "". Allocates no weights."""
    with torch.device("meta"):
        model = Llama(case.preset, recompute=case.recompute).train()
    batch = batch_of(0, 0, (case.batch, case.seq), case.preset.vocab)
    workload = acc.Workload(model, lambda model, batch: loss_of(model(batch[0]), batch[1]), batch)
    sharding = acc.Sharding(precision=acc.Precision(params=BF16))
    plan = acc.plan(workload, acc.Cluster(gpu=GPUS[card or "h100"], gpus=(1,), node=1), sharding)
    return plan.as_dict()


def measured_of(case: Case, device: str, steps: int) -> dict[str, Any]:
    with WorkerTeam(OURS, world_of(device), trainer_of, (OURS, case)) as team:
        team.ask("losses", 3)
        turns = team.ask("turn", 2, steps)[0]
        return {"memory": team.ask("memory")[0], "seconds": quartiles([t["step"] for t in turns]).median}


def _off(planned: float, measured: float) -> str:
    return f"{100 * (planned / measured - 1):+.1f} %" if measured and planned else ""


class Wires:
    """One rank that times gathers and reduces with the backend of its device."""

    def __init__(self, setup: RankSetup) -> None:
        self._device = setup.device
        self._link = Communicator(dist.group.WORLD, setup.device)

    def unit(self, num_bytes: int, repeats: int) -> dict[str, list[float]]:
        """Time gather and reduce of a unit of `num_bytes` in bf16. Return "gather", "flat gather", "reduce" and "flat reduce"
        -> device seconds of each of `repeats`.

        The unit has seven matrices in the proportions of a Llama block. "flat" is as in FSDP2: shards are copied into
        one buffer, gathered, and copied out to the parameters; gradients are copied into one float32 buffer and
        reduce-scattered.
        """
        link, num = self._link, self._link.num_ranks
        weights = (4, 4, 1, 1, 14, 14, 14)
        sizes = [num_bytes // 2 * w // sum(weights) // (256 * num) * 256 for w in weights]  # of one rank
        total, device = sum(sizes), self._device
        shards = [torch.ones(n, dtype=BF16, device=device) for n in sizes]
        fulls = list(torch.ones(total * num, dtype=BF16, device=device).split([n * num for n in sizes]))
        received = [torch.ones(n * num, dtype=BF16, device=device) for n in sizes]
        sums = list(torch.ones(total, device=device).split(sizes))
        flat_shard, flat_full = (torch.ones(n, dtype=BF16, device=device) for n in (total, total * num))
        flat_grad, flat_sum = (torch.ones(n, device=device) for n in (total * num, total))
        equal: list[int] = []

        def gather() -> None:
            for work in link.gather(fulls, shards).works:
                work.wait()

        def flat_gather() -> None:
            _torch.foreach_copy_(list(flat_shard.split(sizes)), shards)
            dist.all_gather_into_tensor(flat_full, flat_shard)
            outs = [full.view(num, -1) for full in fulls]
            torch.split_with_sizes_copy(flat_full.view(num, -1), sizes, dim=1, out=outs)

        def reduce() -> None:
            parts = [(into, full, equal, equal) for into, full in zip(received, fulls, strict=True)]
            for work in link.exchange(parts).works:
                work.wait()
            for into, out in zip(received, sums, strict=True):
                sum_rows(into.view(num, -1), out)

        def flat_reduce() -> None:
            _torch.chunk_cat([g.view(num, -1) for g in fulls], num, out=flat_grad.view(num, -1))
            dist.reduce_scatter_tensor(flat_sum, flat_grad)

        ways = {"gather": gather, "flat gather": flat_gather, "reduce": reduce, "flat reduce": flat_reduce}
        return {n: t[2:] for n, t in self._interleaved(ways, repeats + 2).items()}

    def _interleaved(self, ways: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                times[name].append(self._timed(way))
        return times

    def _timed(self, way: Callable[[], None]) -> float:
        if self._device.type == "cpu":
            start = time.perf_counter()
            way()
            return time.perf_counter() - start
        torch.accelerator.synchronize()
        begin, end = (torch.Event(device=self._device, enable_timing=True) for _ in range(2))
        for _ in range(AHEAD):
            _torch.sleep_on_device()
        begin.record()
        way()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def wires(sizes: Sizes, device: str) -> Figures:
    """(d) Time gather and reduce of a unit on one rank, which sends nothing. Yields (table, all results so far)."""
    title = "(d) a unit in bf16 on one rank, device time of copies and launches only: one rank sends nothing"
    columns = ["unit", "gather ms", "flat ms", "ratio", "exchange ms", "flat ms", "ratio"]
    rows, data = list[list[str]](), dict[str, Any]()
    with WorkerTeam("wires", world_of(device), Wires) as team:
        for num_bytes in sizes.unit_bytes:
            times = data[str(num_bytes)] = team.ask("unit", num_bytes, 5 * sizes.steps)[0]
            row = [f"{num_bytes / 1e6:g} MB"]
            for name in ("gather", "reduce"):
                ours, theirs = times[name], times[f"flat {name}"]
                row += [spread(quartiles(one), 1e3, 3) for one in (ours, theirs)]
                row.append(f"{ratio([ours], [theirs]).median:.3f}")
            rows.append(row)
            yield Table(title=title, columns=columns, rows=list(rows)), data


PARTS: Mapping[str, Callable[[Sizes, str], Figures]] = {
    "d": wires, "a": one_rank, "f": planned, "e": compiled, "b": simulated,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure one accelerator.

    Args:
        parts: letters of the parts, in the order in which they run
        device: auto, cpu, or another device type of this machine
        tiny: use small shapes, to test the script without measuring anything
    """

    parts: str = "".join(PARTS)
    device: str = "auto"
    tiny: bool = False


def run(words: list[str]) -> int:
    options = read(Options, words, "benchmarks/gpu.py", __doc__ or "")
    if options is None:
        return 0
    if unknown := set(options.parts) - set(PARTS):
        raise UsageError(f"parts {''.join(sorted(unknown))!r} do not exist; take letters of {''.join(PARTS)!r}.")
    devices = devices_named(options.device, "--device", devices_here())
    if devices.is_cpu and not options.tiny:
        raise UsageError("no accelerator is found; check the driver, or test the script with --tiny --device cpu.")
    memory_gib = ROOM_GIB if devices.is_cpu else torch.accelerator.get_memory_info()[1] / GIB
    sizes, head = tiny_sizes() if options.tiny else full_sizes(memory_gib), {"machine": describe(devices.type)}
    path = check_folder(FOLDER) / "gpu-parts.json"
    parts: dict[str, Any] = {}
    if path.exists():  # add to the figures of an earlier run on the same machine
        before = json.loads(path.read_text(encoding="utf-8"))
        parts = before["parts"] if before.get("machine") == head["machine"] else {}
    for letter in options.parts:
        tables: dict[str, Table] = {}
        parts[letter] = {}
        try:
            for table, data in PARTS[letter](sizes, devices.type):
                tables[table.title] = table
                parts[letter] = {"data": plain_data(data), "tables": plain_data(list(tables.values()))}
                write(Page(name="gpu-parts", notes=[], tables=[], data={**head, "parts": parts}), FOLDER)
        except BenchError as error:
            print(f"({letter}) failed: {error}", flush=True)
            parts[letter]["failed"] = str(error)
        print("\n\n".join(map(as_text, tables.values())), end="\n\n", flush=True)
    print(f"written: {write(Page(name='gpu-parts', notes=[], tables=[], data={**head, 'parts': parts}), FOLDER)}")
    return int(any("failed" in part for part in parts.values()))


if __name__ == "__main__":
    sys.exit(main(run=run))
