"""Peak bytes of a step on real CPU ranks, as the allocator itself tells torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import accordion as acc
from accordion.config import Place
from accordion.engine.hooks import engine_of
from accordion.offload.step.deferred_step import tiers_of
from accordion.plan.trace import fsdp2
from accordion.plan.trace.optimizers import OPTIMIZERS
from accordion.plan.trace.own_engine import AtOnce
from accordion.plan.trace.spread import ALL_AXES, EXPERT_DATA_AXIS, EXPERTS_AXIS, spread_experts
from tests.plan import subjects

MARK = "the step that is counted"


def exchanged(group: Any, rows: Tensor) -> Tensor:
    """A real all-to-all, as many rows to each."""
    out, rows = torch.empty_like(rows), rows.contiguous()
    dist.all_to_all_single(out, rows, group=group)
    return out


def counted_peak(mesh: Any, architecture: str, case: str, name: str = "accordion") -> int:
    """On one rank: train two steps; the most bytes that were taken and not given back at any time in the second."""
    run = subjects.run_of(architecture, case, name)
    # Without acc_events torch 2.11 warns of cycles, of which there is one.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        torch.manual_seed(0)
        model = subjects.made(architecture, case, "cpu")
        clip: Callable[[Any, float], object]
        if name == "fsdp2":
            fsdp2.apply(model, mesh, replace(run.sharding, units=run.units))
            optimizer, clip = OPTIMIZERS[run.optimizer].make(model.parameters()), fsdp2.clip
        else:
            meshes = None
            if run.expert_parallel > 1:
                meshes = spread_experts(model, mesh, partial(exchanged, mesh[EXPERTS_AXIS].get_group()))
                mesh = mesh[EXPERT_DATA_AXIS, EXPERTS_AXIS]._flatten(ALL_AXES)
            acc.shard(model, mesh, replace(run.sharding, meshes=meshes))
            engine = engine_of(model)
            if run.sharding.offload.asks and engine is not None:  # the profiler follows no other thread
                vars(tiers_of(engine))["stepper"] = AtOnce(nullcontext)
            optimizer, clip = (
                acc.wrap_optimizer(OPTIMIZERS[run.optimizer].make(model.parameters())),
                acc.clip_grad_norm_,
            )
        for step in range(2):
            with record_function(MARK) if step else nullcontext():
                for i in range(run.accumulate):
                    later = run.strategy.grads is Place.REPLICATE and i + 1 < run.accumulate
                    with acc.no_sync(model) if later else nullcontext():
                        loss = subjects.loss(architecture, model, subjects.batch_of(architecture))
                        loss.backward()
                clip(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return peak_in(json.loads(path.read_text())["traceEvents"])


def peak_in(events: list[dict[str, Any]]) -> int:
    """An address that is taken again was given back unseen: threads of gloo now and then drop the last reference to a message,
    which the profiler does not follow. Until then it only adds to what seems to be live.
    """
    start = next(e["ts"] for e in events if e.get("name") == MARK)
    live: dict[int, int] = {}
    total = best = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        address, num_bytes = event["args"]["Addr"], event["args"]["Bytes"]
        if num_bytes > 0:
            total += num_bytes - live.get(address, 0)
            live[address] = num_bytes
        else:
            total -= live.pop(address, 0)
        if event["ts"] >= start:
            best = max(best, total)
    return best
