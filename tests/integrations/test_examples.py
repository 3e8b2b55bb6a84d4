"""`examples/integrations`: programs before and after differ in at most three lines, and learn the same."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest

from tests.compat.test_migrate import program
from tests.integrations.jobs import library_job, needs
from tests.support.ranked import on_job
from tests.support.sample import sampled

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
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
