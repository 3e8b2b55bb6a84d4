"""Published runs of PyTorch's FSDP2, predicted before anything is launched."""

from __future__ import annotations

import pytest

from accordion.plan.hardware import GIB, GPUS, REACHED, Cluster
from accordion.plan.replay.cost import costs_of
from accordion.plan.replay.peak import peak_of
from accordion.plan.replay.predict import memory_of
from accordion.plan.replay.timeline import simulate
from accordion.plan.trace.trace import trace
from tests.plan import published

COSTS = costs_of(Cluster(gpu=GPUS["h100-96"]), "middle", 8)
TOKENS = published.BATCH * published.SEQ


def test_the_published_run_by_a_line_through_two_and_three_blocks():
    logs = [trace(published.subject(layers), published.run()) for layers in (2, 3)]
    allocated, seconds = (
        a + 30 * (b - a)
        for a, b in (
            [peak_of(log).num_bytes / GIB for log in logs],
            [simulate(log, COSTS).seconds for log in logs],
        )
    )
    assert TOKENS / seconds == pytest.approx(published.TOKENS_PER_S, rel=0.15)
    assert 0.8 * published.RESERVED_GIB < allocated < published.RESERVED_GIB  # what is reserved is no straight line


@pytest.mark.slow
def test_the_published_run_of_torchtitan():
    log = trace(published.subject(), published.run())
    memory, steps = (
        memory_of(log),
        {name: simulate(log, costs_of(COSTS.cluster, name, 8)) for name in REACHED},
    )
    reserved = {how: num_bytes / GIB for how, num_bytes in memory.reserved_bytes.items()}
    rates = {name: TOKENS / step.seconds for name, step in steps.items()}
    print(
        f"allocated {memory.peak.num_bytes / GIB:.2f} GiB, reserved {reserved}, tokens/s {rates}, {steps['middle'].by_kind}"
    )
    for num_gib in reserved.values():
        assert num_gib == pytest.approx(published.RESERVED_GIB, rel=0.07)
    assert rates["middle"] == pytest.approx(published.TOKENS_PER_S, rel=0.15)
    assert rates["low"] < published.TOKENS_PER_S < rates["high"]
    assert memory.peak.operator == "aten._log_softmax_backward_data.default"
    assert memory.fits(COSTS.cluster)
