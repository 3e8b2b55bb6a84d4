"""`examples/migrate/fsdp2_*.py`: one program before and after its import was changed, and what both print."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "migrate"


def lines(name: str) -> list[str]:
    """The program without its docstring, which names its own file."""
    return FOLDER.joinpath(name).read_text(encoding="utf-8").split('"""', 2)[2].splitlines()


def test_only_the_import_differs() -> None:
    before, after = lines("fsdp2_before.py"), lines("fsdp2_after.py")
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    assert changed == [
        "- from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard",
        "+ from accordion.compat.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard",
    ]


def test_both_programs_learn_the_same() -> None:
    printed = []
    for name in ("fsdp2_before.py", "fsdp2_after.py"):
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(FOLDER / name),
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        printed.append(done.stdout)
    first, last = [float(line.split()[3]) for line in printed[1].splitlines() if line.startswith("step")][::3]
    assert last < first
    assert printed[0] == printed[1]
