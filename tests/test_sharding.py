"""`Sharding`: values and words mean the same, words are read back, and what no field takes is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

import accordion as acc
from accordion.sharding import Sharding
from tests.support import models
from tests.support.ranked import on_world

WORDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"strategy": s.name}, {"strategy": s}) for s in acc.config.STRATEGIES.values() if s != acc.FULL_SHARD),
    ({"precision": "bf16"}, {"precision": acc.Precision(params=torch.bfloat16)}),
    ({"offload": "optimizer=host"}, {"offload": acc.Offload(optimizer="host")}),
    (
        {"offload": "params=host,optimizer=disk:/states,host_bytes=1000"},
        {"offload": acc.Offload(params="host", optimizer="disk:/states", host_bytes=1000)},
    ),
    ({"units": "blocks"}, {"units": acc.only_blocks()}),
    ({"units": "min_params:1000"}, {"units": acc.min_params(1000)}),
    ({"units": "Block,Head"}, {"units": ["Block", "Head"]}),
    ({"checkpoint_activations": "every:2"}, {"checkpoint_activations": "every:2"}),
    ({"secondary": 2, "reduce_op": "sum"}, {"secondary": 2, "reduce_op": "sum"}),
    ({}, {"strategy": "full_shard", "units": "auto", "offload": "none", "prefetch": None}),
]


@pytest.mark.parametrize(("words", "values"), WORDS, ids=str)
def test_words_and_values_mean_the_same(words: dict[str, Any], values: dict[str, Any]) -> None:
    assert Sharding(**words) == Sharding(**values)
    assert Sharding(**values).as_config() == words
    assert Sharding.from_config(Sharding(**words).as_config()) == Sharding(**words)


def test_values_without_words_are_kept() -> None:
    def rule(name: str, module: torch.nn.Module) -> bool:
        return False

    precision = acc.Precision(params=torch.bfloat16, overrides={"head": acc.Precision()})
    config = Sharding(units=rule, precision=precision).as_config()
    assert config == {"units": rule, "precision": precision}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"strategy": "full_shart"}, r"strategy 'full_shart' does not exist; did you mean 'full_shard'\?"),
        ({"strategy": 3}, "strategy is 3, of type int; pass a name such as 'full_shard'"),
        ({"precision": "bf17"}, r"precision 'bf17' does not exist; did you mean 'bf16'\?"),
        ({"offload": "optimiser=host"}, r"has 'optimiser=host'; write .* did you mean 'optimizer'\?"),
        ({"offload": "optimizer"}, "is no place"),
        ({"offload": "host_bytes=many"}, "has 'host_bytes=many'"),
        ({"offload": "optimizer=moon"}, r"Offload\(optimizer='moon'\) is no place"),
        ({"units": "min_params:"}, "is not understood"),
        ({"checkpoint_activations": "some"}, "'some' is not understood"),
        ({"checkpoint_activations": 2}, "checkpoint_activations is 2, of type int"),
        ({"state_block": 0}, "state_block is 0; pass a number"),
        ({"reduce_op": "max"}, "reduce_op='max' is not known"),
        ({"unit": "blocks"}, r"sharding takes no 'unit'; did you mean 'units'\?"),
    ],
    ids=str,
)
def test_what_no_field_takes_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(acc.UsageError, match=message):
        Sharding.from_config(config)


def test_a_value_and_fields_are_not_mixed() -> None:
    with pytest.raises(acc.UsageError, match="and the fields strategy"):
        acc.shard(models.plain(), None, Sharding(), strategy="full_shard")
    with pytest.raises(acc.UsageError, match=r"sharding=\{'units': None\}"):
        acc.shard(models.plain(), None, {"units": None})  # type: ignore[arg-type]


@on_world(2)
def test_shard_takes_words_fields_and_a_value(mesh: Any) -> None:
    words = acc.shard(models.plain(), mesh, strategy="shard_optim", units="Block", precision="bf16")
    value = Sharding(strategy=acc.SHARD_OPTIM, units={models.Block}, precision=acc.Precision(params=torch.bfloat16))
    whole = acc.shard(models.plain(), mesh, value)
    assert repr(acc.describe(words)) == repr(acc.describe(whole))


def test_each_field_is_documented() -> None:
    for field in fields(Sharding):
        assert f"        {field.name}: " in (Sharding.__doc__ or "")
