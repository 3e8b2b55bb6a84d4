"""One measured step: what it makes of the times of its own configuration and of others."""

from __future__ import annotations

import pytest

import accordion as acc
from accordion.plan.result import Plan
from tests.plan.test_plan import gpt


def planned(**options: object) -> Plan:
    fixed = {"strategy": "full_shard", "checkpoint_activations": "none", "gpu": "a100-80", "gpus": 2}
    return acc.plan(gpt(2).make(), gpt(2).loss, gpt(2).batch(), **{**fixed, **options})


def test_a_measured_step_calibrates_its_own_configuration_and_others():
    plain, made = planned(), planned(measured_step_s=0.5)
    steps = made.chosen.steps
    assert {name: step.seconds for name, step in steps.items()} == pytest.approx(dict.fromkeys(steps, 0.5))
    before = plain.chosen.steps["middle"]
    assert steps["middle"].exposed_s == pytest.approx(before.exposed_s * 0.5 / before.seconds)
    assert (plain.cluster.tellable, made.cluster.tellable) == (0.10, 0.05)
    told = made.as_dict()["assumed"]
    assert told["time"].startswith("calibrated by one measured step: 0.5 s of full_shard")
    assert plain.as_dict()["assumed"]["time"].startswith("uncalibrated")

    other = planned(measured_step_s=0.5, measured_at="full_shard,full,1,1")
    found = {name: step.seconds for name, step in other.chosen.steps.items()}
    assert len(set(found.values())) == 3  # another mixture of work: a range
    assert max(found.values()) < 2 * min(found.values())


def test_what_calibrates_is_one_configuration():
    with pytest.raises(acc.UsageError, match="looks through several"):
        planned(measured_step_s=0.5, checkpoint_activations=None)
    with pytest.raises(acc.UsageError, match="strategy,checkpointing,micro-batch,GPUs"):
        planned(measured_step_s=0.5, measured_at="full_shard,full")
    with pytest.raises(acc.UsageError, match="takes the seconds of a step"):
        planned(measured_step_s=-1.0)
    with pytest.raises(acc.UsageError, match="pass measured_step_s"):
        planned(measured_at="full_shard,full,1,1")
