"""Bytes that a rank holds, counted by storage: after `shard`, during a step, at rest."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import accordion as acc
from accordion.config import STRATEGIES
from tests.support import models
from tests.support.checks import mesh_of
from tests.support.meters import Allocations
from tests.support.ranked import on_strategy, on_world
from tests.support.sample import sampled

NUM_BLOCKS, WIDTH, HIDDEN = 4, 128, 2048
UNIT_BYTES = 4 * (2 * WIDTH * HIDDEN + HIDDEN + 3 * WIDTH)  # of a gathered block
SMALL_BYTES = 320 * 1024  # activations of two tokens, the root, packed messages


def heavy() -> models.Tiny:
    """Its parameters take far more than its activations, its blocks far more than its root."""
    return models.seeded(vocab=16, width=WIDTH, hidden=HIDDEN, num_blocks=NUM_BLOCKS)


def settle() -> None:
    """Let everything go that nothing holds; gloo's own threads drop their last message a moment after it was sent."""
    gc.collect()
    time.sleep(0.05)


def step_bytes(mesh, strategy: acc.Strategy, **options: Any) -> dict[str, Any]:
    """Live and peak bytes of two steady steps above what was there before; and the bytes of the whole model, in float32."""
    tokens, targets = models.batch(0, 0, mesh.get_rank(), vocab=16, shape=(1, 2))
    found: dict[str, Any] = {"gathered": []}
    with Allocations() as memory:

        def settle_and_mark(name: str) -> None:
            settle()
            memory.mark(name)

        model = heavy()
        total = sum(p.nbytes for p in model.parameters())
        memory.mark("start")
        model = acc.shard(model, mesh=mesh, strategy=strategy, **options)
        settle_and_mark("sharded")
        optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters()))

        def count_gathered(*_: Any) -> None:  # nothing else is of a unit's size
            found["gathered"][-1].append(memory.count(range(UNIT_BYTES, UNIT_BYTES * 21 // 20)))

        for i in range(NUM_BLOCKS):
            model.blocks[i].up.register_forward_hook(count_gathered)
        for step in range(3):
            found["gathered"].append([])
            memory.mark(f"begin {step}")
            loss = models.loss_of(model(tokens), targets)
            memory.mark(f"backward {step}")
            loss.backward()
            del loss
            memory.mark(f"gradients {step}")
            optimizer.step()
            settle_and_mark(f"stepped {step}")
            optimizer.zero_grad()
            settle_and_mark(f"end {step}")
        found["gathered"].append([])
        with torch.no_grad():
            model(tokens)
        settle_and_mark("inferred")
        del model, optimizer
        settle_and_mark("gone")
    found["total"] = total
    for mark in memory.marks:
        found[mark] = memory.live(mark)
    found["forward"] = memory.peak("begin 2", "backward 2") - found["begin 2"]
    found["step"] = memory.peak("begin 2", "end 2") - found["begin 2"]
    found["inference"] = memory.peak("end 2", "inferred") - found["end 2"]
    return found


@pytest.fixture(scope="module")
def measure(world) -> Callable[..., list[dict[str, Any]]]:
    """Measurements of every rank, each made once."""

    @functools.cache
    def measured(strategy: str, prefetch: acc.Prefetch = acc.Prefetch()) -> list[dict[str, Any]]:  # noqa: B008
        policy = STRATEGIES[strategy]
        return world.run_mesh(*mesh_of(policy), step_bytes, policy, prefetch=prefetch)

    return measured


KEPT: dict[str, tuple[float, float, float, float]] = {
    # shares of the whole model, on two ranks or two by two: parameters, gradients, each optimizer state, full copies at rest
    "full_shard": (1 / 2, 1 / 2, 1 / 2, 0),
    "shard_grad_op": (1 / 2, 1 / 2, 1 / 2, 0),
    "shard_optim": (1 / 2, 1 / 2, 1 / 2, 1),
    "no_shard": (1, 1, 1, 0),
    "hybrid_shard": (1 / 2, 1 / 2, 1 / 2, 0),
    "hybrid_shard_optim": (1 / 4, 1 / 4, 1 / 4, 1 / 2),
}


@pytest.mark.parametrize("strategy", sampled(STRATEGIES, {"full_shard", "hybrid_shard_optim"}.__contains__))
def test_a_rank_holds_its_share_and_nothing_else(measure, strategy):
    params, grads, state, full = KEPT[strategy]
    for found in measure(strategy):
        total = found["total"]
        inner_shards = (
            full if strategy == "hybrid_shard_optim" else 0
        )  # rows gathered over `replicate` stand from the start

        def share(value: float, total: int = total) -> Any:
            return pytest.approx(value * total, rel=0.01)

        assert found["start"] == share(1)
        assert found["sharded"] == share(params + inner_shards)
        assert found["end 1"] == share(params + 2 * state + full)
        assert found["stepped 1"] - found["end 1"] == share(grads)
        assert found["end 2"] <= found["end 1"], "a step leaves something behind"
        assert found["inferred"] == found["end 2"], "inference leaves something behind"
        assert found["gone"] < 0.01 * total, "something keeps the model alive"


@pytest.mark.parametrize(
    ("budget", "ahead"),
    [(0, 0), (None, 1), pytest.param(2 * UNIT_BYTES + 4096, 2, marks=pytest.mark.slow)],
    ids=["nothing", "one_unit", "two_units"],
)
def test_only_the_units_that_prefetch_allows_are_gathered(measure, budget, ahead):
    for found in measure("full_shard", acc.Prefetch(budget_bytes=budget)):
        first, *_, steady, inference = found["gathered"]
        assert max(first) == 1, "the order is not known before the first step"
        assert steady == inference == [min(1 + ahead, NUM_BLOCKS - i) for i in range(NUM_BLOCKS)]
        units = found["forward"] / UNIT_BYTES
        assert 1 + ahead <= units <= 1 + ahead + SMALL_BYTES / UNIT_BYTES
        assert found["inference"] / UNIT_BYTES <= 1 + ahead + SMALL_BYTES / UNIT_BYTES
        # backward: besides the gathered ones, gradients of this unit and of the one whose reduce is under way,
        # what arrives from other ranks for it, and the sharded gradients of all units
        shards = NUM_BLOCKS / 2
        assert found["step"] / UNIT_BYTES <= 1 + ahead + 3 + shards + 2 * SMALL_BYTES / UNIT_BYTES


@pytest.mark.parametrize("strategy", sampled(["shard_grad_op", "shard_optim"], "shard_grad_op".__eq__))
def test_kept_full_parameters_are_those_of_the_strategy(measure, strategy):
    for found in measure(strategy):
        assert found["gathered"][2][-1] == NUM_BLOCKS
        kept = found["backward 2"] - found["begin 2"]
        wanted = NUM_BLOCKS * UNIT_BYTES if strategy == "shard_grad_op" else 0
        assert wanted <= kept <= wanted + 4 * SMALL_BYTES


@on_world(1)
def test_checkpointed_activations_take_less(mesh) -> None:
    """Bytes that a forward leaves for the backward."""
    tokens, targets = models.batch(0, 0, 0, vocab=48, shape=(16, 64))
    found = {}
    for mode in ("none", "selective", "every:2", "full"):
        with Allocations() as memory:
            model = acc.shard(models.plain(), mesh=mesh, checkpoint_activations=mode)
            memory.mark("start")
            loss = models.loss_of(model(tokens), targets)
            memory.mark("end")
            loss.backward()
        found[mode] = memory.live("end") - memory.live("start")
    assert found["none"] > found["selective"] > found["full"]
    assert found["none"] > found["every:2"] > found["full"]


@pytest.mark.parametrize("strategy", sampled(["full_shard", "shard_grad_op", "no_shard"], "shard_grad_op".__eq__))
@on_strategy
def test_a_forward_that_nothing_walks_back_keeps_no_activations(mesh, strategy: str) -> None:
    """Live bytes after each of some forwards whose outputs are dropped, gradients enabled."""
    tokens, _ = models.batch(0, 0, 0, vocab=48, shape=(4, 32))
    with Allocations() as memory:
        model = acc.shard(models.plain(), mesh=mesh, strategy=strategy)
        found = []
        for _ in range(6):
            model(tokens)
            settle()
            found.append(memory.live_bytes)
    assert found[-1] <= found[1], "they pile up"
