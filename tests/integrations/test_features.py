"""Each feature in `docs/integrations.md` names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "integrations.md"
ROW = re.compile(r"^\| (?P<feature>.*) \| (?P<state>[a-z ]+) \| .* \| (?:`(?P<file>\w+)\.py` `(?P<test>\w+)`)? ?\|$")


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_feature_names_an_existing_test():
    listed = PAGE.read_text().partition("<!-- below:")[2].splitlines()
    rows = [line for line in listed if line.startswith("| ") and not line.startswith("| feature |")]
    assert len(rows) > 60
    tests = {path.stem: functions_of(path) for path in FOLDER.glob("test_*.py")}
    for line in rows:
        row = ROW.match(line)
        assert row, line
        assert row["state"] in ("works", "refused", "not applicable"), line
        assert bool(row["test"]) == (row["state"] != "not applicable"), line
        if row["test"]:
            assert row["test"] in tests[row["file"]], line
