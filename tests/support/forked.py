"""Ranks of `accordion train`, and other commands, as forks of the tests' fork server, which saves seconds of imports."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import run
from torch.distributed.launcher.api import LaunchConfig

from accordion import cli
from accordion.train import launch
from tests import pool

# TensorBoard takes longer to import than a small run takes for all else: one run of each kind has it.
UNTRACKED = ["--log.tensorboard", "false"]
PLACE = launch.RankPlace(rank=0, world=2, local_rank=0, local_world=2, starter="a test")  # of two ranks


@contextlib.contextmanager
def commands_in(folder: Path) -> Iterator[None]:
    """Context manager in which the working directory is `folder`, with a cache folder in it, and commands that are run in this
    process start their ranks by `start` in place of `launch.start`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start", start)
        patch.setattr(sys, "path", list(sys.path))  # a command puts a task's folder there
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        yield


def start(entry: launch.Entry, args: tuple[Any, ...], nproc: int, signals: object = None) -> int:
    """Start `nproc` ranks of `entry` from the fork server, and return the exit code: a replacement for `launch.start`.

    Ranks have this process's environment, and their output is written here when they have ended. The first rank that fails ends
    the others. `signals` is ignored.
    """
    return _started(launch.guarded, (entry, *args), nproc, grace_s=0.0)


def under_torchrun(words: list[str], nproc: int, command: Callable[[list[str]], None] | None = None) -> int:
    """Run ranks with the environment of `torchrun --nproc-per-node nproc -m accordion *words`, and return the exit code.

    If a rank fails, the others have 60 s to end by themselves, so that their output is complete. `command`: function of a module
    that each rank calls with `words` in place of the command line.
    """
    return _started(command or _command, (words,), nproc, grace_s=60.0)


def script_under_torchrun(path: Path, nproc: int, *words: str) -> int:
    """Run ranks with the environment of `torchrun --nproc-per-node nproc path *words`, and return the exit code."""
    return under_torchrun([str(path), *words], nproc, _script)


class Job:
    """A new process, from the fork server, that leads its own session. As a context manager it kills the process at the end."""

    def __init__(self, run: Callable[[list[str]], None], words: list[str], out: Path, err: Path | None = None) -> None:
        """Start the process, which calls `run(words)` in this folder and environment. `run`: a function of a module. `out`: the
        file for its stdout. `err`: that for its stderr; None: the same file."""
        args = (run, words, dict(os.environ), os.getcwd(), (str(out), str(err or out)))
        self._process = pool.fork_context().Process(target=_own, args=args)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout_s: float = 300.0) -> int:
        """Wait until the process has ended, and return its exit code; -n if signal n ended it. Fails after `timeout_s`."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"it runs on after {timeout_s} s"
        return self._process.exitcode

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()


def _own(
    run: Callable[[list[str]], None], words: list[str], environ: dict[str, str], folder: str, outputs: tuple[str, str]
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    with open(1, "w", closefd=False) as sys.stdout, open(2, "w", buffering=1, closefd=False) as sys.stderr:
        run(words)


def config_of(start_method: str) -> type[LaunchConfig]:
    """Return a configuration class of torch's launcher with which it starts ranks by `start_method`."""

    class Config(LaunchConfig):
        def __init__(self, **given: Any) -> None:
            super().__init__(**{**given, "start_method": start_method})

    return Config


def command(words: list[str]) -> None:
    """Run `accordion *words` in this process and exit with its code. Its ranks are forks of this process, which saves imports."""
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # else tokenizers warns of ranks that are forked from where it was used
    )
    launch.LaunchConfig = config_of("fork")  # type: ignore[misc]
    sys.exit(cli.main(words))


def torchrun(words: list[str]) -> None:
    """Run torchrun with the arguments `words` in this process. Its ranks are new programs."""
    run.main(words)


def script(words: list[str]) -> None:
    """Run `python *words` in this process: the script `words[0]`."""
    sys.path.insert(0, str(Path(words[0]).parent))
    _script(words)


def _script(words: list[str]) -> None:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    if (
        torch.accelerator.is_available()
    ):  # a process that is forked for it ends without what a script's own end waits for
        torch.accelerator.synchronize()


def _command(words: list[str]) -> None:
    sys.exit(cli.main(words))


def _started(run: Callable[..., None], args: tuple[Any, ...], nproc: int, *, grace_s: float) -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    common |= {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
    context, ranks = pool.fork_context(), []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(nproc):
            environ = {
                **os.environ,
                **{key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()},
            }
            job = {"target": _rank, "args": (environ, folder, run, args), "name": f"forked rank {rank}"}
            ranks.append(context.Process(**job, daemon=True))
            ranks[-1].start()
        running, patience_s = {rank.sentinel: rank for rank in ranks}, None
        while running:
            found = wait(list(running), patience_s)
            for ended in found:
                rank = running.pop(ended)
                rank.join()
                patience_s = grace_s if rank.exitcode else patience_s
            if not found:
                for other in running.values():
                    other.kill()
                patience_s = None
        _tell(folder)
    return max(abs(rank.exitcode or 0) for rank in ranks)


def _rank(environ: dict[str, str], folder: str, run: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    _write_into(folder)
    run(*args)
    sys.stdout.flush()
    sys.stderr.flush()


def launched(entry: launch.Entry, args: tuple[Any, ...], nproc: int) -> int:
    """Run the real `launch.start` with torch's launcher, but take ranks from the fork server. Return the exit code, after
    writing the ranks' output here."""
    pool.fork_context()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "LaunchConfig", config_of("forkserver"))
        code = launch.start(_heard, (folder, entry, *args), nproc)
        _tell(folder)
    return code


def _heard(place: launch.RankPlace, store: dist.Store, folder: str, entry: launch.Entry, *args: Any) -> int | None:
    _write_into(folder)
    return entry(place, store, *args)


def _write_into(folder: str) -> None:
    """Redirect stdout and stderr of this process to the files "out" and "err" in `folder`, to which all ranks append."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)


def _tell(folder: str) -> None:
    for number, name, stream in ((1, "out", sys.stdout), (2, "err", sys.stderr)):
        stream.flush()
        if (file := Path(folder, name)).exists():
            os.write(number, file.read_bytes())
