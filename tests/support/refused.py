"""Commands that refuse their input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accordion import cli
from accordion.train import launch


def refused(capture: pytest.CaptureFixture[str], words: list[str], said: str, run: Any = None) -> str:
    """Assert that a command ends with the exit code of bad input and one line on stderr that has `said` in it.

    `run`: of a script in place of the command that `words` name. Returns what was printed to stdout.
    """
    capture.readouterr()
    assert cli.main(words, run) == cli.BAD_INPUT
    out, err = capture.readouterr()
    assert said in err, err
    assert err.startswith("accordion: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return out


def refused_before_ranks(
    capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    """As `refused`, of `accordion train`, with no rank started and no run folder made."""
    patch.setattr(launch, "start", lambda *_: pytest.fail("ranks started"))
    refused(capture, ["train", "--run.dir", "bad", *words], said)
    assert not Path("bad").exists()
