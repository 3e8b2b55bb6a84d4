"""Plans of a mixture with experts sharded over some of the ranks: messages, memory and time computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accordion as acc
from accordion.plan.events import ALL_TO_ALL, Axes, Collective
from accordion.plan.hardware import GB, GPUS, LATENCY_S, REACHED, Cluster
from accordion.plan.replay.cost import Costs
from accordion.plan.replay.timeline import OF_TOKENS
from accordion.plan.trace.experts import experts_in
from tests.plan.builders import ONE_CHOICE, config_in, flops, held, planned, sent

SEQ, WIDTH, MLP, LAYERS, COUNT, CHOSEN = 256, 128, 192, 3, 8, 2
ROWS = 2 * SEQ * CHOSEN * WIDTH  # bytes of all tokens of a rank for all their experts, in bf16
FIXED = {**ONE_CHOICE, "gpus": 16, "seq": SEQ}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": MLP, "num_key_value_heads": 4}
    experts = {"num_local_experts": COUNT, "num_experts_per_tok": CHOSEN}
    return config_in(tmp_path_factory.mktemp("model"), "mixtral", **sizes, **experts)


def test_messages_with_experts_over_four_of_sixteen_ranks_match_arithmetic(folder: Path) -> None:
    plain, spread = (planned(folder, **FIXED, expert_parallel=n) for n in (1, 4))
    tokens = sent(spread, ALL_TO_ALL, axis=Axes.EXPERTS)
    assert tokens.count(ROWS) == 4 * LAYERS  # there and back, forward and backward
    assert sorted(set(tokens)) == [8 * COUNT, 4 * SEQ * CHOSEN, ROWS]  # numbers of tokens, their weights, themselves
    experts = COUNT * 3 * WIDTH * MLP  # elements of a layer
    # Gathered in bf16 by forward and backward, but the last layer once; reduced in float32.
    for kind, itemsize, times in (("gather", 2, 2 * LAYERS - 1), ("scatter_sum", 4, LAYERS)):
        assert sum(sent(spread, kind, axis=Axes.EXPERT_DATA)) == pytest.approx(times * itemsize * experts / 4, rel=1e-3)
        everywhere = sum(sent(plain, kind, axis="shard")) - sum(sent(spread, kind, axis="shard"))
        assert everywhere == pytest.approx(times * itemsize * experts, rel=1e-3)
    assert flops(spread) == pytest.approx(flops(plain), rel=1e-3)  # as many tokens come as go
    for category in ("parameters", "optimizer"):
        assert held(spread, category) == pytest.approx(held(plain, category), rel=1e-2)
    gathered = [p.chosen.memory.peak.highest["gathered"] for p in (plain, spread)]
    assert gathered[0] - gathered[1] > 2 * experts * 3 // 4
    step = spread.chosen.steps["middle"]
    costs = Costs(spread.cluster, "middle", 16, experts=4)
    by_hand = sum(costs.of_collective(Collective(ALL_TO_ALL, n, Axes.EXPERTS, "compute")) for n in tokens)
    assert step.by_kind[OF_TOKENS] == pytest.approx(by_hand)
    assert OF_TOKENS not in plain.chosen.steps["middle"].by_kind
    data = spread.as_dict()
    assert data["config"]["expert_parallel"] == 4
    assert "experts over 4" in str(spread.chosen.choice)
    assert "equally many tokens" in " ".join(data["assumed"]["remarks"])


def test_an_all_to_all_leaves_the_node_on_the_network_link_of_each_card() -> None:
    cluster, rates, num_bytes = Cluster(gpu=GPUS["h100"], node=8, network_gbps=50.0), REACHED["middle"], 1 << 30

    def seconds(experts: int) -> float:
        costs = Costs(cluster, "middle", 64, experts=experts)
        return costs.of_collective(Collective(ALL_TO_ALL, num_bytes, Axes.EXPERTS, "compute"))

    inside = num_bytes * 3 / 4 / (450 * GB * rates.link) + GPUS["h100"].latency_s
    assert seconds(4) == pytest.approx(inside)
    outside = num_bytes * 24 / 32 / (50 * GB * rates.network) + LATENCY_S["network"]
    assert seconds(32) == pytest.approx(outside)
    axes = Costs(cluster, "middle", 64, experts=4).axes
    assert (axes[Axes.EXPERT_DATA].ranks, axes[Axes.EXPERT_DATA].on_node) == (16, 2)


def test_modules_with_a_matrix_for_each_expert_are_found() -> None:
    class Holds(nn.Module):
        num_experts = 4

        def __init__(self, first: int) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.empty(first, 2, 3, device="meta"))

        def forward(self, tokens: Any, chosen: Any, weights: Any) -> None: ...

    assert list(experts_in(nn.ModuleDict({"some": Holds(4), "others": Holds(5), "plain": nn.Linear(2, 2)}))) == ["some"]


@pytest.mark.parametrize("strategy", ["full_shard", pytest.param("no_shard", marks=pytest.mark.slow)])
def test_experts_as_separate_units_are_planned_on_multiples_of_their_ranks(folder: Path, strategy: str) -> None:
    options = {**FIXED, "units": acc.min_params(60_000), "strategy": strategy, "gpus": [2, COUNT]}
    plan = planned(folder, **options, expert_parallel=COUNT)
    assert [c.choice.gpus for c in plan.found.candidates] == [COUNT]
    assert plan.chosen.memory.peak.num_bytes >= plan.chosen.least_bytes
