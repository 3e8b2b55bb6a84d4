"""The contract: whatever the strategy, precision and use, training is that of the model without sharding."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import accordion as acc
from accordion.config import STRATEGIES
from tests.support import checks, models
from tests.support.checks import HYBRID, mesh_of
from tests.support.compare import Scenario, assert_same, compare, train
from tests.support.ranked import on_mesh
from tests.support.sample import sampled, turns

FORCED = {
    f"{strategy.name}_{reduce}": dataclasses.replace(strategy, name=f"{strategy.name}_{reduce}", reduce=reduce)
    for strategy in (acc.FULL_SHARD, acc.HYBRID_SHARD)
    for reduce in ("exchange", "reduce_scatter")
}
POLICIES = {**STRATEGIES, **FORCED}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"compute": torch.bfloat16},
    "fp16": {"compute": torch.float16, "scale": 1024.0},
}
CASES: dict[str, tuple[int, Scenario]] = {  # number of ranks that shard without replicas, scenario
    "plain": (2, Scenario()),
    "wide": (2, Scenario(build="wide")),
    "frozen": (2, Scenario(build="frozen")),
    "uneven": (3, Scenario(build="uneven")),
    "experts": (3, Scenario(build="experts")),
    "tied": (3, Scenario(build="tied")),
    "spare": (2, Scenario(build="spare", sometimes=True)),
    "accumulated": (2, Scenario(micros=3)),
    "accumulated_no_sync": (2, Scenario(micros=3, no_sync=True)),
    "unused_last": (2, Scenario(micros=2, skip_last=(1,))),
    "unused_last_no_sync": (2, Scenario(micros=2, skip_last=(1,), no_sync=True)),
}
GRID = [(strategy, precision, case) for strategy in STRATEGIES for precision in PRECISIONS for case in CASES]
GRID += [
    (strategy, precision, case)
    for strategy in FORCED
    for precision in PRECISIONS
    for case in ("wide", "uneven", "spare")
]


def match(mesh, scenario: Scenario, strategy: acc.Strategy, **options: Any) -> None:
    compare(mesh, scenario.case(strategy=strategy, **options))


SHOWN = (
    "wide",
    "tied",
    "spare",
    "accumulated_no_sync",
    "unused_last",
)  # what a lower precision changes: casts and sums
OTHERS = [name for name in STRATEGIES if name != "full_shard"]
USUAL = {
    (strategy, "fp32", case)
    for case, strategy in turns(("uneven", "spare", "accumulated_no_sync", "unused_last"), OTHERS)
}
USUAL |= {(strategy, "fp32", case) for strategy, case in turns(FORCED, ("wide", "uneven", "spare"))}
USUAL |= {(strategy, "bf16", case) for case, strategy in turns(SHOWN, OTHERS)}
USUAL |= {("full_shard", "fp16", "uneven")}


def usual(*row: str) -> bool:
    """Every case in float32 under full_shard, and every other strategy with one such case and one of lower precision."""
    return row[:2] == ("full_shard", "fp32") or row in USUAL


@pytest.mark.parametrize(("strategy", "precision", "case"), sampled(GRID, usual), ids=["-".join(row) for row in GRID])
def test_training_is_that_of_the_unsharded_model(world, strategy, precision, case):
    policy = POLICIES[strategy]
    num_ranks, scenario = CASES[case]
    scenario = dataclasses.replace(scenario, **PRECISIONS[precision])
    # Half of a step is AdamW over DTensors, operator by operator: every case meets it, and every strategy, but not each pair.
    wrapped = precision == "bf16" or (precision == "fp32" and strategy != "full_shard" and case != "plain")
    debug = (
        () if precision == "fp32" else ("streams",)
    )  # buffers come late and are filled with NaN when they are let go
    world.run_mesh(*mesh_of(policy, num_ranks), match, scenario, policy, is_wrapped=wrapped, debug=debug)


OPTIONS: dict[str, dict[str, Any]] = {
    "checkpoint_full": {"checkpoint_activations": "full"},
    "checkpoint_selective": {"checkpoint_activations": "selective"},
    "checkpoint_every_2": {"checkpoint_activations": "every:2"},
    "prefetch_nothing": {"prefetch": acc.Prefetch(budget_bytes=0)},
    "prefetch_everything": {"prefetch": acc.Prefetch(budget_bytes=1 << 30)},
    "units_by_class": {"units": {models.Block}},
    "units_nested": {"units": {models.Block, nn.Linear}},
    "units_by_size": {"units": acc.min_params(1000)},
    "torch_optimizer": {"is_wrapped": False},
}
OPTION_ROWS = [(strategy, option) for strategy in STRATEGIES for option in OPTIONS]
OPTIONS_SHOWN = {
    (strategy, option) for option, strategy in turns(OPTIONS, ("full_shard", "shard_grad_op", "hybrid_shard"))
}


@pytest.mark.parametrize(
    ("strategy", "option"),
    sampled(OPTION_ROWS, lambda *row: row in OPTIONS_SHOWN),
    ids=["-".join(row) for row in OPTION_ROWS],
)
def test_no_option_changes_the_training(world, strategy, option):
    policy = STRATEGIES[strategy]
    options = {"is_wrapped": True, **OPTIONS[option]}  # AdamW over DTensors knows nothing of the others
    world.run_mesh(*mesh_of(policy, 2), match, Scenario(micros=2), policy, **options)


@checks.under("full_shard", "hybrid_shard_optim")
def test_gradients_may_be_summed_over_ranks_instead_of_averaged(world, strategy):
    policy = STRATEGIES[strategy]
    scenario = Scenario(micros=2, no_sync=True)
    world.run_mesh(*mesh_of(policy, 2), match, scenario, policy, reduce_op="sum", is_wrapped=True)


WORLDS = [((num_ranks,), name) for num_ranks in (1, 3, 4) for name in ("full_shard", "shard_optim")]
WORLDS += [((2,), name) for name, policy in POLICIES.items() if not policy.hybrid]
HYBRID_WORLDS = [(shape, name) for shape in ((1, 1), (1, 3), (3, 1)) for name in STRATEGIES if STRATEGIES[name].hybrid]
HYBRID_WORLDS += [(shape, name) for shape in ((1, 2), (2, 1)) for name, policy in POLICIES.items() if policy.hybrid]
USUAL_WORLDS = [
    *[((1,), "shard_optim"), ((4,), "full_shard"), ((3, 1), "hybrid_shard_optim")],
    *[((2,), "full_shard"), ((2,), "shard_optim"), ((2,), "full_shard_reduce_scatter")],
]


@pytest.mark.parametrize(("shape", "strategy"), sampled(WORLDS, lambda *row: row in USUAL_WORLDS))
def test_any_number_of_ranks(world, shape, strategy):
    """One and two ranks bit for bit: a sum of two has one order, so all that two ranks do must agree."""
    for build in ("wide", "uneven"):
        options = {"is_wrapped": strategy != "full_shard" and build == "wide", "exact": True}
        world.run_mesh(shape, HYBRID[-len(shape) :], match, Scenario(build=build), POLICIES[strategy], **options)


@pytest.mark.parametrize(("shape", "strategy"), sampled(HYBRID_WORLDS, lambda *row: row in USUAL_WORLDS))
def test_any_shape_of_a_hybrid_mesh(world, shape, strategy):
    test_any_number_of_ranks(world, shape, strategy)


@on_mesh((2, 2), HYBRID)
def test_both_hybrids_train_equally_bit_for_bit(mesh) -> None:
    scenario = Scenario(build="wide", steps=2)
    assert_same(
        *(train(mesh, scenario.case(strategy=strategy)) for strategy in (acc.HYBRID_SHARD, acc.HYBRID_SHARD_OPTIM))
    )
