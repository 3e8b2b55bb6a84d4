"""New processes for tests: Python scripts that can import this package and the tests, and calls with limited memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.pool import run_fake


def run_python(
    *words: str | os.PathLike[str], timeout_s: float = 300.0, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run `python *words` in the root folder of the repository, and return the completed process with its output as text.
    `environ`: environment variables in addition to those of this process."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": path, **environ},
        timeout=timeout_s,
    )


def run_bounded(act: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Call `act(*args)` in a forked process that may map only 1 GiB more. Return (result, growth of its peak memory in MiB)."""
    result: tuple[Any, int] = run_fake(1, 0, _bounded, act, args, timeout_s=600)
    return result


def _bounded(_: object, act: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, int]:
    before = _kib("VmHWM")
    resource.setrlimit(resource.RLIMIT_AS, (_kib("VmSize") * 1024 + 2**30,) * 2)
    return act(*args), (_kib("VmHWM") - before) // 1024


def _kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))
