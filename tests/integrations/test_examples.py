"""`examples/integrations`: programs before and after differ in at most three lines, and learn the same. `examples/inference`."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.compat.test_migrate import program
from tests.integrations.jobs import library_job, needs
from tests.support.ranked import on_job
from tests.support.sample import sampled

EXAMPLES, INFERENCE = (Path(__file__).parents[2] / "examples" / name for name in ("integrations", "inference"))
PROGRAMS = ["trainer", "accelerate", "trl", "lightning", "fabric"]


def test_every_program_is_here():
    assert {p.stem for p in EXAMPLES.glob("*.py")} == {
        f"{name}_{kind}" for name in PROGRAMS for kind in ("before", "after")
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_they_differ_in_at_most_three_lines(name):
    before, after = ((EXAMPLES / f"{name}_{kind}.py").read_text().splitlines() for kind in ("before", "after"))
    changed = [line for line in difflib.ndiff(before, after) if line[0] == "+"]
    assert 0 < len(changed) <= 3
    assert any("accordion.integrations" in line for line in changed)


@needs("transformers", "accelerate", "trl", "peft", "lightning")
@pytest.mark.parametrize("name", sampled(PROGRAMS, {"accelerate", "fabric"}.__contains__))
@on_job(2)
def test_they_learn_the_same(mesh: Any, tmp_path: Path, name: str) -> None:
    found = []
    for kind in ("before", "after"):
        with library_job():
            found.append(program(f"{name}_{kind}", EXAMPLES).train(str(tmp_path / kind), 6))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert sum(found[1][-3:]) < sum(found[1][:3])


# -- `examples/inference`


@pytest.mark.cpu("the programs compute on the CPU")
@on_job(2)
def test_consumers_get_the_weights_that_they_ask_for(mesh: Any) -> None:
    """Every rank's receivers have the weights."""
    sys.path.insert(0, str(INFERENCE))
    import verl_update
    import vllm_source

    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert vllm_source.train() == [names if dist.get_rank() == 0 else []] * 2
    assert verl_update.train() == [names, names[2:], names[2:], names]


@pytest.mark.cpu("the program computes on the CPU")
@on_job(2)
def test_the_grpo_loop_learns_as_without_sharding(mesh: Any) -> None:
    sys.path.insert(0, str(INFERENCE))
    import grpo

    own = grpo.train(12, [dist.get_rank()])
    each: list[Any] = [None, None]
    dist.all_gather_object(each, own)
    together = grpo.train(12, [0, 1], sharded=False)
    for (first, second), (loss, reward) in zip(zip(*each, strict=True), together, strict=True):
        assert (first[0] + second[0]) / 2 == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert (first[1] + second[1]) / 2 == pytest.approx(reward)
    assert together[-1][1] > 2 * together[0][1] + 0.1, "it learns the liked token"
