"""Small jobs: their command lines, the steps that they have done, and waiting for them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from accordion.train import loop
from accordion.train.command import read
from accordion.train.launch import RankPlace
from accordion.train.prepare import prepare
from accordion.train.screen import Screen
from tests.support import forked, language_folders, own_tasks

TEXT = str(Path(asyncio.__file__).parent)
TINY = ["--model.preset", "llama-tiny", "--data.path", TEXT, "--data.seq_len", "64", "--launch.device", "cpu"]
TINY += forked.UNTRACKED
CHAT = ["--model.path", "base", "--model.init", "pretrained", "--data.path", "talks.jsonl", "--data.format", "chat"]
CHAT += ["--data.seq_len", "96", "--launch.device", "cpu", *forked.UNTRACKED]
"""Flags of a run on the data of `chat_data`, in its folder."""


def of_task(task: str, run_dir: Path | str, *flags: str) -> list[str]:
    """Return the words of `accordion train` for a task of `own_tasks` on the CPU."""
    at = ["--task", f"{own_tasks.__file__}:{task}", "--run.dir", str(run_dir), "--launch.device", "cpu"]
    return ["train", *at, *forked.UNTRACKED, *flags]


def chat_data(folder: Path) -> None:
    """Write a small Llama, "base", and 40 talks of one or two turns, "talks.jsonl"."""
    language_folders.llama(folder / "base")
    with (folder / "talks.jsonl").open("w") as file:
        for i in range(40):
            texts = [f"add {i % 7}", "so it is " * (1 + i % 4), *["thanks", "ok"] * (i % 3 == 0)]
            roles = ("user", "assistant") * 2
            talk = [{"role": role, "content": content} for role, content in zip(roles, texts, strict=False)]
            file.write(json.dumps({"messages": talk}) + "\n")


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step in `metrics.jsonl`, without a last line that is still being written."""
    file = run_dir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def job_of(words: list[str], world: int) -> tuple[Any, ...]:
    """Return the job of `several` that `accordion train *words` starts on `world` ranks of one machine, in this folder."""
    place = RankPlace(rank=0, world=world, local_rank=0, local_world=world, starter="a test")
    return prepare(read(words)[0], place, Path("cache"), Screen(speaks=False), began_s=0.0), "cpu"


def several(place: RankPlace, store: Store, jobs: list[tuple[Any, ...]]) -> None:
    """Train each of `jobs`, (prepared inputs, type of device), in this rank."""
    for i, job in enumerate(jobs):
        loop.train(place, PrefixStore(str(i), store), *job)


def started(log: Path, words: list[str]) -> forked.Job:
    """Start `accordion *words` as a process of its own, which writes to `log`."""
    log.unlink(missing_ok=True)
    return forked.Job(forked.command, words, log)


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines]


def losses_of(run_dir: Path) -> list[float]:
    return losses(lines_of(run_dir))


def until(ready: Callable[[], bool], what: str, *logs: Path, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        written = "\n".join(log.read_text()[-3000:] for log in logs) if time.monotonic() > deadline else ""
        assert time.monotonic() < deadline, f"{what}: not in {timeout_s:.0f} s\n{written}"
        time.sleep(0.1)


def workers_of(agent: int) -> list[int]:
    """Return the process ids of the ranks that a torchrun agent started."""
    workers = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                environ = (entry / "environ").read_bytes().split(b"\0")
            except (OSError, IndexError):
                continue
            if ppid == agent and any(line.startswith(b"LOCAL_RANK=") for line in environ):
                workers.append(int(entry.name))
    return sorted(workers)
