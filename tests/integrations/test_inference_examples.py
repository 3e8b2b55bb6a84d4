"""`examples/inference`: every rank's receivers have the weights, and the GRPO loop learns as without sharding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranked import on_job

EXAMPLES = Path(__file__).parents[2] / "examples" / "inference"
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.cpu("the programs compute on the CPU")
@on_job(2)
def test_consumers_get_the_weights_that_they_ask_for(mesh: Any) -> None:
    sys.path.insert(0, str(EXAMPLES))
    import verl_update
    import vllm_source

    assert vllm_source.train() == [NAMES if dist.get_rank() == 0 else []] * 2
    assert verl_update.train() == [NAMES, NAMES[2:], NAMES[2:], NAMES]


@pytest.mark.cpu("the program computes on the CPU")
@on_job(2)
def test_the_grpo_loop_learns_as_without_sharding(mesh: Any) -> None:
    sys.path.insert(0, str(EXAMPLES))
    import grpo

    own = grpo.train(12, [dist.get_rank()])
    each: list[Any] = [None, None]
    dist.all_gather_object(each, own)
    together = grpo.train(12, [0, 1], sharded=False)
    for (first, second), (loss, reward) in zip(zip(*each, strict=True), together, strict=True):
        assert (first[0] + second[0]) / 2 == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert (first[1] + second[1]) / 2 == pytest.approx(reward)
    assert together[-1][1] > 2 * together[0][1] + 0.1, "it learns the liked token"
