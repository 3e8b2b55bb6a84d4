"""A plan calls one configuration slower than another only if that holds when each rate is a little off."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import pytest

import accordion as acc
from accordion.plan.choice import Choice
from accordion.plan.events import Log
from accordion.plan.hardware import GPUS, TELLABLE, Cluster
from accordion.plan.replay.predict import memory_of, step_of
from accordion.plan.search.evaluate import Candidate
from accordion.plan.search.search import why_not
from accordion.plan.trace.setup import TrainingSetup
from accordion.plan.trace.trace import trace
from tests.plan.builders import choice, space
from tests.plan.test_plan import gpt, run_of

SLOW = Cluster(  # slow enough that a small model's kernels are not all as short as their launch
    gpu=replace(GPUS["h100"], tflops=0.05, bandwidth_gbps=40.0, link_gbps=0.1, latency_s=1e-4, attention=0.01)
)
WAYS = [(s, c) for s in (acc.FULL_SHARD, acc.SHARD_GRAD_OP, acc.NO_SHARD) for c in ("none", "full")]


@pytest.fixture(scope="module")
def traced() -> list[tuple[Choice, TrainingSetup, Log]]:
    found = []
    for strategy, checkpointing in WAYS:
        run = run_of(8, strategy=strategy, checkpoint_activations=checkpointing)
        asked = choice(strategy=strategy, checkpoint_activations=checkpointing, micro_batch=2)
        found.append((asked, run, trace(gpt(3), run)))
    return found


def off_by(most: float, draw: random.Random) -> Cluster:
    """GPUs whose kernels, copies and messages take up to so much longer or shorter, each kind independently."""
    gpu, longer = SLOW.gpu, [1 + draw.choice((-1, 1)) * most * draw.random() ** 0.2 for _ in range(5)]
    return replace(
        SLOW,
        gpu=replace(
            gpu,
            products=gpu.products / longer[0],
            attention=gpu.attention / longer[1],
            bandwidth_gbps=gpu.bandwidth_gbps / longer[2],
            link_gbps=gpu.link_gbps / longer[3],
            latency_s=gpu.latency_s * longer[4],
        ),
    )


def test_a_claimed_order_holds_for_rates_that_are_a_little_off(traced):
    """10 % are enough for rates that are 4.7 % off independently."""
    draw = random.Random(0)
    candidates = [
        Candidate(choice=c, fits=True, least_bytes=0, memory=memory_of(log), steps={"middle": step_of(log, run, SLOW)})
        for c, run, log in traced
    ]
    claimed = {
        (a, b): why_not(candidates[b], candidates[a], space(cluster=SLOW)).endswith("slower")
        for a, b in permutations(range(len(candidates)), 2)
    }
    assert sum(claimed.values()) >= 5
    most = TELLABLE / (2 + TELLABLE) - 5e-4
    flipped = 0
    for _ in range(16):
        other = off_by(most, draw)
        seconds = [step_of(log, run, other).seconds for _, run, log in traced]
        for (a, b), is_claimed in claimed.items():
            assert not is_claimed or seconds[a] < seconds[b]
            nearer = candidates[a].steps["middle"].seconds < candidates[b].steps["middle"].seconds
            flipped += not is_claimed and nearer and seconds[a] > seconds[b]
    assert flipped > 0, "no pair was close: the test says nothing"
