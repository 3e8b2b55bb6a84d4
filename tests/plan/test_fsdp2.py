"""Plans with PyTorch's FSDP2 in place of the engine: its streams and copies, units that stay unsharded, and its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

import accordion as acc
from accordion.plan.events import Alloc, Category, Collective, Log, Op, Streams
from accordion.plan.hardware import Cluster
from accordion.plan.replay.cost import Costs
from accordion.plan.replay.peak import peak_of
from accordion.plan.replay.predict import log_of
from accordion.plan.replay.timeline import StreamClock
from accordion.plan.trace.trace import trace
from tests.plan.builders import ONE_CHOICE, gpt, planned, run_of


def traced(blocks: int = 3, reshard_root: bool | None = None, reshard_last: bool = True, **sharding: object) -> Log:
    run = replace(
        run_of(units=acc.only_blocks(), **sharding),
        engine="fsdp2",
        reshard_root=reshard_root,
        reshard_last=reshard_last,
    )
    return trace(gpt(blocks), run)


def collectives(log: Log) -> list[tuple[str, str]]:
    return [(e.kind, e.stream) for e in log.events if isinstance(e, Collective)]


def test_each_stream_of_fsdp2_has_its_own_work_and_memory():
    log = traced()
    messages = collectives(log)
    units = 4  # three blocks and the root, which FSDP2 keeps: it is gathered once
    assert messages.count(("gather", "gather")) == 2 * units - 1
    assert messages.count(("scatter_sum", "reduce")) == units
    operators = [(e.name, e.stream) for e in log.events if isinstance(e, Op)]
    assert operators.count(("fsdp.all_gather_copy_in.default", "copy in")) == 2 * units - 1
    assert operators.count(("fsdp.split_with_sizes_copy.default", Streams.COMPUTE)) == 2 * units - 1
    packs = ("fsdp.chunk_cat.default", "fsdp.chunk_cat_mixed_dtype.default")  # the second from torch 2.15 on
    assert sum(operators.count((packed, Streams.COMPUTE)) for packed in packs) == units
    allocated = {(e.stream, e.category) for e in log.events if isinstance(e, Alloc)}
    assert {("copy in", Category.GATHERED), ("reduce", Category.GRADIENTS)} <= allocated
    assert {unit for unit in log.units if unit} == {"blocks.0", "blocks.1", "blocks.2"}


def test_units_that_stay_unsharded_are_gathered_once():
    assert collectives(traced(reshard_root=True)).count(("gather", "gather")) == 8
    assert collectives(traced(reshard_last=False)).count(("gather", "gather")) == 6
    assert collectives(traced(strategy=acc.SHARD_GRAD_OP)).count(("gather", "gather")) == 4


@pytest.mark.slow
def test_a_deep_model_under_fsdp2_is_extended_exactly():
    run, subject = replace(run_of(checkpoint_activations="full", units=acc.only_blocks()), engine="fsdp2"), gpt(8)
    whole = trace(subject, run)
    quick = log_of(subject, run)
    assert len(set(map(id, quick.events))) < len(quick.events), "no block was repeated"
    a, b = peak_of(whole), peak_of(quick)
    assert (a.num_bytes, a.breakdown, a.unit, a.operator) == (b.num_bytes, b.breakdown, b.unit, b.operator)
    costs = Costs(Cluster(), "middle", 8)
    assert StreamClock(costs).run(quick).seconds == pytest.approx(StreamClock(costs).run(whole).seconds, rel=1e-3)


def test_both_engines_are_planned_by_name():
    fixed = {**ONE_CHOICE, "micro_batch": None, "offload": None}
    for engine in ("accordion", "fsdp2"):
        plan = planned(gpt(2).make(), gpt(2).loss, gpt(2).batch(), **fixed, engine=engine)
        assert plan.as_dict()["config"]["engine"] == engine
