"""Plans with offload, of states and of inputs of recomputed units: times computed by hand, bytes compared with the engine's."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import accordion as acc
from accordion.engine.hooks import engine_of
from accordion.offload.activations import NUM_STAGES
from accordion.offload.step.deferred_step import tiers_of
from accordion.plan.choice import Choice
from accordion.plan.events import Alloc, Category, Enter, Event, Launch, Log, Op, StepPart, StepPhase, Wait
from accordion.plan.hardware import GB, GIB, GPUS, HOST_MEMORY_GBPS, MARGIN, REACHED, Cluster
from accordion.plan.replay.cost import Costs
from accordion.plan.replay.offload import disk_bytes, host_bytes, host_work, inputs_of, offloaded, with_host_work
from accordion.plan.replay.peak import peak_of
from accordion.plan.replay.timeline import Step, StreamClock
from accordion.plan.search.evaluate import HOST_MARGIN, Evaluator
from accordion.plan.trace.trace import trace
from tests.plan import builders, subjects
from tests.plan.builders import BF16, OFFLOADS, ONE_CHOICE, config_in, gpt, planned, run_of, space
from tests.support.offloads import taken_by

PURE = acc.Precision(params=torch.bfloat16, master=None)
RANKS = 2
STEPPED = 34  # bytes of host memory for an element: Adam's 28, and its row in bf16 from its master
ELEMENTS = round(3 * HOST_MEMORY_GBPS * GB / RANKS / STEPPED)  # of a unit on one rank: its step takes three seconds
CLIP_S = 3 * 12 / STEPPED  # of a unit: its gradients are read, read again and written
ROWS_GBPS = 2 * ELEMENTS / GB / 0.5  # rows in bf16: half a second
CLUSTER = Cluster(
    gpu=replace(GPUS["h100"], host_gbps=ROWS_GBPS / REACHED["middle"].link),
    disk_gbps=16 * ELEMENTS * RANKS / GB / 5,  # states, read and written: five seconds
)


def choice(**fixed: Any) -> Choice:
    return builders.choice(**{"gpus": RANKS, **fixed})


def log_of(units: int, forward_s: float) -> Log:
    """Return a log that gathers one unit ahead; a reduce ends during the next backward; a backward takes two forwards."""
    gpu = CLUSTER.gpu

    def product(seconds: float) -> Op:
        flops = seconds * gpu.tflops * 1e12 * gpu.products
        return Op("aten.mm.default", flops, 0, "bfloat16", "compute")

    events: list[Event] = [Enter(StepPart(StepPhase.FORWARD, -1)), Launch(100, "gather")]
    for u in range(units):
        events += [Enter(StepPart(StepPhase.FORWARD, u)), Wait(100 + u, "compute")]
        events += [Launch(101 + u, "gather")] if u + 1 < units else []
        events.append(product(forward_s))
    events += [Enter(StepPart(StepPhase.BACKWARD, -1)), Launch(200 + units - 1, "gather")]
    for u in reversed(range(units)):
        events += [Enter(StepPart(StepPhase.BACKWARD, u)), Wait(200 + u, "compute")]
        events += [Launch(199 + u, "gather")] if u else []
        events += [product(2 * forward_s), Alloc(u, 4 * ELEMENTS, Category.GRADIENTS, "compute", "reduce")]
        events.append(Launch(300 + u, "reduce"))
        events += [Wait(301 + u, "compute")] if u + 1 < units else []
    events += [Wait(300, "compute"), Enter(StepPart(StepPhase.STEP, -1))]
    kernels = (("_foreach_norm.Scalar", 4), ("_foreach_mul_.Tensor", 8), ("_fused_adamw_.default", 28))
    events += [Op(f"aten.{name}", 0.0, units * each * ELEMENTS, "float32", "compute") for name, each in kernels]
    kinds = ((Category.PARAMETERS, 4), (Category.OPTIMIZER, 8))
    held = [
        (Alloc(1000 + 10 * u + i, each * ELEMENTS, kind, "compute", "made"), u)
        for u in range(units)
        for i, (kind, each) in enumerate(kinds)
    ]
    return Log(held=list(held), events=events, units=[f"blocks.{u}" for u in range(units)])


@pytest.mark.parametrize(
    ("offload", "units", "forward_s", "seconds"),
    [
        # Steps end at 3 and 6; the first forward begins after the second one: 6 to 8. Backwards wait half a second for the
        # first rows if these are on the host: 8.5 to 12.5. The gradients of two units leave after that: to 14.5.
        ("all", 2, 1.0, 14.5),
        ("optimizer", 2, 1.0, 14.0),
        # The disk takes five seconds for a unit, longer than its step: they end at 5 and 10.
        ("disk", 2, 1.0, 18.5),
        # Three units step until 9; the third one's is hidden behind the first forward, 6 to 10. Two more forwards to 18, rows,
        # three backwards of 8 to 42.5, the first gradients behind two backwards, then the last two.
        ("all", 3, 4.0, 44.5),
    ],
)
def test_time_of_a_step_on_the_host_matches_arithmetic(offload, units, forward_s, seconds):
    log, asked, costs = log_of(units, forward_s), choice(offload=OFFLOADS[offload]), Costs(CLUSTER, "middle", RANKS)
    step = StreamClock(costs).run(offloaded(log, asked.offload, compute_bytes=2))
    step = with_host_work(step, host_work(log, asked, 2), asked, units, costs)
    assert step.seconds == pytest.approx(seconds + units * CLIP_S, rel=1e-3)
    assert step.exposed_s == pytest.approx(step.seconds - 3 * units * forward_s, rel=1e-3)
    assert sum(took for took, _ in step.by_place.values()) == pytest.approx(step.seconds)
    took = step.by_kind
    assert took["host step"] == pytest.approx(3 * units, rel=1e-3)
    assert took.get("disk", 0.0) == pytest.approx(5 * units if offload == "disk" else 0.0, rel=1e-3)
    assert took["store"] == pytest.approx(units, rel=1e-3)
    assert took["fetch"] == pytest.approx(units * (0.5 if offload == "optimizer" else 1.0), rel=1e-3)


@pytest.mark.parametrize(
    ("offload", "accumulate", "precision"),
    [
        ("all", 1, BF16),
        ("optimizer", 1, PURE),
        pytest.param("optimizer", 2, BF16, marks=pytest.mark.slow),
        pytest.param("all", 2, BF16, marks=pytest.mark.slow),
        pytest.param("all", 1, PURE, marks=pytest.mark.slow),
    ],
)
def test_copies_match_those_of_the_engine_in_size(offload, accumulate, precision):
    """Compare the bytes of copies, and the peak, with tensors so small that padding shows."""
    run = run_of(8, precision=precision, accumulate=accumulate)
    asked = choice(gpus=8, accumulate=accumulate, offload=OFFLOADS[offload])
    subject = gpt(3)
    if precision is PURE:
        subject = replace(subject, make=lambda make=subject.make: make().to(torch.bfloat16))
    log, own = trace(subject, run), trace(subject, replace(run, sharding=replace(run.sharding, offload=asked.offload)))
    work = host_work(log, asked, 2)
    for stream in ("fetch", "store"):
        copied = sum(e.num_bytes for e in own.events if isinstance(e, Op) and e.stream == stream)
        assert work[stream] == pytest.approx(copied, rel=0.02)
    moved = offloaded(log, asked.offload, compute_bytes=2)
    assert peak_of(moved).num_bytes == pytest.approx(peak_of(own).num_bytes, rel=1e-3)


def test_a_single_rank_is_planned_as_the_engine_runs_it():
    """Its shards are the parameters; if these are on the host it gathers them, which no trace without offload shows."""
    cluster = replace(CLUSTER, gpus=1)
    looked = space(lambda size: gpt(3, batch=size), strategies=["full_shard"], micro_batches=[2], cluster=cluster)
    asked = choice(gpus=1, micro_batch=2, offload=OFFLOADS["disk"])
    evaluator = Evaluator(looked, lambda text: None)
    candidate = evaluator.candidate(asked)
    whole = run_of(1, precision=None, offload=OFFLOADS["all"])
    assert candidate.memory.peak.num_bytes == peak_of(trace(gpt(3), whole)).num_bytes
    assert candidate.memory.peak.highest["gathered"] > 0
    evaluator.at_all_rates(candidate)
    assert {"fetch", "store", "host step", "host", "disk"} <= candidate.steps["middle"].by_kind.keys()


@pytest.mark.parametrize("step", ["host", "device"])
def test_a_plan_runs_on_one_thread(step, monkeypatch):
    """Fake tensors do not work in a second thread: a plan failed at times while another thread filled a state."""
    begun: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (begun.append(self.name), start(self))[1])
    log = trace(gpt(2), run_of(1, node=1, precision=None, offload=acc.Offload(optimizer="host", step=step)))
    assert peak_of(log).num_bytes > 0
    assert not [name for name in begun if name.startswith("accordion")]


# -- inputs of recomputed units

CASE = "inputs on the host"
INPUT = 1 << 30
LAYERS, SEQ, WIDTH = 5, 16384, 512
INPUTS = 2 * LAYERS * SEQ * WIDTH  # bytes of the inputs of a rank, in bf16
SLOW_DISK = Cluster(disk_gbps=INPUT / GB / 3)  # an input in three seconds: two ranks share it


def recomputing(activations: str) -> Choice:
    place = f"disk:{tempfile.gettempdir()}" if activations == "disk" else activations
    return choice(checkpoint_activations="full", offload=acc.Offload(activations=place))


def kept_elsewhere(mesh: Any, place: str) -> tuple[int, int]:
    """Return the bytes of host and disk that the inputs of one rank take."""
    model = subjects.made("gpt", CASE, "cpu")
    offload = acc.Offload(activations=place)
    acc.shard(model, mesh, **{**subjects.CASES[CASE].sharding, "offload": offload})
    for _ in range(2):
        subjects.loss("gpt", model, subjects.batch_of("gpt")).backward()
    return taken_by(tiers_of(engine_of(model)).activation_offload)


@pytest.mark.slow
def test_bytes_on_host_and_disk_match_what_ranks_take(world: Any, tmp_path: Path) -> None:
    log = trace(subjects.subject_of("gpt", CASE), replace(subjects.run_of("gpt", CASE), device="cuda"))
    inputs = inputs_of(log)
    assert len(inputs) == 4
    taken = [world.run_mesh((2,), ("shard",), kept_elsewhere, place)[0] for place in ("host", f"disk:{tmp_path}")]
    assert taken == [(sum(inputs), 0), (NUM_STAGES * max(inputs), sum(inputs))]
    of_machine = [
        (host_bytes(log, c, 2, SLOW_DISK), disk_bytes(log, c, SLOW_DISK)) for c in map(recomputing, ("host", "disk"))
    ]
    assert of_machine == [(2 * host, 2 * disk) for host, disk in taken]
    assert host_bytes(log, recomputing("device"), 2, SLOW_DISK) == 0


@pytest.mark.parametrize(
    ("units", "forward_s", "seconds"),
    [
        (5, 4.0, 80.0),  # five inputs are written and the first two read, six seconds each: 42, hidden by the step
        (5, 1.0, 42.0),  # and here the step waits for the disk
        (3, 1.0, 18.0),  # three inputs stay in buffers: nothing is read
    ],
)
def test_a_step_takes_at_least_as_long_as_its_disk(units: int, forward_s: float, seconds: float) -> None:
    copies: list[Any] = [Op("aten.copy_.default", 0.0, 2 * INPUT, "bfloat16", "store")] * units
    log = Log(held=[], events=[Enter(StepPart(StepPhase.FORWARD, -1)), *copies], units=[])
    device_s = 4 * units * forward_s
    step = Step(seconds=device_s, exposed_s=0.0, flops=0.0, by_kind={}, waits={}, by_place={})
    costs, asked = Costs(SLOW_DISK, "middle", 2), recomputing("disk")
    assert with_host_work(step, host_work(log, asked, 2), asked, units, costs).seconds == pytest.approx(seconds)
    assert with_host_work(step, host_work(log, recomputing("host"), 2), asked, units, costs) is step


def test_offloaded_inputs_are_tried_if_nothing_fits_and_the_disk_if_the_host_is_full(tmp_path: Path) -> None:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 512}
    folder = config_in(tmp_path, **sizes, max_position_embeddings=32768)
    fixed = {**ONE_CHOICE, "offload": None, "offloads": ["none"], "checkpoint_activations": "full"}
    fixed |= {"seq": SEQ, "sequence": 1}
    plain = planned(folder, **fixed)
    assert {c.choice.offload.activations for c in plain.found.candidates} == {"device"}
    needed = plain.chosen.memory.needed_bytes
    card = replace(GPUS["h100"], memory_gib=(needed - MARGIN * INPUTS / 4) / GIB)
    room = HOST_MARGIN * 1.5 * INPUTS / GIB  # of two ranks; buffers on the way to the disk take 1.2
    plan = planned(folder, **fixed, gpu=card, host_memory_gib=room)
    _, on_host, on_disk = plan.found.candidates
    assert [c.choice.offload.activations for c in plan.found.candidates] == ["device", "host", "disk:FOLDER"]
    assert [c.fits for c in plan.found.candidates] == [False, False, True]
    assert on_host.memory.fits(plan.cluster)
    assert "of a machine's memory" in on_host.why
    assert (on_host.host_bytes, on_host.disk_bytes) == (2 * INPUTS, 0)
    assert (on_disk.host_bytes, on_disk.disk_bytes) == (2 * INPUTS * 3 // LAYERS, 2 * INPUTS)
    host, disk = (c.memory.peak for c in (on_host, on_disk))
    assert host == disk
    assert plan.chosen.steps["middle"].seconds > on_host.steps["middle"].seconds
    assert plan.as_dict()["config"]["offload"] == "activations=disk:FOLDER"
    assert "checkpointing full with inputs on the disk" in str(plan.chosen.choice)
