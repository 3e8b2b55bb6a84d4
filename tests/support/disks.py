"""Small real file systems for tests. A test is skipped if none can be mounted."""

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
    """Context manager that mounts a tmpfs (in memory) at `path`, a new folder, with mount's `options`, and yields `path`."""
    path.mkdir()
    run("mount", "-t", "tmpfs", "-o", options, "accordion", str(path))
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(folder: Path) -> Path:
    """Fill the file system of `folder` to the last byte, and return the path of the file that does it."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for num_bytes in (2**20, 2**12, 1):
            try:
                while file.write(bytes(num_bytes)) == num_bytes:
                    pass
            except OSError:
                pass
    return path
