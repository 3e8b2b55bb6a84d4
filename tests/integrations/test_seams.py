"""The names that integrations use of the libraries exist, and each module is imported only if it is used."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest

import accordion


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
