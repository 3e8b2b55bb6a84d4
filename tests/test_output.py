"""Output that neither a reader who is gone, a full disk nor a narrow encoding turns into an error."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accordion.output import lasting_stream


def test_what_nobody_reads_is_dropped() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        print("x" * 100_000, file=lasting_stream(file), flush=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_what_a_full_disk_does_not_take_is_dropped() -> None:
    with open("/dev/full", "w") as full:
        print("text", file=lasting_stream(full), flush=True)


def test_what_an_encoding_lacks_is_replaced(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        print("\u27e6red\u27e7", file=lasting_stream(file), flush=True)
    assert (tmp_path / "out").read_text() == "\\u27e6red\\u27e7\n"


def test_what_is_no_file_stays_as_it_is() -> None:
    """As in a notebook, whose output may have the descriptor of a terminal that nobody looks at."""
    stream = io.StringIO()
    assert lasting_stream(stream) is stream


def test_streams_that_are_closed_from_the_start_go_nowhere() -> None:
    """Also in processes that are started: the number of a closed stream is not given to the next file."""
    program = (
        "import os; from accordion.output import lasting_output\n"
        "with lasting_output():\n"
        "    os.write(2, b'lost')\n"
        "    print(os.get_inheritable(2), os.open(os.devnull, os.O_RDONLY) > 2)"
    )
    words = ["sh", "-c", '"$0" -c "$1" 2>&-', sys.executable, program]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (0, "True True\n")
