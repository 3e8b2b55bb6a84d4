"""`docs/integrations.md` says what the tests show."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.integrations.features import BEGIN, FEATURES, PAGE, tables


def test_the_page_has_the_table_of_the_tests():
    assert PAGE.read_text().partition(BEGIN)[2] == tables(), "python -m tests.integrations.features"


def test_every_feature_has_a_test_that_is_there():
    for one in [one for features in FEATURES.values() for one in features]:
        assert one.state in ("works", "refused", "not applicable")
        assert bool(one.test) == (one.state != "not applicable"), one.name
        if one.test:
            file, _, name = one.test.partition("::")
            tree = ast.parse((Path(__file__).parent / f"{file}.py").read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, one.test
