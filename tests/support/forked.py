"""Ranks of `accordion train` from the tests' fork server, which has imported what else each of them imports for seconds."""

from __future__ import annotations

import os
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accordion.train import launch
from tests import pool

# Plotly takes more of the processor for a report than a small run does for all else: one run of each kind draws one.
NO_REPORT = ["--run.report", "false"]


def start(entry: launch.Entry, args: tuple[Any, ...], nproc: int) -> int:
    """Takes the place of `launch.start` where that is not what is tested; the exit code.

    Ranks have this process's environment, and what they write is written here once they have ended; the first that fails
    ends the others.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    job |= {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
    context, ranks = pool.fork_context(), []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(nproc):
            environ = {
                **os.environ,
                **{key: str(value) for key, value in {**job, "RANK": rank, "LOCAL_RANK": rank}.items()},
            }
            ranks.append(context.Process(target=_rank, args=(environ, folder, entry, args), daemon=True))
            ranks[-1].start()
        running = {rank.sentinel: rank for rank in ranks}
        while running:
            for ended in wait(list(running)):
                rank = running.pop(ended)
                rank.join()
                if rank.exitcode:
                    for other in running.values():
                        other.kill()
        for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
            stream.flush()
            os.write(1 if name == "out" else 2, Path(folder, name).read_bytes())
    return max(abs(rank.exitcode or 0) for rank in ranks)


def _rank(environ: dict[str, str], folder: str, entry: launch.Entry, args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    launch.guarded(entry, *args)
    sys.stdout.flush()
    sys.stderr.flush()
