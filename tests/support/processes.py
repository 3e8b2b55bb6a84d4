"""Python processes of tests, which find this package and the tests wherever they run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_python(
    *words: str | os.PathLike[str], timeout_s: float = 300.0, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run `python *words` at the root of the repository, with these variables beside those of this process."""
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
