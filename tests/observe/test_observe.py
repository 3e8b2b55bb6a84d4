"""`acc.observe`: the recorded steps are those that the engine ran, and what they show is right."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import accordion as acc
from accordion.engine.streams import Steps, Transfer
from accordion.observe.findings import findings, unit_times
from accordion.observe.trace import Trace, as_perfetto, page_data
from accordion.observe.values import COMPUTE, UNITS, WAIT, MemoryPoint, RankTrace, TraceSpan, UnitFacts
from tests.devices import device
from tests.inside import engine_in
from tests.support import models
from tests.support.checks import PlantedError
from tests.support.ranked import on_world, under_strategies

STEPS = 2


class Sleep(nn.Module):
    """An identity that takes `seconds` on the given ranks."""

    def __init__(self, seconds: float, *ranks: int) -> None:
        super().__init__()
        self.seconds, self.ranks = seconds, ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_rank() in self.ranks:
            time.sleep(self.seconds)
        return x


def slow_work(seconds: float) -> SimpleNamespace:
    """Return a work of a backend that ends after `seconds`."""
    future: torch.futures.Future[None] = torch.futures.Future()
    threading.Timer(seconds, future.set_result, [None]).start()
    return SimpleNamespace(get_future=lambda: future, is_completed=future.done, wait=lambda *timeout: future.wait())


def slow_link(model: nn.Module, seconds: float) -> None:
    """Let each gather of `model` take `seconds` longer."""
    stream = engine_in(model).context.gather_stream
    start = stream.start

    def slow(steps: Steps) -> Steps:
        for pending in steps:
            yield pending._replace(works=[*pending.works, slow_work(seconds)])

    stream.start = lambda steps, *args: start(slow(steps), *args)


def trained(model: nn.Module, num_steps: int, micro: int = 1, first: int = 0) -> list[torch.Tensor]:
    optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(first, first + num_steps):
        for part in range(micro):
            tokens, targets = models.batch(step, part, torch.distributed.get_rank(), vocab=48)
            loss = models.loss_of(model(tokens), targets)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@under_strategies(2)
def test_the_trace_has_the_steps_of_all_ranks_and_changes_nothing(mesh: Any, strategy: Any) -> None:
    plain = trained(acc.shard(models.seeded(), mesh=mesh, strategy=strategy), 5, micro=2)
    model = acc.shard(models.seeded(), mesh=mesh, strategy=strategy)
    with acc.observe(model, steps=STEPS) as trace:
        observed = trained(model, 5, micro=2)
    assert all(map(torch.equal, plain, observed))
    engine = engine_in(model)
    assert engine.context.gather_stream.makes is Transfer
    assert [rank.rank for rank in trace.ranks] == mesh.mesh.flatten().tolist()
    for rank in trace.ranks:
        assert len(rank.steps) == STEPS
        assert [unit.name or "root" for unit in engine.units] == [unit.name for unit in rank.units]
        for start_us, end_us in rank.steps:
            compute = sorted(
                (span for span in rank.spans if span.lane == COMPUTE and start_us <= span.start_us < end_us),
                key=lambda span: span.start_us,
            )
            assert all(a.end_us <= b.start_us + 1 for a, b in pairwise(compute))
            assert sum(span.us for span in compute) == pytest.approx(end_us - start_us, abs=1)
            kinds = [span.kind for span in compute]
            assert kinds.index("forward") < kinds.index("backward") < kinds.index("optimizer")
            if strategy.params is acc.Place.SHARD:
                for index in range(len(rank.units)):
                    assert any(s.unit == index for s in rank.spans if s.lane == UNITS), rank.units[index].name
        assert any(point.gradients for point in rank.memory)


@on_world(2)
def test_kinds_of_memory_sum_to_the_allocated_bytes(mesh: Any) -> None:
    gc.collect()
    earlier = 0 if device().type == "cpu" else torch.accelerator.memory_allocated()  # by other tests of this process
    model = acc.shard(models.seeded(width=64, hidden=256), mesh=mesh)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    tokens, targets = models.batch(0, 0, 0, vocab=48)
    live, table = [], torch.zeros(2**18, device=device())  # 1 MiB that is no part of the step

    def step() -> None:
        models.loss_of(model(tokens), targets).backward()
        if device().type != "cpu":
            live.append(torch.accelerator.memory_allocated())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with acc.observe(model, steps=1) as trace:
        for _ in range(3):
            step()
    rank = trace.ranks[0]
    shards = sum(p.to_local().nbytes for p in model.parameters())
    assert rank.shard_bytes == shards
    assert rank.state_bytes == pytest.approx(2 * shards, rel=0.01)
    last = rank.memory[-1]
    assert last.full == 0
    assert last.gradients == shards
    full = sum(unit.full_bytes for unit in rank.units)
    assert 0 < max(point.full for point in rank.memory) < full
    assert max(point.activations for point in rank.memory) > last.activations
    if live:
        assert last.other - earlier == pytest.approx(table.nbytes, rel=0.05)
        assert rank.shard_bytes + rank.state_bytes + last.total == pytest.approx(live[-2], rel=0.01)


@on_world(2)
def test_a_rank_that_computes_longer_is_named_with_its_unit(mesh: Any) -> None:
    model = models.seeded()
    model.blocks[1].up = nn.Sequential(model.blocks[1].up, Sleep(0.2, 1))
    acc.shard(model, mesh=mesh)
    trained(model, 3)  # in the first steps the host waits for other ranks
    with acc.observe(model, steps=1) as trace:
        trained(model, 3, first=3)
    slow = [finding.text for finding in findings(trace.ranks) if finding.text.startswith("rank")]
    assert len(slow) == 1
    assert slow[0].startswith("rank 1 computes")
    assert "blocks.1" in slow[0]


@on_world(2)
@pytest.mark.cpu("the slow link is one of works that the host waits for")
def test_a_missing_prefetch_is_named_and_the_named_budget_hides_the_gathers(mesh: Any) -> None:
    def prefetch_finding(prefetch: acc.Prefetch) -> str | None:
        model = models.seeded()
        for block in model.blocks:
            block.up = nn.Sequential(block.up, Sleep(0.06, 0, 1))
        acc.shard(model, mesh=mesh, strategy="shard_grad_op", prefetch=prefetch)
        slow_link(model, 0.04)
        trained(model, 2)
        with acc.observe(model, steps=1) as trace:
            trained(model, 3, first=2)
        texts = [finding.text for finding in findings(trace.ranks) if "Prefetch(" in finding.text]
        assert len(texts) < 2
        return next(iter(texts), None)

    text = prefetch_finding(acc.Prefetch(budget_bytes=0))
    assert text is not None
    assert text.startswith("gathers of blocks.")
    named = re.search(r"accordion\.Prefetch\(budget_bytes=(\d+)\)", text)
    assert named is not None
    assert prefetch_finding(acc.Prefetch(budget_bytes=int(named[1]))) is None


@on_world(2)
def test_offloaded_steps_are_on_their_own_lane_and_a_validation_is_in_no_step(mesh: Any) -> None:
    model = acc.shard(models.seeded(), mesh=mesh, offload=acc.Offload(params="host", optimizer="host"))
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    tokens, targets = models.batch(0, 0, torch.distributed.get_rank(), vocab=48)
    with acc.observe(model, steps=2) as trace:
        for _ in range(4):
            models.loss_of(model(tokens), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(tokens)
    for rank in trace.ranks:
        assert len(rank.steps) == 2
        spans = {lane: [span for span in rank.spans if span.lane == lane] for lane in (COMPUTE, "fetch", "host step")}
        assert all(spans.values())
        for span in spans[COMPUTE]:
            assert any(start_us <= span.start_us and span.end_us <= end_us for start_us, end_us in rank.steps)
        forwards = [span for span in spans[COMPUTE] if (span.kind, span.unit) == ("forward", 1)]
        assert len(forwards) == len(rank.steps)


@on_world(2)
def test_torchs_profiler_names_the_units_of_observed_steps(mesh: Any) -> None:
    model = acc.shard(models.seeded(), mesh=mesh)
    trained(model, 1)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile,
        acc.observe(model, steps=1),
    ):
        trained(model, 2, first=1)
    names = [event.name for event in profile.events()]
    for unit in ("root", "blocks.0", "blocks.2"):
        for phase in ("forward", "backward"):
            assert f"{phase} {unit}" in names, (phase, unit)
    assert "optimizer" in names


@on_world(2)
def test_nothing_recorded_and_wrong_use_are_one_sentence(mesh: Any) -> None:
    with pytest.raises(acc.UsageError, match="not sharded"), acc.observe(nn.Linear(2, 2)):
        pass
    model = acc.shard(models.seeded(), mesh=mesh)
    with acc.observe(model) as trace, pytest.raises(acc.UsageError, match="observed already"), acc.observe(model):
        pass
    for form in (trace.summary, lambda: trace.html("x"), lambda: trace.perfetto("x"), lambda: trace.save("x")):
        with pytest.raises(acc.UsageError, match="no step"):
            form()
    with suppress(PlantedError), acc.observe(model, steps=1) as trace:
        trained(model, 2)
        raise PlantedError
    assert len(trace.ranks) == 1
    assert len(trained(model, 1)) == 1


# -- what a trace shows, from spans by hand


def gathers(*spans: tuple[str, str, int, float, float], ranks: int = 1, **facts: Any) -> list[RankTrace]:
    """Ranks of one step of 100 ms with two units of 1 MiB and these spans (lane, kind, unit, start in ms, end)."""
    units = [UnitFacts(name=name, full_bytes=2**20, shard_bytes=2**19) for name in ("layers.0", "layers.1")]
    values = [
        TraceSpan(lane=lane, kind=kind, unit=unit, start_us=1e3 * start, end_us=1e3 * end)
        for lane, kind, unit, start, end in spans
    ]
    points = [
        MemoryPoint(time_us=0, full=0, gradients=0, activations=4, other=1),
        MemoryPoint(time_us=9, full=2**20, gradients=3, activations=2, other=2),
    ]
    one = RankTrace(
        rank=0, device="cpu", strategy="full_shard", units=units, steps=[(0.0, 1e5)], spans=values, memory=points,
        memory_step=-1, shard_bytes=2**20, state_bytes=2**21,
    )  # fmt: skip
    return [replace(one, rank=rank, **facts) for rank in range(ranks)]


LATE = (
    ("gather", "gather", 0, 0, 10), (WAIT, "gather", 0, 0, 10), (COMPUTE, "forward", 0, 0, 40),
    ("gather", "gather", 1, 40, 50), (WAIT, "gather", 1, 40, 50), (COMPUTE, "forward", 1, 40, 100),
)  # fmt: skip


def test_a_missing_prefetch_is_found_with_its_gain_and_its_cost() -> None:
    (finding,) = findings(gathers(*LATE))
    assert finding.gain_us == pytest.approx(1e4)
    assert finding.text.startswith("gathers of layers.1 are exposed by 10.0 ms in a step; prefetch=accordion.Prefetch(")
    assert "hides up to 10.0 ms over all units and costs 1 MiB" in finding.text
    first, second = unit_times(gathers(*LATE)[0])
    assert (first.forward_us, second.forward_us) == (pytest.approx(3e4), pytest.approx(5e4))
    assert (second.gathers, second.hits, second.gather_wait_us) == (1, 0, pytest.approx(1e4))


def test_a_gather_that_was_prefetched_in_time_is_a_hit_and_no_finding() -> None:
    ahead = (*LATE[:3], ("gather", "gather", 1, 10, 20), (WAIT, "gather", 1, 40, 40.1), LATE[5])
    assert findings(gathers(*ahead)) == []
    assert unit_times(gathers(*ahead)[0])[1].hits == 1


def test_waits_of_the_backward_name_the_strategy_that_ends_them() -> None:
    again = (("gather", "gather", 0, 0, 30), (WAIT, "gather", 0, 10, 30), (COMPUTE, "backward", 0, 10, 100))
    (finding,) = findings(gathers(*again))
    assert finding.gain_us == pytest.approx(2e4)
    assert "strategy='shard_grad_op'" in finding.text
    assert "costs up to 2 MiB" in finding.text
    assert findings(gathers(*again, strategy="shard_grad_op")) == []


# -- forms


def test_forms_agree_with_the_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace(gathers(*LATE, ranks=2))
    trace.save(tmp_path / "step.json")
    assert Trace.open(tmp_path / "step.json") == trace
    trace.html(tmp_path / "step.html", plan=trace)
    page = (tmp_path / "step.html").read_text()
    drawn = json.loads(re.search(r'<script type="application/json" id="trace">(.*)</script>', page)[1])
    assert drawn == json.loads(json.dumps(page_data(trace.ranks, trace.ranks[0])))
    assert drawn["plan"] == [[0.0, 3 * 2**20 + 5], [0.0001, 4 * 2**20 + 7]]
    assert "http://" not in page
    assert "https://" not in page
    rank = drawn["ranks"][1]
    assert [(drawn["lanes"][s[0]], rank["kinds"][s[1]], s[2], s[3], s[4]) for s in rank["spans"]] == [
        (s.lane, s.kind, s.unit, s.start_us, s.us) for s in trace.ranks[1].spans
    ]
    events = json.loads(as_perfetto(trace.ranks))["traceEvents"]
    assert [(e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 0] == [
        (s.start_us, s.us) for s in trace.ranks[0].spans
    ]
    assert any(e["ph"] == "C" and e["args"]["full parameters"] == 2**20 for e in events)
    trace.summary()
    shown = capsys.readouterr().out
    assert shown.startswith("1 steps on 2 ranks, 100.0 ms each (median)\n- gathers of layers.1")


def test_a_page_of_a_thousand_units_is_below_two_megabytes() -> None:
    units = [UnitFacts(name=f"model.layers.{i}.experts.{i}", full_bytes=2**20, shard_bytes=2**19) for i in range(1000)]
    spans = [
        TraceSpan(
            lane=lane, kind=kind, unit=unit, start_us=97.3 * unit + 1e5 * step, end_us=97.3 * unit + 1e5 * step + 55.1
        )
        for step in range(3)
        for unit in range(1000)
        for lane, kind in [(COMPUTE, "forward"), (COMPUTE, "backward"), ("gather", "gather"), (WAIT, "gather")] * 2
    ]
    steps = [(1e5 * step, 1e5 * (step + 1)) for step in range(3)]
    ranks = gathers(ranks=8, units=units, spans=spans, steps=steps)
    data = page_data(ranks)
    assert len(json.dumps(data, separators=(",", ":"))) < 2e6
    assert data["all_ranks"] == 8
    assert len(data["ranks"]) >= 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"accordion_trace": 1}', '{"accordion_trace": 1, "ranks": [{"rank": 0}]}']
)
def test_a_file_that_is_no_whole_trace_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(acc.UsageError, match="not a whole trace"):
        Trace.open(path)
    with pytest.raises(acc.UsageError, match="cannot be read"):
        Trace.open(tmp_path / "none.json")
