"""What `gpu.py` runs in its rank processes."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

import accordion as acc
from accordion import _torch
from accordion.bench.contenders import OURS, WRAPPERS, Loop, mesh_of
from accordion.bench.model import Llama, batch_of, loss_of
from accordion.bench.ranks import Seat
from accordion.bench.trainer import Trainer
from accordion.config import strategy_named
from accordion.engine.collectives import Link
from accordion.engine.reduction import sum_rows
from accordion.engine.streams import Lane
from accordion.engine.watch import Watch
from accordion.train.config import Preset

BF16 = torch.bfloat16
AHEAD = 4  # milliseconds that the device sleeps while the host launches what is timed there, so that no launch is


# -- training a large shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A Llama in training. `masters`: parameters in float32, computed with in bf16; else parameters are bf16.

    `wide`: the optimizer keeps 8 bytes a parameter whatever its dtype. `meta`: weights are made after sharding.
    `compiled`: backend with which each block is compiled.
    """

    preset: Preset
    batch: int
    seq: int
    masters: bool = False
    recompute: bool = False
    wide: bool = False
    meta: bool = False
    compiled: str = ""


class WideAdam(torch.optim.Optimizer):
    """Adam with both states in float32, 8 bytes a parameter, beside parameters of any dtype."""

    def __init__(self, params: Any, lr: float = 1e-5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever given
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
    """Plain training of a bf16 model with masters in float32, by hand: the least that masters cost anyone.

    Autocast would keep activations in float32, which none of the others does.
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


def shape_trainer(seat: Seat, contender: str, case: Case) -> Trainer:
    """A trainer of `case` under plain, fsdp2 or accordion."""

    def build() -> Loop:
        torch.manual_seed(0)
        by_hand = case.masters and contender == "plain"
        dtype = torch.float32 if case.masters and not by_hand else BF16
        with torch.device("meta" if case.meta else seat.device):
            model = Llama(case.preset, recompute=case.recompute).to(dtype)
        wrapped = _wrapped(contender, model, seat, case)
        if case.compiled:
            for block in model.blocks:
                block.compile(backend=case.compiled)
        if by_hand:
            return MasterLoop(wrapped, seat.device.type)
        params = list(wrapped.parameters())
        optimizer = WideAdam(params) if case.wide else torch.optim.AdamW(params, lr=1e-5, fused=True)
        if contender == OURS:
            optimizer = acc.wrap_optimizer(optimizer, elementwise=True)
        return Loop(wrapped, optimizer, False, seat.device.type)

    return Trainer(seat, build, (case.batch, case.seq), case.preset.vocab, bf16=True)


def _wrapped(contender: str, model: nn.Module, seat: Seat, case: Case) -> nn.Module:
    if contender == OURS:
        precision = acc.Precision(params=BF16, master=torch.float32 if case.masters else BF16)
        model = acc.shard(model, mesh_of(seat), precision=precision)
    else:
        model = WRAPPERS[contender](model, seat, case.masters)
        if case.meta:
            model.to_empty(device=seat.device)
    if case.meta:
        with torch.no_grad():
            for p in model.parameters():
                (p.to_local() if isinstance(p, DTensor) else p).normal_(std=0.02)
    return model


# -- stream safety


class SafeRuns:
    """Ranks that share a device over gloo: the debug mode that shows waits that are missing, over all strategies."""

    def __init__(self, seat: Seat, preset: Preset) -> None:
        self._seat, self._preset = seat, preset

    def losses(self, strategy: str, steps: int) -> list[float]:
        """This rank's losses under a strategy, or under DistributedDataParallel (`ddp`)."""
        torch.manual_seed(0)
        seat = self._seat
        model: nn.Module = Llama(self._preset).to(seat.device)
        if strategy == "ddp":
            model = WRAPPERS["ddp"](model, seat, False)
        else:
            policy, ranks = strategy_named(strategy), seat.num_ranks
            shape, names = ((ranks // 2, 2), ("replicate", "shard")) if policy.hybrid else ((ranks,), ("shard",))
            mesh = init_device_mesh(seat.device.type, shape, mesh_dim_names=names)
            model = acc.shard(model, mesh, strategy=policy, debug="streams")
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(steps):
            tokens, targets = (t.to(seat.device) for t in batch_of(step, seat.rank, (2, 32), self._preset.vocab))
            loss = loss_of(model(tokens), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        return found


class Wires:
    """One rank with the backend of its device: on which stream each collective runs, and what gathers and reduces take there."""

    def __init__(self, seat: Seat) -> None:
        self._seat, self._device = seat, seat.device
        self._link = Link(dist.group.WORLD, seat.device)

    # on which stream

    def streams(self) -> dict[str, dict[str, Any]]:
        """For each collective: the device work that it launched, and whether all of it is on the lane's stream.

        A product and a sleep on the lane tell the numbers under which the profiler knows the streams.
        """
        lane = Lane(self._device, Watch([], [0]))
        calls = self._calls()
        for call in calls.values():  # communicators are made at the first call
            _wait(call())
        self._synchronise()
        if self._device.type == "cpu":
            return {name: {"work": [], "on_lane": None} for name in calls}
        with torch.profiler.profile() as profile:
            with record_function("accordion::sleep"), lane.entered():
                _torch.sleep_on_device()
            for name, call in calls.items():
                lane.stream.wait_event(lane.compute().record_event())
                with record_function(f"accordion::{name}"), lane.entered():
                    _wait(call())
            self._synchronise()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profile.export_chrome_trace(str(path))
            work = device_work(json.loads(path.read_text())["traceEvents"])
        ours = {stream for _, stream in work["sleep"]}
        return {
            name: {
                "work": sorted({kernel for kernel, _ in work[name]}),
                "on_lane": bool(work[name]) and {stream for _, stream in work[name]} == ours,
            }
            for name in calls
        }

    def _calls(self) -> dict[str, Callable[[], Any]]:
        whole, own = (torch.ones(4096, device=self._device) for _ in range(2))
        other, link = torch.ones(4096, device=self._device), self._link
        return {
            "gather": lambda: link.gather([whole, other], [own, own]),
            "exchange": lambda: link.exchange([(whole, own, [], []), (other, own, [], [])]),
            "reduce_scatter": lambda: link.scatter_sum([whole, other], [own, own]),
        }

    # how long

    def unit(self, num_bytes: int, repeats: int) -> dict[str, list[float]]:
        """Device seconds of ours and of the flat way, for a unit of `num_bytes` in bf16: gather and reduce, interleaved.

        Flat, as FSDP2 does it: shards are copied into one buffer, gathered, and copied out to the parameters; gradients are
        copied into one buffer in float32, and reduce-scattered.
        """
        ways = _Unit(self._link, self._device, num_bytes).ways()
        found: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(repeats + 2):
            for name, way in ways.items():
                seconds = self._timed(way)
                if i >= 2:
                    found[name].append(seconds)
        return found

    def _timed(self, way: Callable[[], None]) -> float:
        self._synchronise()
        if self._device.type == "cpu":
            start = time.perf_counter()
            way()
            return time.perf_counter() - start
        begin, end = (torch.Event(device=self._device, enable_timing=True) for _ in range(2))
        for _ in range(AHEAD):
            _torch.sleep_on_device()
        begin.record()
        way()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _synchronise(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def _wait(pending: Any) -> None:
    for work in pending.works:
        work.wait()


def device_work(events: Sequence[dict[str, Any]]) -> dict[str, list[tuple[str, int]]]:
    """From a trace of the profiler: (kernel or copy, its stream) of each range `accordion::<name>`, by name.

    Work belongs to the range in which the host launched it: both have one correlation id.
    """
    done = [e for e in events if e.get("ph") == "X" and "ts" in e]
    prefix = "accordion::"
    ranges = [e for e in done if str(e.get("name", "")).startswith(prefix) and e.get("cat") == "user_annotation"]
    launches = (e for e in done if e.get("cat") in ("cuda_runtime", "cuda_driver"))
    launched = {e["args"]["correlation"]: e["ts"] for e in launches if "correlation" in e.get("args", {})}
    found: dict[str, list[tuple[str, int]]] = {e["name"].removeprefix(prefix): [] for e in ranges}
    for e in done:
        if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        at = launched.get(e["args"].get("correlation"))
        for r in ranges:
            if at is not None and r["ts"] <= at <= r["ts"] + r["dur"]:
                found[r["name"].removeprefix(prefix)].append((e["name"], e["args"]["stream"]))
    return found


class _Unit:
    """The tensors of one unit on one rank: seven matrices in the proportions of a Llama block."""

    def __init__(self, link: Link, device: torch.device, num_bytes: int) -> None:
        self._link, num = link, link.num_ranks
        weights = (4, 4, 1, 1, 14, 14, 14)
        sizes = [num_bytes // 2 * w // sum(weights) // (256 * num) * 256 for w in weights]  # of one rank

        def of(n: int, dtype: torch.dtype) -> Tensor:
            return torch.ones(n, dtype=dtype, device=device)

        self._sizes, total = sizes, sum(sizes)
        self._shards = [of(n, BF16) for n in sizes]
        self._fulls = list(of(total * num, BF16).split([n * num for n in sizes]))
        self._received = [of(n * num, BF16) for n in sizes]
        self._sums = list(of(total, torch.float32).split(sizes))
        self._flat_shard, self._flat_full = of(total, BF16), of(total * num, BF16)
        self._flat_grad, self._flat_sum = of(total * num, torch.float32), of(total, torch.float32)

    def ways(self) -> dict[str, Callable[[], None]]:
        return {
            "gather": self._gather,
            "flat gather": self._flat_gather,
            "reduce": self._reduce,
            "flat reduce": self._flat_reduce,
        }

    def _gather(self) -> None:
        _wait(self._link.gather(self._fulls, self._shards))

    def _flat_gather(self) -> None:
        torch._foreach_copy_(list(self._flat_shard.split(self._sizes)), self._shards)
        dist.all_gather_into_tensor(self._flat_full, self._flat_shard)
        num = self._link.num_ranks
        outs = [full.view(num, -1) for full in self._fulls]
        torch.split_with_sizes_copy(self._flat_full.view(num, -1), self._sizes, dim=1, out=outs)

    def _reduce(self) -> None:
        equal: list[int] = []
        pairs = zip(self._received, self._fulls, strict=True)
        _wait(self._link.exchange([(received, full, equal, equal) for received, full in pairs]))
        for received, out in zip(self._received, self._sums, strict=True):
            sum_rows(received.view(self._link.num_ranks, -1), out)

    def _flat_reduce(self) -> None:
        num = self._link.num_ranks
        grads = [g.view(num, -1) for g in self._fulls]
        _torch.chunk_cat(grads, num, out=self._flat_grad.view(num, -1))
        dist.reduce_scatter_tensor(self._flat_sum, self._flat_grad)
