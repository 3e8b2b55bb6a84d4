"""The plan against the allocator: predicted peak bytes of a step beside those that CPU ranks count."""

from __future__ import annotations

import pytest

from accordion.plan.memory import peak_of
from accordion.plan.trace import trace
from tests.plan import counted, subjects

SAMPLE = [("gpt", "full_shard"), ("llama", "checkpoint every:2, bf16"), ("vision", "no_shard")]
RUNS = 2
ALL = [(a, c) for a in subjects.ARCHITECTURES for c in subjects.CASES]


def assert_close(world, architecture, case):
    predicted = peak_of(trace(subjects.subject_of(architecture, case), subjects.run_of(architecture, case))).num_bytes
    run = subjects.run_of(architecture, case)
    shape, names = (run.ranks,), ("shard",)
    if run.strategy.hybrid:
        shape, names = (run.ranks // run.node, run.node), ("replicate", "shard")
    runs = [
        world.run_mesh(shape, names, counted.counted_peak, architecture, case, timeout_s=300.0)[0] for _ in range(RUNS)
    ]
    least = min(runs)  # what the profiler misses only adds
    print(f"{architecture:8} {case:26} predicted {predicted:>12,} counted {least:>12,} {predicted / least - 1:+.2%}")
    assert predicted == pytest.approx(least, rel=0.02)


@pytest.mark.parametrize(("architecture", "case"), SAMPLE)
def test_peak_bytes_are_those_that_ranks_count(world, architecture, case):
    assert_close(world, architecture, case)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "case"), [pair for pair in ALL if pair not in SAMPLE])
def test_peak_bytes_of_every_case_are_those_that_ranks_count(world, architecture, case):
    assert_close(world, architecture, case)
