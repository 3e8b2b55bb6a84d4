"""The names that integrations use of the libraries exist, and each module is imported only if it is used."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import accordion

FOLDER = Path(accordion.__file__).parent / "integrations"


def test_every_seam_is_there():
    pytest.importorskip("accelerate")
    from tests.support.seams import lost

    assert not list(lost()), "\n".join(lost())


def test_sharding_takes_all_that_shard_takes():
    from accordion.integrations.sharding import ShardArguments

    own = {field.name for field in fields(ShardArguments)}
    assert {"model", "fields", *own} == set(inspect.signature(accordion.shard).parameters)


def named(path: Path, own: set[str]) -> set[str]:
    """Return the names with one underscore that a file uses, without those that it defines."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    used = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    asked = [n.args[1] for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "getattr"]
    used |= {name.value for name in asked if isinstance(name, ast.Constant)}
    return {name for name in used if name[0] == "_" and name[1] != "_"} - own


def test_every_underscore_name_is_in_the_table():
    from tests.support.seams import SEAMS

    own = {"accelerate": {"_take", "_pairs", "_complete", "_without"}}
    own["lightning"] = {"_averages", "_shard", "_sharded", "_over_nodes", "_parts", "_fill", "_write_folder"}
    own["lightning"] |= {"_read_folder", "_clear", "_clip_grad_by_norm", "_shard_all", "_folder", "_own_state"}
    own["lightning"] |= {"_changes", "_modules"}
    for library, names in own.items():
        expected = {seam.name for seam in SEAMS if seam.module.startswith(library)}
        assert named(FOLDER / f"{library}.py", names) == expected
    tree = ast.parse((FOLDER / "transformers.py").read_text())
    mixin = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ShardedTrainer")
    overridden = {n.name for n in mixin.body if isinstance(n, ast.FunctionDef) and n.name[0] == "_" != n.name[1]}
    of_trainer = {seam.name for seam in SEAMS if seam.owner == "Trainer"}
    assert (overridden - {"_load_weights"}) | {"_save"} == of_trainer


def test_a_missing_seam_is_reported_in_one_sentence(monkeypatch):
    pytest.importorskip("accelerate")
    import transformers

    from tests.support.seams import lost

    monkeypatch.delattr(transformers.Trainer, "_load_best_model")
    (sentence,) = lost()
    assert "transformers.trainer.Trainer has no _load_best_model any more (it had in 5.0.0, 5.23.0)" in sentence


def test_no_library_is_imported_before_it_is_asked_for():
    libraries = ["transformers", "accelerate", "peft", "trl", "lightning"]
    said = f"import sys, accordion, accordion.integrations; print([x for x in {libraries} if x in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", said], text=True).strip() == "[]"
