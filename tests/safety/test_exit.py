"""A rank that fails alone exits at once, without waiting for other ranks or for its device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fails_alone import EXIT_S
from tests.support.processes import run_python

ALONE = [
    "forward/plain", "forward/host", "forward/activations", "backward/plain", "backward/disk", "backward/save",
    "backward, absent gradients/host",
]  # fmt: skip
Outcomes = dict[str, tuple[int | None, str, bool]]


def fail_alone(device: str, folder: Path) -> Outcomes:
    """Run `tests.support.fails_alone` for all of ALONE at once; the timeout of the process groups is 900 s."""
    done = run_python("-m", "tests.support.fails_alone", device, folder, *ALONE, timeout_s=EXIT_S + 60)
    assert done.returncode == 0, done.stderr
    outcomes: Outcomes = json.loads(done.stdout)
    return outcomes


def assert_failed_alone(outcome: tuple[int | None, str, bool]) -> None:
    code, said, other_sleeps = outcome
    assert code == 1, said
    assert "ValueError: this rank fails alone" in said, said
    assert "DivergenceError" not in said, said
    assert other_sleeps


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: Any) -> Outcomes:
    return fail_alone("cpu", tmp_path_factory.mktemp("exit"))


@pytest.mark.parametrize("name", ALONE)
def test_a_rank_that_fails_alone_exits_at_once(outcomes, name):
    assert_failed_alone(outcomes[name])
