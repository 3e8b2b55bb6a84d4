"""Names that integrations use of the libraries exist, libraries are imported late, each documented feature has a test."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import accordion

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "integrations.md"
ROW = re.compile(r"^\| (?P<feature>.*) \| (?P<state>[a-z ]+) \| .* \| (?:`(?P<file>\w+)\.py` `(?P<test>\w+)`)? ?\|$")


def test_every_seam_is_there():
    pytest.importorskip("accelerate")
    from tests.support.seams import lost

    assert not list(lost()), "\n".join(lost())


def test_sharding_takes_all_that_shard_takes():
    from accordion.integrations.sharding import ShardArguments

    own = {field.name for field in fields(ShardArguments)}
    assert {"model", "fields", *own} == set(inspect.signature(accordion.shard).parameters)


def test_no_library_is_imported_before_it_is_asked_for():
    libraries = ["transformers", "accelerate", "peft", "trl", "lightning"]
    said = f"import sys, accordion, accordion.integrations; print([x for x in {libraries} if x in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", said], text=True).strip() == "[]"


def test_every_feature_names_an_existing_test():
    listed = PAGE.read_text().partition("<!-- below:")[2].splitlines()
    rows = [line for line in listed if line.startswith("| ") and not line.startswith("| feature |")]
    assert len(rows) > 60
    bodies = {path.stem: ast.parse(path.read_text()).body for path in FOLDER.glob("test_*.py")}
    tests = {name: {node.name for node in body if isinstance(node, ast.FunctionDef)} for name, body in bodies.items()}
    for line in rows:
        row = ROW.match(line)
        assert row, line
        assert row["state"] in ("works", "refused", "not applicable"), line
        assert bool(row["test"]) == (row["state"] != "not applicable"), line
        if row["test"]:
            assert row["test"] in tests[row["file"]], line
