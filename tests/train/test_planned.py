"""`accordion train --plan auto`: the configurations that are searched, and a run that uses the plan's choice."""

from __future__ import annotations

from dataclasses import replace

import accordion as acc
from accordion.train.auto_plan import search_of, sharding_of, smaller_of, space_of, with_choice
from accordion.train.config import Config, ShardConfig, TrainConfig, check
from tests.plan.builders import OFFLOADS, choice

NAMED: frozenset[str] = frozenset()
CONFIG = Config(train=TrainConfig(micro_batch=8, accumulate=3))
CHOICE = choice(
    strategy="shard_grad_op",
    checkpoint_activations="full",
    micro_batch=2,
    gpus=4,
    accumulate=12,
    offload=OFFLOADS["all"],
)


def searched(config: Config, named: frozenset[str], device: str) -> acc.Search:
    return search_of(config, named, sharding_of(config.shard, device), device)


def test_the_choice_of_the_plan_is_trained():
    made = with_choice(CONFIG, CHOICE, NAMED)
    check(made)
    assert (made.shard.strategy.name, made.shard.checkpoint_activations) == ("shard_grad_op", "full")
    assert (made.train.micro_batch, made.train.accumulate) == (2, 12)
    offload = made.shard.offload
    assert (offload.params, offload.optimizer) == ("host", "host")


def test_a_plan_keeps_the_global_batch():
    space = space_of(CONFIG, NAMED, 4, "cpu")
    cut = smaller_of(CONFIG, NAMED, space)
    assert cut is not None
    assert (list(cut.search.micro_batches), cut.search.global_batch) == ([1, 2, 4], 8 * 3 * 4)
    for key in ("train.micro_batch", "train.accumulate"):
        assert smaller_of(CONFIG, frozenset({key}), space) is None
    alone = replace(CONFIG, train=TrainConfig(micro_batch=1))
    assert smaller_of(alone, NAMED, space) is None


def test_given_places_are_kept():
    shard = ShardConfig(offload="params=host,optimizer=disk:/scratch")
    config, named = Config(shard=shard), frozenset({"shard.offload"})
    offload = acc.Offload(params="host", optimizer="disk:/scratch")
    assert list(searched(config, named, "cuda").offloads) == [offload]
    made = with_choice(config, CHOICE, named)
    assert made.shard.offload.optimizer == "disk:/scratch"
    assert [o.is_any for o in searched(Config(), NAMED, "cpu").offloads] == [False]
    assert [(o.params, o.optimizer) for o in searched(Config(), NAMED, "cuda").offloads] == [
        ("device", "device"), ("device", "host"), ("host", "host"),
    ]  # fmt: skip


def test_the_plan_places_activations_unless_a_place_is_given():
    assert list(searched(CONFIG, NAMED, "cuda").activations) == ["device", "host"]
    made = with_choice(CONFIG, CHOICE.but(offload="activations=host"), NAMED)
    check(made)
    assert made.shard.offload.activations == "host"
    assert list(searched(CONFIG, NAMED, "cpu").activations) == ["device"]
    config, named = Config(shard=ShardConfig(offload="activations=host")), frozenset({"shard.offload"})
    assert list(searched(config, named, "cuda").activations) == ["host"]
    assert with_choice(config, CHOICE, named).shard.offload.activations == "host"
