"""An assertion that a command refuses its input."""

from __future__ import annotations

from typing import Any

import pytest

from accordion import cli


def refused(capture: pytest.CaptureFixture[str], words: list[str], said: str, run: Any = None) -> str:
    """Assert that a command ends with the exit code of bad input, and with one line on stderr that contains `said`.

    Returns what the command printed to stdout. `run`: function of `words` that runs in place of the command.
    """
    capture.readouterr()
    assert cli.main(words, run) == cli.BAD_INPUT
    out, err = capture.readouterr()
    assert said in err, err
    assert err.startswith("accordion: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return out
