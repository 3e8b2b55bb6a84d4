"""Peak bytes of a step on real CPU ranks, as the allocator itself tells torch's profiler."""

from __future__ import annotations

import bisect
import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import accordion as acc
from accordion.config import Place
from accordion.plan.trace import OPTIMIZERS
from tests.plan import subjects

MARK, COUNTED = "a step that is counted", 3


def counted_peak(mesh: Any, architecture: str, case: str) -> int:
    """On one rank: train, the first step uncounted; the most bytes that were taken and not given back at any time in a step."""
    run = subjects.run_of(architecture, case)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.manual_seed(0)
        model = acc.shard(subjects.made(architecture, case, "cpu"), mesh, **run.sharding)
        optimizer = acc.wrap_optimizer(OPTIMIZERS[run.optimizer](model.parameters()))
        for step in range(1 + COUNTED):
            with record_function(MARK) if step else nullcontext():
                for i in range(run.accumulate):
                    later = run.strategy.grads is Place.REPLICATE and i + 1 < run.accumulate
                    with acc.no_sync(model) if later else nullcontext():
                        loss = subjects.loss(architecture, model, subjects.batch_of(architecture))
                        loss.backward()
                acc.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return peak_in(json.loads(path.read_text())["traceEvents"])


def peak_in(events: list[dict[str, Any]]) -> int:
    """The least of all counted steps: threads of gloo now and then drop the last reference to a message, unseen by the profiler,
    which only adds to what seems to be live, until its address is taken again.
    """
    starts = sorted(e["ts"] for e in events if e.get("name") == MARK and e.get("ph") == "X")
    assert len(starts) == COUNTED
    live: dict[int, int] = {}
    total, most = 0, [0] * COUNTED
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        address, num_bytes = event["args"]["Addr"], event["args"]["Bytes"]
        if num_bytes > 0:
            total += num_bytes - live.get(address, 0)
            live[address] = num_bytes
        else:
            total -= live.pop(address, 0)
        step = bisect.bisect_right(starts, event["ts"]) - 1
        if step >= 0:
            most[step] = max(most[step], total)
    return min(most)
