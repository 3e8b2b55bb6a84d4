"""Plans with PyTorch's FSDP2 in place of the engine: its streams and copies, units that stay unsharded, and its limits."""

from __future__ import annotations

import accordion as acc
from accordion.plan.events import Alloc, Category, Collective, Log, Op, Streams
from tests.plan import builders
from tests.plan.builders import ONE_CHOICE, gpt, planned


def traced(**fixed: object) -> Log:
    return builders.traced(3, 8, engine="fsdp2", units=acc.only_blocks(), **fixed)


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


def test_both_engines_are_planned_by_name():
    fixed = {**ONE_CHOICE, "micro_batch": None, "offload": None}
    for engine in ("accordion", "fsdp2"):
        plan = planned(gpt(2).make(), gpt(2).loss, gpt(2).batch(), **fixed, engine=engine)
        assert plan.as_dict()["config"]["engine"] == engine
