"""Commands that refuse their input."""

from __future__ import annotations

from typing import Any

import pytest

from accordion import cli


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
