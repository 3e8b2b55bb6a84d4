"""The contract grid where an accelerator is found: one rank each with its own backend, and ranks that share one over gloo."""

from __future__ import annotations

import dataclasses

import pytest

from accordion.config import STRATEGIES
from tests.engine import test_grid as grid

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.parametrize("strategy", STRATEGIES),
]


@pytest.mark.parametrize("precision", grid.PRECISIONS)
@pytest.mark.parametrize("debug", [(), "streams"])
def test_ranks_that_share_a_device(crowded_world, strategy, precision, debug):
    for num_ranks, scenario in grid.CASES.values():
        shape, names = grid.mesh_of(STRATEGIES[strategy], num_ranks)
        scenario = dataclasses.replace(scenario, **grid.PRECISIONS[precision])
        options = {"is_wrapped": precision == "bf16", "debug": debug}
        crowded_world.run_mesh(shape, names, grid.match, scenario, STRATEGIES[strategy], **options)


@pytest.mark.parametrize("precision", grid.PRECISIONS)
@pytest.mark.parametrize("debug", [(), "streams"])
def test_a_rank_a_device(device_world, strategy, precision, debug):
    policy, count = STRATEGIES[strategy], device_world.num_ranks
    pairs = (2, count // 2) if count % 2 == 0 else (1, count)
    shape, names = (pairs, grid.HYBRID) if policy.hybrid else ((count,), grid.FLAT)
    for _, scenario in grid.CASES.values():
        scenario = dataclasses.replace(scenario, **grid.PRECISIONS[precision])
        options = {"is_wrapped": precision == "bf16", "debug": debug}
        device_world.run_mesh(shape, names, grid.match, scenario, policy, **options)


@pytest.mark.parametrize("option", grid.OPTIONS)
def test_no_option_changes_the_training(crowded_world, strategy, option):
    policy = STRATEGIES[strategy]
    scenario = grid.Scenario(micros=2)
    crowded_world.run_mesh(*grid.mesh_of(policy, 2), grid.match, scenario, policy, **grid.OPTIONS[option])
