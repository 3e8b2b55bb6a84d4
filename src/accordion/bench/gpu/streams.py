"""Part (c): losses under the debug mode that shows waits which are missing, and the stream of each collective."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import record_function

import accordion as acc
from accordion import _torch
from accordion.bench.contenders import WRAPPERS
from accordion.bench.gpu.findings import Findings
from accordion.bench.model import Llama, batch_of, loss_of
from accordion.config import STRATEGIES, strategy_named
from accordion.engine.communicator import Communicator
from accordion.engine.streams import SideStream
from accordion.models.llama import LlamaShape
from accordion.pages.page import Table
from accordion.pages.stats import compare_losses
from accordion.safety.divergence import DivergenceMonitor
from accordion.workers.ranks import BenchError, Seat, WorkerTeam

ON_SIDE_STREAM = {True: "yes", False: "NO", None: "not shown"}


class SafeRuns:
    """Ranks that share a device over gloo: the debug mode that shows waits that are missing, over all strategies."""

    def __init__(self, seat: Seat, preset: LlamaShape) -> None:
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


class Collectives:
    """One rank with the backend of its device: on which stream each collective runs."""

    def __init__(self, seat: Seat) -> None:
        self._device = seat.device
        self._link = Communicator(dist.group.WORLD, seat.device)

    def streams(self) -> dict[str, dict[str, Any]]:
        """For each collective: the device work that it launched, and whether all of it is on the side stream.

        A sleep there tells the number under which the profiler knows the stream; a device on which nothing sleeps, or
        of which the profiler tells nothing, and the CPU have None there.
        """
        side_stream = SideStream(self._device, DivergenceMonitor([], [0]))
        calls = self._calls()
        for call in calls.values():  # communicators are made at the first call
            wait(call())
        if self._device.type == "cpu":
            return {name: {"work": [], "on_side_stream": None} for name in calls}
        torch.accelerator.synchronize()
        with torch.profiler.profile() as profile:
            with record_function("accordion::sleep"), side_stream.entered():
                _torch.sleep_on_device()
            for name, call in calls.items():
                side_stream.stream.wait_event(side_stream.compute().record_event())
                with record_function(f"accordion::{name}"), side_stream.entered():
                    wait(call())
            torch.accelerator.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profile.export_chrome_trace(str(path))
            work = device_work(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
        ours = {stream for _, stream in work["sleep"]}
        return {
            name: {
                "work": sorted({kernel for kernel, _ in work[name]}),
                "on_side_stream": (bool(work[name]) and {stream for _, stream in work[name]} == ours) if ours else None,
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


def wait(pending: Any) -> None:
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


def safety(preset: LlamaShape, device: str, out: Findings) -> None:
    """(c) Losses under the debug mode beside DistributedDataParallel's, and the stream of each collective."""
    columns = ["", "ranks", "last loss", "agrees"]
    rows: list[list[str]] = []
    for num_ranks in (2, 4):
        if not can_share(device) and num_ranks > torch.accelerator.device_count():
            rows.append(
                ["", str(num_ranks), f"left out: gloo takes no tensors of {device!r}; it takes {num_ranks} devices", ""]
            )
            continue
        losses, failed = safe_losses(preset, num_ranks, device, out)
        wrong = compare_losses(losses, 1e-3).wrong if losses else []
        out.failures += [f"{n}, {num_ranks} ranks: losses are not those of the others" for n in wrong]
        out.data[f"{num_ranks} ranks"] = {"losses": losses, "wrong": wrong, "failed": failed}
        rows += [[n, str(num_ranks), f"{v[-1]:.5f}", "NO" if n in wrong else "yes"] for n, v in losses.items()]
        rows += [[n, str(num_ranks), f"does not run: {f['failed']}"[:90], "NO"] for n, f in failed.items()]
        out.keep(Table(title='(c) debug="streams", ranks sharing the device', columns=columns, rows=list(rows)))
    with WorkerTeam("collectives", out.world(device, threads=1), Collectives) as team:
        out.data["streams"] = found = team.ask("streams")[0]
    if all(f["on_side_stream"] is None for f in found.values()):
        out.tell_not("on which stream a collective runs: torch.profiler tells it of CUDA")
    rows = [[n, ", ".join(f["work"])[:90] or "none", ON_SIDE_STREAM[f["on_side_stream"]]] for n, f in found.items()]
    columns = ["", "work", "on our stream"]
    out.keep(Table(title="(c) work of each collective, world size 1", columns=columns, rows=rows))


def can_share(device: str) -> bool:
    """Whether ranks may share one such device: gloo takes its tensors. Libraries of devices want a device for each rank."""
    return device in dist.Backend.backend_capability["gloo"]


def safe_losses(
    preset: LlamaShape, num_ranks: int, device: str, out: Findings
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """The losses under each strategy, the mean over ranks, and what each one that failed said; ranks begin anew after it."""
    losses, failed = dict[str, list[float]](), dict[str, Any]()
    with ExitStack() as stack:
        team = None
        for name in ("ddp", *(n for n, s in STRATEGIES.items() if not s.hybrid or num_ranks == 4)):
            try:
                if team is None:
                    backend = "gloo" if can_share(device) else ""
                    world = out.world(device, num_ranks, threads=1, backend=backend)
                    team = stack.enter_context(WorkerTeam(f"{num_ranks} ranks", world, SafeRuns, (preset,)))
                losses[name] = [mean(step) for step in zip(*team.ask("losses", name, 4), strict=True)]
            except BenchError as error:
                team, failed[name] = None, out.fail(f"{name}, {num_ranks} ranks", error)
    return losses, failed
