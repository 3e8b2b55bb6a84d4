"""A command's process ends with one garbage collection, and what is dropped in a cycle then still has its end."""

from __future__ import annotations

import pytest

from tests.support.processes import run_python

PROGRAM = """
import atexit, gc, sys
import torch
from accordion.garbage import end_with_one_collection

atexit.register(lambda: print("frozen", gc.get_freeze_count() > 100_000))  # torch alone makes more
for _ in range(2):
    end_with_one_collection()
gc.callbacks.append(lambda phase, info: print(phase, info["generation"]))


class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        print("ends")


gc.disable()
Cycle()
"""


@pytest.mark.slow
def test_a_process_ends_with_one_collection() -> None:
    done = run_python("-c", PROGRAM)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["start 2", "ends", "stop 2", "frozen True"]
