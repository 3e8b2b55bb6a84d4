"""`python -m accordion.compat.fsdp2 [-m] program ...`: run an unedited program that uses torch's `fully_shard`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from accordion.compat.fsdp2 import install
from accordion.errors import advise
from accordion.safety import report_crashes
from accordion.safety.own_process import keep_freed_memory


def main(words: list[str]) -> None:
    """Run the program `words` (a file, or "-m" and a module, then its arguments) as Python would, with torch's `fully_shard`
    replaced by Accordion's. Sets `sys.argv`. Raises `SystemExit` if no program is named."""
    as_module = words[:1] == ["-m"]
    words = words[as_module:]
    if not words:
        raise SystemExit("usage: python -m accordion.compat.fsdp2 [-m] program [arguments of the program]")
    sys.argv = words
    keep_freed_memory()
    report_crashes()
    try:
        with install():
            if as_module:
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(Path(words[0]).absolute().parent)
                runpy.run_path(words[0], run_name="__main__")
    except RuntimeError as error:
        advise(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
