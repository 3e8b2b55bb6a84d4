"""Small real file systems for tests, mounted where that is allowed; elsewhere the test is skipped."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def run(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {getattr(error, 'stderr', '') or error}")


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A file system in memory at `path`."""
    path.mkdir()
    run("mount", "-t", "tmpfs", "-o", options, "accordion", str(path))
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(folder: Path) -> Path:
    """Leave no room in the file system of `folder`: the file that takes it."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for num_bytes in (2**20, 2**12, 1):
            try:
                while file.write(bytes(num_bytes)) == num_bytes:
                    pass
            except OSError:
                pass
    return path
