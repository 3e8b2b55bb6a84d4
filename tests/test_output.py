"""Output does not raise if its reader is gone, the disk is full, or the encoding lacks a character; imports do not
warn. A command's process ends with one garbage collection, and what is dropped in a cycle then still has its end."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path

import pytest

from accordion.output import lasting_stream, quiet_imports
from tests.support.processes import run_python


def test_output_without_a_reader_is_dropped() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        print("x" * 100_000, file=lasting_stream(file), flush=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_to_a_full_disk_is_dropped() -> None:
    with open("/dev/full", "w") as full:
        print("text", file=lasting_stream(full), flush=True)


def test_characters_that_the_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        print("\u27e6red\u27e7", file=lasting_stream(file), flush=True)
    assert (tmp_path / "out").read_text() == "\\u27e6red\\u27e7\n"


def test_stream_without_a_file_is_returned_as_it_is() -> None:
    """For example in a notebook, whose output may have the descriptor of an unused terminal."""
    stream = io.StringIO()
    assert lasting_stream(stream) is stream


def test_torchao_logs_errors_alone(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torchao")
    with caplog.at_level(logging.WARNING, logger.name):
        quiet_imports()
        logger.warning("Failed to load a library")
        logger.error("broken")
    assert caplog.messages == ["broken"]


# -- the end of a command's process

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
