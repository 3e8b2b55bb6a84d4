"""`accordion train --plan auto`: what is left to look for, and that a run takes what the plan chose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accordion.plan.search.space import Choice
from accordion.train.auto_plan import offload_named, smaller_of, space_of, with_choice
from accordion.train.config import Config, ShardConfig, TrainConfig, check

NAMED: frozenset[str] = frozenset()
CONFIG = Config(train=TrainConfig(micro_batch=8, accumulate=3))
CHOICE = Choice(
    strategy="shard_grad_op", checkpoint_activations="full", micro_batch=2, gpus=4, accumulate=12, offload="all"
)


def test_what_the_plan_chose_is_trained():
    made = with_choice(CONFIG, CHOICE, space_of(CONFIG, NAMED, 4, "cuda"))
    check(made)
    assert (made.shard.strategy.name, made.shard.checkpoint_activations) == ("shard_grad_op", "full")
    assert (made.train.micro_batch, made.train.accumulate) == (2, 12)
    offload = made.shard.offload
    assert (offload.params, offload.optimizer) == ("host", "host")


def test_a_step_sees_as_much_as_was_asked_for():
    cut = smaller_of(CONFIG, NAMED, 4, space_of(CONFIG, NAMED, 4, "cuda"))
    assert cut is not None
    assert (list(cut.micro_batches), cut.global_batch) == ([1, 2, 4], 8 * 3 * 4)
    for key in ("train.micro_batch", "train.accumulate"):
        named = frozenset({key})
        assert smaller_of(CONFIG, named, 4, space_of(CONFIG, named, 4, "cuda")) is None
    alone = replace(CONFIG, train=TrainConfig(micro_batch=1))
    assert smaller_of(alone, NAMED, 4, space_of(alone, NAMED, 4, "cuda")) is None


def test_places_that_are_named_stay():
    shard = ShardConfig(offload="params=host,optimizer=disk:/scratch")
    config, named = Config(shard=shard), frozenset({"shard.offload"})
    space = space_of(config, named, 4, "cuda")
    assert list(space.offloads) == ["disk"]
    made = with_choice(config, replace(CHOICE, offload="disk"), space)
    assert made.shard.offload.optimizer == "disk:/scratch"
    assert list(space_of(config, named, 4, "cpu").offloads) == ["none"]
    assert list(space_of(Config(), NAMED, 4, "cuda").offloads) == ["none", "optimizer", "all"]


def test_inputs_of_recomputed_units_wait_where_the_plan_has_them_unless_a_place_was_named():
    space = space_of(CONFIG, NAMED, 4, "cuda")
    assert list(space.activations) == ["device", "host"]
    made = with_choice(CONFIG, replace(CHOICE, activations="host"), space)
    check(made)
    assert made.shard.offload.activations == "host"
    assert list(space_of(CONFIG, NAMED, 4, "cpu").activations) == ["device"]
    config, named = Config(shard=ShardConfig(offload="activations=disk:/x")), frozenset({"shard.offload"})
    space = space_of(config, named, 4, "cuda")
    assert list(space.activations) == ["disk"]
    assert with_choice(config, CHOICE, space).shard.offload.activations == "disk:/x"


@pytest.mark.parametrize(
    ("params", "optimizer", "name"),
    [
        ("device", "device", "none"),
        ("device", "host", "optimizer"),
        ("host", "host", "all"),
        ("host", "disk:/x", "disk"),
    ],
)
def test_places_have_the_plans_names(params, optimizer, name):
    assert offload_named(params, optimizer) == name
