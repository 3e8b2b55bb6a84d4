"""Plans of ranks that share each sequence: messages, memory and time against arithmetic, and the search."""

from __future__ import annotations

from pathlib import Path

import pytest

import accordion as acc
from accordion.plan.events import ALL_TO_ALL, Axes, Collective
from accordion.plan.hardware import gpu_named
from accordion.plan.replay.cost import Costs
from accordion.plan.replay.timeline import OF_HEADS
from accordion.plan.trained_models import Kernels
from tests.plan.builders import ONE_CHOICE, config_in, flops, planned, sent

SEQ, WIDTH, LAYERS, HEADS, KV = 2048, 256, 3, 8, 2
FIXED = {**ONE_CHOICE, "gpus": 8, "seq": SEQ}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 2 * WIDTH, "vocab_size": 2048}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV, "max_position_embeddings": 1 << 17}
    return config_in(tmp_path_factory.mktemp("model"), **sizes, **heads)


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_messages_and_activations_of_one_two_and_four_ranks(folder: Path, recomputed: str) -> None:
    plans = {n: planned(folder, **{**FIXED, "checkpoint_activations": recomputed}, sequence=n) for n in (1, 2, 4)}
    one = plans[1].chosen
    assert sent(plans[1], ALL_TO_ALL, axis=Axes.SEQUENCE) == []
    for n, plan in plans.items():
        chosen, step = plan.chosen, plan.chosen.steps["middle"]
        kept = one.memory.peak.breakdown["activations"], chosen.memory.peak.breakdown["activations"]
        assert kept[1] == pytest.approx(kept[0] / n, rel=0.12), (n, kept)  # besides a copy of the heads per layer
        assert flops(plan) == pytest.approx(flops(plans[1]) / n, rel=1e-2)
        # A rank's share of each sequence counts as its tokens.
        assert chosen.tokens_per_s(SEQ) == pytest.approx(SEQ / n / step.seconds)
        if n == 1:
            continue
        key_value = KV * (n // KV if n > KV else 1)  # each is sent twice to four ranks
        there, back = (2 * SEQ // n * heads * WIDTH // HEADS for heads in (HEADS + 2 * key_value, HEADS))
        passes = 2 + (recomputed == "full")
        messages = sent(plan, ALL_TO_ALL, axis=Axes.SEQUENCE)
        assert sorted(messages) == sorted([there, back] * passes * LAYERS)
        costs = Costs(plan.cluster, "middle", 8, sequence=n)
        by_hand = sum(costs.of_collective(Collective(ALL_TO_ALL, m, Axes.SEQUENCE, "compute")) for m in messages)
        assert step.by_kind[OF_HEADS] == pytest.approx(by_hand)
        assert plan.as_dict()["config"]["sequence"] == n
        assert f"sequences over {n}" in str(chosen.choice)


def test_tiles_of_mlps_lower_the_peak_and_compute_them_again(folder: Path) -> None:
    options = {**FIXED, "checkpoint_activations": "full", "sequence": 2}
    plain, tiled = (planned(folder, **options, kernels=Kernels(loss="chunked", mlp_tiles=n)) for n in (1, 8))
    activations = [plan.chosen.memory.peak.breakdown["activations"] for plan in (plain, tiled)]
    assert activations[1] < 0.8 * activations[0]
    product = 2 * SEQ // 2 * WIDTH * 2 * WIDTH * LAYERS  # one of the three products of all MLPs
    # torch ends the recomputation of a block at the last tensor that it needs: the third product, the last tile.
    assert flops(tiled) - flops(plain) == pytest.approx((2 + 3 * 7 / 8 - 2) * product, rel=1e-6)
    assert "MLPs in 8 tiles" in tiled.planned_for
    with pytest.raises(acc.UsageError, match="mlp_tiles is 0; it takes 1 or more"):
        Kernels(mlp_tiles=0)


def test_ranks_share_sequences_if_nothing_fits_without(folder: Path) -> None:
    fixed = {**FIXED, "seq": 1 << 14, "checkpoint_activations": "full"}
    small, large = (planned(folder, **fixed, gpu=gpu_named("h100", memory_gib=gib)) for gib in (2.35, 80.0))
    assert large.fits
    assert [c.choice.sequence for c in large.found.candidates] == [1]
    assert small.fits
    tried = [(c.choice.sequence, c.fits) for c in small.found.candidates]
    assert tried == [(1, False), (2, False), (4, True)]
    assert small.chosen.choice.sequence == 4


def test_a_global_batch_counts_the_sequences_of_all_groups(folder: Path) -> None:
    plan = planned(folder, **FIXED, sequence=4, global_batch=8)
    assert plan.chosen.choice.accumulate == 4
    with pytest.raises(acc.UsageError, match="there is no configuration to try"):
        planned(folder, **FIXED, sequence=4, global_batch=3)
