"""Output does not raise if its reader is gone, the disk is full, or the encoding lacks a character; imports do not warn."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path

import pytest

from accordion.output import lasting_stream, quiet_imports


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
