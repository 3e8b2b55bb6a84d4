"""A rank that fails alone ends at once: nothing at the exit of its process waits for other ranks or for its device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import accordion

ROOT = Path(__file__).parents[2]
EXIT_S = 300  # for the whole program on a busy machine; the time-out of its process group is 900
ALONE = [
    ("forward", "plain"),
    ("forward", "host"),
    ("forward", "activations"),
    ("backward", "plain"),
    ("backward", "disk"),
    ("backward", "save"),
    ("backward, absent gradients", "host"),
]


def fails_alone(where: str, mode: str, device: str, folder: Path) -> None:
    """Run `tests.support.fails_alone` and return when rank 0 has ended, which is checked."""
    command = [sys.executable, "-m", "tests.support.fails_alone"]
    path = os.pathsep.join([str(ROOT), str(Path(accordion.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path}
    ranks = [
        subprocess.Popen([*command, str(rank), where, mode, device, str(folder)], stderr=subprocess.PIPE, env=environ)
        for rank in range(2)
    ]
    try:
        _, said = ranks[0].communicate(timeout=EXIT_S)
        assert ranks[0].returncode == 1, said.decode()
        assert "ValueError: this rank fails alone" in said.decode(), said.decode()
        assert "DivergenceError" not in said.decode(), said.decode()
        assert ranks[1].poll() is None, "it still sleeps"
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(("where", "mode"), ALONE)
def test_a_rank_that_fails_alone_exits_at_once(tmp_path, where, mode):
    fails_alone(where, mode, "cpu", tmp_path)
