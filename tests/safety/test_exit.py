"""A rank that fails alone exits at once, without waiting for other ranks or for its device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.fails_alone import EXIT_S
from tests.support.processes import run_python

ALONE = ["forward/plain", "forward/host", "backward/save"]
MORE = ["forward/activations", "backward/plain", "backward/host", "backward/disk"]
MORE += ["backward, absent gradients/host"]


def assert_each_exits_alone(device: str, folder: Path, names: Sequence[str]) -> None:
    """Run `tests.support.fails_alone` for all `names` at once; the timeout of the process groups is 900 s."""
    done = run_python("-m", "tests.support.fails_alone", device, folder, *names, timeout_s=EXIT_S + 60)
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, tuple[int | None, str, bool]] = json.loads(done.stdout)
    assert list(outcomes) == list(names)
    for code, output, other_sleeps in outcomes.values():
        assert code == 1, output
        assert "ValueError: this rank fails alone" in output, output
        assert "DivergenceError" not in output, output
        assert other_sleeps


@pytest.mark.parametrize("names", [ALONE, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"])
def test_a_rank_that_fails_alone_exits_at_once(tmp_path, names):
    assert_each_exits_alone("cpu", tmp_path, names)
