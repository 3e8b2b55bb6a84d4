"""Check the order of streams on one accelerator; needs only torch, numpy and safetensors.

Ranks that share the device train under `debug="streams"`, in which a missing wait changes the losses, and under
DistributedDataParallel, whose losses must be the same. Then torch's profiler shows on which stream each collective runs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from accordion.bench.model import GPT, batch_of, loss_of
from accordion.cli import main
from accordion.config import STRATEGIES, strategy_named
from accordion.devices import devices_here, devices_named
from accordion.engine.communicator import Communicator
from accordion.engine.streams import SideStream
from accordion.errors import UsageError
from accordion.options import read
from accordion.pages.machine import describe
from accordion.pages.page import FOLDER, Page, Table, as_text, check_folder, write
from accordion.pages.stats import compare_losses
from accordion.safety.divergence import DivergenceMonitor
from accordion.workers.ranks import BenchError, RankSetup, WorkerTeam, World

SIZES = {"vocab": 512, "width": 256, "blocks": 4, "heads": 4}  # of the GPT that is trained
STEPS = 4
TOLERANCE = 1e-3  # of losses, relative
TIMEOUT_S = 110.0  # for one answer of a rank's process
ON_SIDE_STREAM = {True: "yes", False: "NO", None: "not shown"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Check the order of streams on one accelerator.

    Args:
        device: auto (the accelerators of this machine), or cpu to test the script itself
    """

    device: str = "auto"


def run(words: list[str]) -> int:
    """Run the script with the arguments `words`: print the page and write it into `FOLDER`. Return the exit code: 1 if a check
    failed, else 0. Raises `UsageError` for wrong arguments, and without an accelerator unless `--device cpu` is given."""
    options = read(Options, words, "benchmarks/streams.py", __doc__ or "")
    if options is None:
        return 0
    devices = devices_named(options.device, "--device", devices_here())
    if devices.is_cpu and options.device != "cpu":
        raise UsageError("no accelerator is found; check the driver, or test the script itself with --device cpu.")
    check_folder(FOLDER)
    page, failures = checked(devices.type)
    print("\n\n".join([*map(as_text, page.tables), *page.notes]))
    print(f"written: {write(page, FOLDER)}")
    return 1 if failures else 0


def checked(device: str) -> tuple[Page, list[str]]:
    """Run the checks on the device type `device`. Returns (page, description of each failure)."""
    rows, data, failures = list[list[str]](), dict[str, Any](), list[str]()
    for num_ranks in (2, 4):
        if not can_share(device) and num_ranks > torch.accelerator.device_count():
            rows.append(
                ["left out", str(num_ranks), f"gloo does not support {device!r}: each rank needs its own device", ""]
            )
            continue
        losses, failed = losses_of(num_ranks, device)
        wrong = compare_losses(losses, TOLERANCE).wrong if losses else []
        data[f"{num_ranks} ranks"] = {"losses": losses, "wrong": wrong, "failed": failed}
        rows += [[name, str(num_ranks), f"{v[-1]:.5f}", "NO" if name in wrong else "yes"] for name, v in losses.items()]
        rows += [[name, str(num_ranks), f"does not run: {error}", "NO"] for name, error in failed.items()]
        failures += [f"{name} on {num_ranks} ranks: {failed.get(name, 'wrong losses')}" for name in (*wrong, *failed)]
    streams: dict[str, dict[str, Any]] = {}
    try:
        with WorkerTeam("collectives", world_of(device, 1), Collectives) as team:
            streams = team.ask("streams")[0]
    except BenchError as error:
        failures.append(str(error))
    failures += [f"{name} is not on the side stream" for name, s in streams.items() if s["on_side_stream"] is False]
    notes = [f"failed: {failure}" for failure in failures]
    if all(s["on_side_stream"] is None for s in streams.values()):
        notes.append("not checked: on which stream a collective runs, which torch.profiler shows on CUDA only")
    work = [[n, ", ".join(s["work"])[:90] or "none", ON_SIDE_STREAM[s["on_side_stream"]]] for n, s in streams.items()]
    page = Page(
        name="streams",
        notes=notes,
        tables=[
            Table(title='debug="streams", ranks share the device', columns=["", "ranks", "loss", "agrees"], rows=rows),
            Table(title="work of each collective, one rank", columns=["", "work", "on our stream"], rows=work),
        ],
        data={"machine": describe(device), **data, "streams": streams, "failures": failures},
    )
    return page, failures


def world_of(device: str, num_ranks: int, backend: str = "") -> World:
    return World(num_ranks=num_ranks, device_type=device, threads=1, backend=backend, timeout_s=TIMEOUT_S)


def can_share(device: str) -> bool:
    """Return True if several ranks can share one device of this type: gloo supports it, device libraries do not."""
    return device in dist.Backend.backend_capability["gloo"]


def losses_of(num_ranks: int, device: str) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Train on `num_ranks` ranks under "ddp" and each strategy that runs on so many. Returns (name -> loss of each step, the
    mean over ranks; name of each that failed -> error)."""
    losses, failed = dict[str, list[float]](), dict[str, str]()
    world = world_of(device, num_ranks, "gloo" if can_share(device) else "")
    todo = ["ddp", *(name for name, s in STRATEGIES.items() if not s.hybrid or num_ranks == 4)]
    while todo:  # new processes after each failure
        try:
            with WorkerTeam(f"{num_ranks} ranks", world, SharedDevice, (SIZES,)) as team:
                while todo:
                    losses[todo[0]] = [mean(step) for step in zip(*team.ask("losses", todo[0]), strict=True)]
                    todo.pop(0)
        except BenchError as error:
            failed[todo.pop(0)] = str(error)[:300]
    return losses, failed


class SharedDevice:
    """One of several ranks that share a device; `losses` trains a GPT with `sizes`."""

    def __init__(self, setup: RankSetup, sizes: dict[str, int]) -> None:
        self._setup, self._sizes = setup, sizes

    def losses(self, strategy: str) -> list[float]:
        """Train a new model under a strategy, or under DistributedDataParallel ("ddp"), and return this rank's losses."""
        torch.manual_seed(0)
        setup = self._setup
        model: nn.Module = GPT(**self._sizes).to(setup.device)
        if strategy == "ddp":
            model = WRAPPERS["ddp"](model, setup, False)
        else:
            policy, ranks = strategy_named(strategy), setup.num_ranks
            sizes, names = ((ranks // 2, 2), ("replicate", "shard")) if policy.hybrid else ((ranks,), ("shard",))
            mesh = init_device_mesh(setup.device.type, sizes, mesh_dim_names=names)
            model = acc.shard(model, mesh, strategy=policy, debug="streams")
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(STEPS):
            tokens, targets = (t.to(setup.device) for t in batch_of(step, setup.rank, (2, 32), self._sizes["vocab"]))
            loss = loss_of(model(tokens), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses


class Collectives:
    """Runs each collective on a single rank with its device's backend, and reports the stream on which it ran."""

    def __init__(self, setup: RankSetup) -> None:
        self._device = setup.device
        self._link = Communicator(dist.group.WORLD, setup.device)

    def streams(self) -> dict[str, dict[str, Any]]:
        """Run each collective on the side stream. Returns collective -> {"work": names, "on_side_stream": answer}. The names are
        those of its kernels and copies on the device. The answer is True if all of them ran on the side stream, and None on CPU
        and on devices that cannot sleep or that the profiler does not support."""
        side_stream = SideStream(self._device, DivergenceMonitor([], [0]))
        calls = self._calls()
        for call in calls.values():  # the first call of a collective creates its communicator
            wait(call())
        if self._device.type == "cpu":
            return {name: {"work": [], "on_side_stream": None} for name in calls}
        torch.accelerator.synchronize()
        with torch.profiler.profile() as profile:
            with record_function("accordion::sleep"), side_stream.entered():
                _torch.sleep_on_device()  # shows the profiler's number for the side stream
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
        whole, part, other = (torch.ones(4096, device=self._device) for _ in range(3))
        link = self._link
        return {
            "gather": lambda: link.gather([whole, other], [part, part]),
            "exchange": lambda: link.exchange([(whole, part, [], []), (other, part, [], [])]),
            "reduce_scatter": lambda: link.scatter_sum([whole, other], [part, part]),
        }


def wait(pending: Any) -> None:
    for work in pending.works:
        work.wait()


def device_work(events: Sequence[dict[str, Any]]) -> dict[str, list[tuple[str, int]]]:
    """Return name -> [(kernel or copy, stream), ...] for the ranges `accordion::<name>` in the `events` of a profiler."""
    # Work belongs to the range in which the host launched it: launch and work have the same correlation id.
    complete = [e for e in events if e.get("ph") == "X" and "ts" in e]
    prefix = "accordion::"
    ranges = [e for e in complete if str(e.get("name", "")).startswith(prefix) and e.get("cat") == "user_annotation"]
    launches = (e for e in complete if e.get("cat") in ("cuda_runtime", "cuda_driver"))
    launched = {e["args"]["correlation"]: e["ts"] for e in launches if "correlation" in e.get("args", {})}
    work: dict[str, list[tuple[str, int]]] = {e["name"].removeprefix(prefix): [] for e in ranges}
    for e in complete:
        if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        at = launched.get(e["args"].get("correlation"))
        for r in ranges:
            if at is not None and r["ts"] <= at <= r["ts"] + r["dur"]:
                work[r["name"].removeprefix(prefix)].append((e["name"], e["args"]["stream"]))
    return work


if __name__ == "__main__":
    sys.exit(main(run=run))
