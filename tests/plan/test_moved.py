"""Plans with optimizer states on the host: streams computed by hand, and copies compared with those of the engine."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

import accordion as acc
from accordion.plan.choice import Choice
from accordion.plan.events import Alloc, Category, Enter, Event, Land, Launch, Log, Op, StepPart, StepPhase
from accordion.plan.extrapolate.offload import offloaded
from accordion.plan.hardware import GB, GPUS, HOST_MEMORY_GBPS, REACHED, Cluster, Scale
from accordion.plan.replay.cost import Costs, costs_of
from accordion.plan.replay.peak import peak_of
from accordion.plan.replay.predict import memory_of
from accordion.plan.replay.timeline import simulate
from accordion.plan.search.evaluate import Evaluator
from accordion.plan.trace.setup import TrainingSetup
from accordion.plan.trace.trace import trace
from tests.plan import builders
from tests.plan.builders import OFFLOADS, space
from tests.plan.test_plan import gpt, run_of

RANKS = 2
STEPPED = 34  # bytes of host memory for an element: Adam's 28, and its row in bf16 from its master
ELEMENTS = round(3 * HOST_MEMORY_GBPS * GB / RANKS / STEPPED)  # of a unit on one rank: its step takes three seconds
CLIP_S = 3 * 12 / STEPPED  # of a unit: its gradients are read, read again and written
CLUSTER = Cluster(
    gpu=replace(
        GPUS["h100"], host_gbps=2 * ELEMENTS / GB / 0.5 / REACHED["middle"].link
    ),  # rows in bf16: half a second
    disk_gbps=16 * ELEMENTS * RANKS / GB / 5,  # states, read and written: five seconds
)


def choice(offload: str, gpus: int = RANKS) -> Choice:
    return builders.choice(gpus=gpus, offload=OFFLOADS[offload])


def log_of(units: int, forward_s: float) -> Log:
    """Return a log that gathers one unit ahead; a reduce ends during the next backward; a backward takes two forwards."""
    gpu = CLUSTER.gpu

    def product(seconds: float) -> Op:
        flops = seconds * gpu.tflops * 1e12 * gpu.products
        return Op("aten.mm.default", flops, 0, "bfloat16", "compute")

    events: list[Event] = [Enter(StepPart(StepPhase.FORWARD, -1)), Launch(100, "gather")]
    for u in range(units):
        events += [Enter(StepPart(StepPhase.FORWARD, u)), Land(100 + u)]
        events += [Launch(101 + u, "gather")] if u + 1 < units else []
        events.append(product(forward_s))
    events += [Enter(StepPart(StepPhase.BACKWARD, -1)), Launch(200 + units - 1, "gather")]
    for u in reversed(range(units)):
        events += [Enter(StepPart(StepPhase.BACKWARD, u)), Land(200 + u)]
        events += [Launch(199 + u, "gather")] if u else []
        events += [product(2 * forward_s), Alloc(u, 4 * ELEMENTS, Category.GRADIENTS, "compute", "reduce")]
        events.append(Launch(300 + u, "reduce"))
        events += [Land(301 + u)] if u + 1 < units else []
    events += [Land(300), Enter(StepPart(StepPhase.STEP, -1))]
    kernels = (("_foreach_norm.Scalar", 4), ("_foreach_mul_.Tensor", 8), ("_fused_adamw_.default", 28))
    events += [Op(f"aten.{name}", 0.0, units * each * ELEMENTS, "float32", "compute") for name, each in kernels]
    kinds = ((Category.PARAMETERS, 4), (Category.OPTIMIZER, 8))
    held = [
        (Alloc(1000 + 10 * u + i, each * ELEMENTS, kind, "compute", "made"), u)
        for u in range(units)
        for i, (kind, each) in enumerate(kinds)
    ]
    return Log(held=list(held), events=events, units=[f"blocks.{u}" for u in range(units)])


def costs(scale: float = 1.0) -> Costs:
    both = Scale(kernels=scale, messages=scale)
    return costs_of(replace(CLUSTER, scales={"middle": both}), "middle", RANKS)


@pytest.mark.parametrize(
    ("offload", "units", "forward_s", "begins_s", "seconds"),
    [
        # Steps end at 3 and 6; the caller waits for the second one before it begins the first forward: 6 to 8. Each backward
        # waits half a second for rows where these rest on the host, once where the next ones come meanwhile: 8.5 to 12.5.
        # The gradients of the last unit leave when they have been reduced and the next backward is through: to 13.5, 14.5.
        ("all", 2, 1.0, 6.0, 14.5),
        ("optimizer", 2, 1.0, 6.0, 14.0),
        # The disk takes five seconds for a unit, longer than its step: they end at 5 and 10.
        ("disk", 2, 1.0, 10.0, 18.5),
        # Three units step until 9; the third one's is hidden behind the first forward, 6 to 10. Two more forwards to 18, rows,
        # three backwards of 8 to 42.5, the first two gradients behind two backwards, then the last.
        ("all", 3, 4.0, 6.0, 44.5),
    ],
)
def test_streams_of_a_step_on_the_host_match_arithmetic(offload, units, forward_s, begins_s, seconds):
    step = simulate(offloaded(log_of(units, forward_s), choice(offload).offload, compute_bytes=2), costs())
    first = min(s.start_s for s in step.stretches if s.stream == "compute")
    assert first == pytest.approx(begins_s, rel=1e-3)
    assert step.seconds == pytest.approx(seconds + units * CLIP_S, rel=1e-3)
    assert step.exposed_s == pytest.approx(step.seconds - 3 * units * forward_s, rel=1e-3)
    drawn = sum(s.seconds for s in step.stretches if s.stream == "compute")
    assert drawn == pytest.approx(3 * units * forward_s, rel=1e-3)  # what waits is no bar
    steps = [(s.label, s.start_s, s.seconds) for s in step.stretches if s.stream == "host step"]
    assert [name for name, _, _ in steps] == [f"step of blocks.{u}" for u in range(units)]
    assert sum(took for _, _, took in steps) == pytest.approx(3 * units, rel=1e-3)
    assert ("disk" in {s.stream for s in step.stretches}) is (offload == "disk")
    copied = {name: sum(s.seconds for s in step.stretches if s.stream == name) for name in ("fetch", "store")}
    assert copied["store"] == pytest.approx(units, rel=1e-3)
    assert copied["fetch"] == pytest.approx(units * (0.5 if offload == "optimizer" else 1.0), rel=1e-3)


def test_calibration_by_a_step_does_not_scale_work_of_the_host():
    moved = offloaded(log_of(2, 1.0), choice("all").offload, 2)
    plain, scaled = (simulate(moved, costs(scale)) for scale in (1.0, 2.0))
    for stream in ("fetch", "store", "host step", "host"):
        took = [sum(s.seconds for s in step.stretches if s.stream == stream) for step in (plain, scaled)]
        assert took[0] == pytest.approx(took[1])
        assert took[0] > 0
    assert scaled.seconds == pytest.approx(plain.seconds + 6, rel=0.01)


@pytest.mark.parametrize(
    ("offload", "accumulate"), [("all", 1), ("optimizer", 2), pytest.param("all", 2, marks=pytest.mark.slow)]
)
def test_copies_match_those_of_the_engine_in_order_and_size(offload, accumulate):
    """Compare the order of all transfers and the sizes of copies, with tensors so small that padding shows."""
    run = replace(run_of(8), accumulate=accumulate)
    places = {"params": "host"} if offload == "all" else {}
    asked = replace(run, sharding=replace(run.sharding, offload=acc.Offload(optimizer="host", **places)))
    made, traced = offloaded(trace(gpt(3), run), choice(offload, 8).offload, 2), trace(gpt(3), asked)
    assert launches(made) == launches(traced)
    for stream in ("fetch", "store"):
        mine, its = (
            [e.num_bytes for e in log.events if isinstance(e, Op) and e.stream == stream] for log in (made, traced)
        )
        assert len(mine) == len(its) > 0
        assert mine == pytest.approx(its, rel=0.02)
    assert peak_of(made).num_bytes == pytest.approx(peak_of(traced).num_bytes, rel=1e-3)


def launches(log: Log) -> list[tuple[str, StepPart]]:
    found, place = [], StepPart(StepPhase.FORWARD, -1)
    for event in log.events:
        if isinstance(event, Enter):
            place = event.place
        elif isinstance(event, Launch):
            found.append((event.stream, place))
    return found


def test_a_single_rank_is_planned_as_the_engine_runs_it():
    """Its shards are the parameters; if these are on the host it gathers them, which no trace without offload shows."""
    cluster = replace(CLUSTER, gpus=1)
    looked = space(lambda size: gpt(3, batch=size), strategies=["full_shard"], micro_batches=[2], cluster=cluster)
    asked = replace(choice("disk", 1), micro_batch=2)
    evaluator = Evaluator(looked, lambda text: None)
    made = evaluator.candidate(asked)
    whole = TrainingSetup(ranks=1, sharding={"offload": acc.Offload(params="host", optimizer="host")})
    assert made.memory is not None
    assert made.memory.peak.num_bytes == peak_of(trace(gpt(3), whole)).num_bytes
    assert made.memory.peak.highest["gathered"] > 0
    evaluator.at_all_rates(made)
    streams = {s.stream for s in made.steps["middle"].stretches}
    assert {"compute", "fetch", "store", "host step", "host", "disk"} <= streams


@pytest.mark.parametrize("step", ["host", "device"])
def test_a_plan_runs_on_one_thread(step, monkeypatch):
    """Fake tensors do not work in a second thread: a plan failed at times while another thread filled a state."""
    begun: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (begun.append(self.name), start(self))[1])
    offload = acc.Offload(optimizer="host", step=step)
    log = trace(gpt(2), TrainingSetup(ranks=1, node=1, sharding={"offload": offload}))
    assert peak_of(log).num_bytes > 0
    assert not [name for name in begun if name.startswith("accordion")]


def test_states_on_disk_and_on_the_host_take_the_same_device_memory():
    """A search relies on this: it replays the memory of one of them for both."""
    log = log_of(3, 1.0)
    moved = [offloaded(log, choice(tier).offload, 2) for tier in ("all", "disk")]
    host, disk = (memory_of(m) for m in moved)
    assert host.reserved_bytes == disk.reserved_bytes
    assert host.peak == disk.peak
    evaluator = Evaluator(space(cluster=CLUSTER), say=lambda text: None)
    evaluator.traces.traced[choice("none")] = log
    found = [evaluator.candidate(choice(tier)) for tier in ("all", "disk")]
    assert found[0].memory is found[1].memory
    assert found[0].memory.peak == host.peak
    assert evaluator.candidate(choice("optimizer")).memory is not found[0].memory
