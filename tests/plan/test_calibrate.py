"""Calibration by one measured step: times of its own configuration and of others."""

from __future__ import annotations

import pytest

import accordion as acc
from accordion.plan.result import Plan
from tests.plan import builders
from tests.plan.test_plan import gpt


def planned(**options: object) -> Plan:
    fixed = {"strategy": "full_shard", "checkpoint_activations": "none", "gpu": "a100-80", "gpus": 2}
    return builders.planned(
        gpt(2).make(), gpt(2).loss, gpt(2).batch(), **{**fixed, "units": acc.only_blocks(), **options}
    )


@pytest.fixture(scope="module")
def plain() -> Plan:
    return planned()


@pytest.fixture(scope="module")
def calibrated(plain: Plan) -> Plan:
    """A plan calibrated by a step that took three times as long."""
    return planned(measured_step_s=3 * plain.chosen.steps["middle"].seconds)


def test_a_measured_step_calibrates_all_configurations(plain, calibrated):
    measured_s = 3 * plain.chosen.steps["middle"].seconds
    steps = calibrated.chosen.steps
    assert {name: step.seconds for name, step in steps.items()} == pytest.approx(
        dict.fromkeys(steps, measured_s), rel=1e-3
    )
    assert (plain.cluster.tellable, calibrated.cluster.tellable) == (0.10, 0.05)
    told = calibrated.as_dict()["assumed"]
    assert told["time"].startswith(f"calibrated by one measured step: {measured_s:g} s of full_shard")
    assert plain.as_dict()["assumed"]["time"].startswith("uncalibrated")


def test_kernels_are_scaled_and_hidden_messages_are_not(calibrated):
    for rate in ("middle", "high"):  # at the low one a step this small waits for the host
        scale = calibrated.cluster.scales[rate]
        assert scale.kernels > 1.5
        assert scale.messages == 1.0
    other = planned(measured_step_s=calibrated.chosen.steps["middle"].seconds, measured_at="full_shard,full,1,1")
    found = [step.seconds for step in other.chosen.steps.values()]
    assert max(found) > 1.001 * min(found)  # of messages one GPU says nothing: a range


def test_a_step_faster_than_the_peaks_is_refused():
    with pytest.raises(
        acc.UsageError, match=r"measured_step_s is 1e-06, but full_shard.* at the peaks of a100-80 .*check the time"
    ):
        planned(measured_step_s=1e-6)


def test_a_measured_step_needs_one_configuration():
    with pytest.raises(acc.UsageError, match="looks through several"):
        planned(measured_step_s=0.5, checkpoint_activations=None)
    with pytest.raises(acc.UsageError, match="strategy,checkpointing,micro-batch,GPUs"):
        planned(measured_step_s=0.5, measured_at="full_shard,full")
    with pytest.raises(acc.UsageError, match="takes the seconds of a step"):
        planned(measured_step_s=-1.0)
    with pytest.raises(acc.UsageError, match="pass measured_step_s"):
        planned(measured_at="full_shard,full,1,1")
