"""The plan: deep models from few blocks, the allocator's rules, streams, verdicts, bad input and output."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import accordion as acc
from accordion import cli
from accordion.plan.events import Alloc, Category, Collective, Enter, Free, Launch, Log, Op, StepPart, StepPhase, Wait
from accordion.plan.hardware import GPUS, LAUNCH_S, MARGIN, OUTSIDE_BYTES, REACHED, Cluster, gpu_named
from accordion.plan.replay.allocator import Allocator, reserved_bytes
from accordion.plan.replay.cost import Costs
from accordion.plan.replay.peak import peak_of
from accordion.plan.replay.predict import log_of
from accordion.plan.replay.timeline import StreamClock
from accordion.plan.result import Plan
from accordion.plan.search.traces import Family, UnequalEventsError
from accordion.plan.trace.depth import num_traced
from accordion.plan.trace.trace import trace
from tests.plan import builders
from tests.plan.builders import BF16, ONE_CHOICE, config_in, gpt, planned, run_of, total, traced
from tests.support.sample import sampled

MIB = 1 << 20


# -- from some blocks to all


ON_HOST = acc.Offload(params="host", optimizer="host")
REDUCED_IN_BF16 = {"strategy": acc.HYBRID_SHARD, "precision": replace(BF16, reduce=torch.bfloat16)}


@pytest.mark.parametrize(
    ("blocks", "fixed"),
    sampled([
        (8, {}),  # six are traced, and the middle one is repeated three times
        (8, {"strategy": acc.SHARD_GRAD_OP, "checkpoint_activations": "selective"}),
        (11, {"strategy": acc.SHARD_GRAD_OP, "checkpoint_activations": "selective"}),
        (11, {"strategy": acc.NO_SHARD, "checkpoint_activations": "full"}),
        (11, {"checkpoint_activations": "every:2"}),
        (8, {"units": acc.min_params(60_000)}),  # three units a block
        (11, {"units": acc.min_params(17_000), "checkpoint_activations": "full"}),
        (11, {"strategy": acc.HYBRID_SHARD, "offload": ON_HOST}),  # nine are traced: its transfers end latest
        (11, {"strategy": acc.HYBRID_SHARD}),
        (11, REDUCED_IN_BF16),  # gradients are allocated at the end of their reduce, two blocks later, and freed by the step
        (11, {"strategy": acc.HYBRID_SHARD_OPTIM, "checkpoint_activations": "full"}),
        (11, {"offload": acc.Offload(optimizer="host")}),
        (8, {"engine": "fsdp2", "checkpoint_activations": "full", "units": acc.only_blocks()}),
    ], lambda blocks, fixed: not fixed),
)  # fmt: skip
def test_a_deep_model_is_extended_exactly(blocks, fixed):
    run = run_of(16, **fixed)
    width = 64 if run.strategy.hybrid else 128  # in the narrow one embedding and head are units of their own
    subject = gpt(blocks, width=width)
    whole = trace(subject, run)
    quick = log_of(subject, run)
    assert len(set(map(id, quick.events))) < len(quick.events), "no block was repeated"
    a, b = peak_of(whole), peak_of(quick)
    assert (a.num_bytes, a.held_bytes, a.breakdown) == (b.num_bytes, b.held_bytes, b.breakdown)
    assert (a.phase, a.unit, a.operator) == (b.phase, b.unit, b.operator)
    assert whole.units == quick.units
    for expandable in (True, False):
        reserved = [reserved_bytes(log, expandable=expandable) for log in (whole, quick)]
        assert reserved[1] == pytest.approx(reserved[0], rel=0.01)
    before = partial(filter, lambda e: isinstance(e, (Alloc, Free, Collective, Launch, Wait)))
    kinds = [[(type(e), getattr(e, "num_bytes", 0)) for e in before(events_until_step(log))] for log in (whole, quick)]
    assert kinds[0] == kinds[1]
    assert landings(whole) == landings(quick)
    costs = Costs(Cluster(), "middle", 16)
    assert StreamClock(costs).run(quick).seconds == pytest.approx(StreamClock(costs).run(whole).seconds, rel=1e-3)
    assert left_bytes(whole) == left_bytes(quick) == 0


def left_bytes(log: Log) -> int:
    """Return the bytes that are live after a step, minus those before it."""
    live = {alloc.number: alloc.num_bytes for alloc, _ in log.held}
    held_bytes = sum(live.values())
    for event in log.events:
        if isinstance(event, Alloc):
            live[event.number] = event.num_bytes
        elif isinstance(event, Free):
            del live[event.number]
    return sum(live.values()) - held_bytes


def landings(log: Log) -> list[int]:
    """Return for each wait of the compute stream how many transfers were launched since the launch of its own."""
    order: dict[int, int] = {}
    distances = []
    for event in events_until_step(log):
        if isinstance(event, Launch):
            order[event.transfer] = len(order)
        elif isinstance(event, Wait) and event.stream == "compute":
            distances.append(len(order) - order.get(event.transfer, 0))
    return distances


def events_until_step(log: Log) -> list[object]:
    """Return the events before clipping, which has a small tensor for each parameter that is not repeated."""
    at = next(i for i, e in enumerate(log.events) if isinstance(e, Enter) and e.place.phase is StepPhase.STEP)
    return list(log.events[:at])


def test_blocks_are_left_out_of_a_trace_only_if_enough_repeat():
    assert [num_traced(n, 1) for n in (2, 6, 7, 80)] == [2, 6, 6, 6]
    assert [num_traced(n, 2) for n in (9, 10, 11, 32)] == [9, 10, 9, 10]
    assert [num_traced(n, 1, later=2) for n in (8, 80)] == [8, 8]


def test_other_micro_batches_are_a_straight_line_between_traces():
    one, two, four = (traced(2, 8, batch) for batch in (1, 2, 4))
    derived, wanted = peak_of(Family((1, one), (2, two)).at(4)), peak_of(four)
    assert derived.num_bytes == pytest.approx(wanted.num_bytes, rel=1e-3)
    assert derived.operator == wanted.operator
    with pytest.raises(UnequalEventsError):
        Family((1, one), (2, replace(two, events=two.events[:-1])))


# -- memory


def test_memory_is_broken_down_by_what_it_is_for():
    log = traced(3, 4)
    peak = peak_of(log)
    params = sum(p.numel() for p in gpt(3).make().parameters())
    assert peak.highest["parameters"] == pytest.approx(4 * params / 4, rel=0.02)
    assert peak.highest["optimizer"] == pytest.approx(8 * params / 4, rel=0.02)
    assert peak.highest["gradients"] >= 4 * params / 4
    assert peak.breakdown["activations"] > 0
    assert sum(peak.breakdown.values()) == peak.num_bytes


def test_more_ranks_cost_no_more_events():
    few, many = (traced(3, n) for n in (16, 16384))
    assert len(many.events) <= 1.1 * len(few.events)


def log(*events: object) -> Log:
    return Log(held=[], events=list(events), units=[])


def take(number: int, num_bytes: int, stream: str = "compute") -> Alloc:
    return Alloc(number, num_bytes, Category.OTHER, stream, "test")


@pytest.mark.parametrize(
    ("expandable", "events", "reserved"),
    [
        (False, [take(i, 20 * MIB) for i in (1, 2, 3)], 60 * MIB),
        # Free neighbours are merged: three freed parts of one segment make room for all of it.
        (False, [take(0, 60 * MIB), Free(0), *(take(i, 20 * MIB) for i in (1, 2, 3)), *map(Free, (1, 3, 2)), take(4, 60 * MIB)],
         60 * MIB),
        (False, [take(1, 100)], 2 * MIB),
        (False, [take(1, 2 * MIB)], 20 * MIB),  # up to 10 MiB come in segments of 20
        (False, [take(1, 11 * MIB)], 12 * MIB),  # larger ones in steps of 2
        (False, [take(1, 2 * MIB), take(2, 2 * MIB)], 20 * MIB),
        (False, [take(1, 2 * MIB), take(2, 2 * MIB, "gather")], 40 * MIB),  # each stream has its own
        (False, [take(1, 100 * MIB), Free(1), take(2, 60 * MIB), take(3, 40 * MIB)], 100 * MIB),  # split
        (False, [take(1, 60 * MIB), Free(1), take(2, 100 * MIB)], 160 * MIB),  # segments do not grow
        (True, [take(1, 60 * MIB), Free(1), take(2, 100 * MIB)], 100 * MIB),  # expandable ones do
        (True, [take(1, 30 * MIB)], 40 * MIB),
    ],
)  # fmt: skip
def test_the_allocator_reserves_as_many_bytes_as_torchs(expandable, events, reserved):
    allocator = Allocator(expandable=expandable)
    for event in events:
        if isinstance(event, Alloc):
            allocator.take(event.number, event.num_bytes, event.stream)
        else:
            allocator.give(event.number)
    assert allocator.reserved_bytes == reserved


# -- time


def test_a_prefetched_gather_is_hidden_and_others_are_exposed():
    costs = Costs(Cluster(), "middle", 8)
    product = Op("aten.mm.default", 989e12 * GPUS["h100"].products, 0, "bfloat16", "compute")  # one second
    gather = Collective("gather", int(0.5 * 450e9 * 0.73 * 8 / 7), "shard", "gather")  # half a second
    start = [Enter(StepPart(StepPhase.FORWARD, -1)), Launch(1, "gather"), gather]
    hidden = StreamClock(costs).run(log(*start, product, Wait(1, "compute")))
    assert hidden.seconds == pytest.approx(1.0, rel=1e-3)
    assert hidden.exposed_s == 0
    waited = StreamClock(costs).run(log(*start, Wait(1, "compute"), product))
    assert waited.seconds == pytest.approx(1.5, rel=1e-3)
    assert waited.exposed_s == pytest.approx(0.5, rel=1e-3)
    assert list(waited.waits) == ["gather"]


def test_no_kernel_starts_before_a_slow_host_has_launched_it():
    low, middle = (Costs(Cluster(), rate, 8) for rate in ("low", "middle"))
    small, begin = [Op("aten.add.Tensor", 0, 0, "bfloat16", "compute")] * 100, Enter(StepPart(StepPhase.FORWARD, -1))
    assert StreamClock(low).run(log(begin, *small)).seconds == pytest.approx(100 * 25e-6 + LAUNCH_S)
    assert StreamClock(middle).run(log(begin, *small)).seconds == pytest.approx(100 * LAUNCH_S)
    large = Op("aten.mm.default", 989e12, 0, "bfloat16", "compute")  # meanwhile the host runs ahead
    alone = StreamClock(low).run(log(begin, large)).seconds
    assert StreamClock(low).run(log(begin, large, *small)).seconds == pytest.approx(alone + 100 * LAUNCH_S)


def test_an_axis_that_leaves_the_node_pays_the_network():
    cluster = Cluster(gpu=GPUS["h100"], node=8)
    message = Collective("gather", 10**9, "shard", "gather")
    across = Collective("gather", 10**9, "replicate", "gather")
    near, far, inside, copies = (
        Costs(cluster, "middle", ranks, shards=shards).of_collective(sent)
        for ranks, shards, sent in ((8, None, message), (16, None, message), (16, 8, message), (16, 8, across))
    )
    network = REACHED["middle"].network * cluster.network_gbps * 1e9  # of each card's own link
    assert far == pytest.approx(15 / 16 * 1e9 / (8 * network) + 40e-6)  # a ring over nodes has all links of a node
    assert copies == pytest.approx(1 / 2 * 1e9 / network + 40e-6)  # one over a card of each node has one
    assert near < far
    assert inside == near
    fast = replace(cluster, network_gbps=1e5)  # no faster than the links inside of the node, which it takes as well
    assert Costs(fast, "middle", 16).of_collective(message) == pytest.approx(near, rel=0.1)
    assert Costs(cluster, "middle", 1).of_collective(message) == 0


# -- the whole, as people call it


class Asks(nn.Linear):
    """Reads a value, which a trace does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y[y > 0].sum() if y.sum().item() > 0 else y.sum()


@pytest.fixture(scope="module")
def small() -> Plan:
    """Return the plan of one layer, with nothing to choose."""
    return planned(nn.Linear(64, 64), total, torch.randn(4, 64), **ONE_CHOICE)


def test_any_module_is_planned_and_not_changed():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)])
    before = {name: p.clone() for name, p in model.named_parameters()}
    fixed = {**ONE_CHOICE, "gpus": [2, 4], "units": None, "offload": None}
    plan = planned(model, total, torch.randn(16, 64), gpu="rtx4090", **fixed)
    assert plan.fits
    assert plan.num_params == sum(p.numel() for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert {c.choice.gpus for c in plan.found.candidates} == {2, 4}
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (Asks, total, r"needs the values of a tensor at .*test_plan\.py:\d+ .*item"),
        (nn.Linear, lambda m, x: m(torch.from_numpy(x.numpy())).sum(), r"test_plan\.py:\d+ .*numpy"),
        (nn.Linear, lambda m, x: 1.0, "the loss is a float"),
        (nn.Linear, lambda m, x: m(x), r"the loss is of shape \(4, 8\)"),
    ],
)
def test_a_line_that_needs_values_and_a_loss_that_is_no_scalar_are_reported(model, loss, message):
    with pytest.raises(acc.UsageError, match=message):
        planned(model(8, 8), loss, torch.randn(4, 8), gpus=2)


def test_the_command_writes_json(tmp_path, capsys):
    config_in(tmp_path, hidden_size=128, intermediate_size=256)
    words = ["plan", "--model", str(tmp_path), "--gpu", "l40s", "--gpus", "2", "--seq", "64", "--micro-batch", "2"]
    words += ["--checkpoint-activations", "full", "--units", "blocks", "--json"]
    assert cli.main(words) == 0
    data = json.loads(capsys.readouterr().out)
    keys = ["fits", "peak_allocated_bytes", "peak_reserved_bytes", "breakdown_bytes", "step_s", "exposed_comm_s"]
    keys += ["tokens_per_s_per_gpu", "mfu", "config"]
    assert set(keys) <= set(data)
    for entry in data["candidates"]:
        assert set(entry) - {"least_bytes"} == {*keys, "why"}
    for entry in (data, *(entry for entry in data["candidates"] if entry["fits"])):
        assert set(entry["breakdown_bytes"]) == {c.value for c in Category}
        assert entry["peak_reserved_bytes"] >= entry["peak_allocated_bytes"]
    assert data["fits"] is True
    tried = [entry["config"] for entry in (data, *data["candidates"])]
    assert {(c["strategy"], c["gpus"]) for c in tried} == {
        ("full_shard", 2), ("shard_grad_op", 2), ("shard_optim", 2), ("no_shard", 2)
    }  # fmt: skip
    assert data["fewest_gpus"] is None
    assert all(entry["why"] for entry in data["candidates"])


def test_the_fewest_gpus_are_reported_only_if_other_numbers_were_tried(small):
    assert small.fits
    assert small.as_dict()["fewest_gpus"] is None
    looked = planned(nn.Linear(64, 64), total, torch.randn(4, 64), **{**ONE_CHOICE, "gpus": [1, 2]})
    assert looked.as_dict()["fewest_gpus"]["gpus"] == 1


def test_if_nothing_fits_a_note_says_what_to_try_and_the_closest_is_shown(tmp_path, capsys):
    folder = config_in(tmp_path, hidden_size=512, num_hidden_layers=4, intermediate_size=1024)
    shown = builders.command(capsys, folder, "--seq", "512", "--gpu", "h100,memory_gib=2.05", code=1)
    assert "does not fit" in shown
    assert "nothing fits: leave out flags that fix a value" in shown


def test_fits_includes_the_margin(small):
    memory = small.chosen.memory
    assert memory.needed_bytes == int(memory.largest_reserved * MARGIN) + OUTSIDE_BYTES
    gib = memory.needed_bytes / 2**30
    for factor, fits in ((1.001, True), (0.999, False)):
        assert memory.fits(Cluster(gpu=gpu_named("h100", memory_gib=gib * factor))) is fits


def test_offloaded_memory_is_counted_on_the_host_and_not_on_the_gpu():
    on_device, on_host = traced(3, 4), traced(3, 4, offload=ON_HOST)
    params = sum(p.numel() for p in gpt(3).make().parameters()) / 4
    assert on_device.host_bytes == 0
    assert on_host.host_bytes >= (2 + 4 + 4 + 8) * params  # rows that travel, masters, gradients, two states
    assert peak_of(on_host).held_bytes < peak_of(on_device).held_bytes - 12 * params * 0.95
    assert not any(getattr(event, "stream", "") == "host" for event in on_host.events)
    assert "offload" in on_host.unmodelled
