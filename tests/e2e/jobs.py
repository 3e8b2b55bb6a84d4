"""Small jobs: what they train, what they have done, and waiting for it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import forked

TEXT = str(Path(asyncio.__file__).parent)
TINY = ["--model.preset", "llama-tiny", "--data.path", TEXT, "--data.seq_len", "64", "--launch.device", "cpu"]
TINY += forked.UNTRACKED


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """What a run has written of its steps; the last line may be under way."""
    file = run_dir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def started(log: Path, *words: str) -> forked.Job:
    """Start `accordion train` as a process of its own, which writes to `log`."""
    log.unlink(missing_ok=True)
    return forked.Job(forked.command, ["train", *words], log)


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines]


def losses_of(run_dir: Path) -> list[float]:
    return losses(lines_of(run_dir))


def until(ready: Callable[[], bool], what: str, *logs: Path, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        told = "\n".join(log.read_text()[-3000:] for log in logs) if time.monotonic() > deadline else ""
        assert time.monotonic() < deadline, f"{what}: not in {timeout_s:.0f} s\n{told}"
        time.sleep(0.1)


def workers_of(agent: int) -> list[int]:
    """Process ids of the ranks that a torchrun agent started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                environ = (entry / "environ").read_bytes().split(b"\0")
            except (OSError, IndexError):
                continue
            if ppid == agent and any(line.startswith(b"LOCAL_RANK=") for line in environ):
                found.append(int(entry.name))
    return sorted(found)
