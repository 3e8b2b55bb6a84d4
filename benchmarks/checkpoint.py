"""Time saving and loading a checkpoint, compared with torch's DCP, the disk's own speed, and a copy in memory."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from accordion import _torch
from accordion.bench import command
from accordion.bench.contenders import mesh_of
from accordion.checkpoint import load, save
from accordion.checkpoint.checksums import DIGITS, Buffer
from accordion.cli import main
from accordion.options import at_least, read
from accordion.pages.machine import describe
from accordion.pages.page import Page, Table, check_folder, spread
from accordion.pages.stats import extremes, ratio
from accordion.workers.ranks import RankSetup, WorkerTeam, interleaved

KINDS: Mapping[str, str] = {
    "accordion": "accordion.save and load, with a checksum of every byte that load verifies",
    "unsummed": "accordion without computing or verifying checksums, to see what they cost",
    "dcp": "torch.distributed.checkpoint: save, async_save, load",
    "disk": "the same bytes: write and fsync, read",
    "memory": "the same bytes: one copy into memory that is allocated already",
}
TENSOR_BYTES = 2**24


class CheckpointLoop:
    """One rank that saves and loads its shards of a model's state of `num_bytes`, as `kind`, a key of `KINDS`, does."""

    def __init__(self, setup: RankSetup, kind: str, num_bytes: int, folder: str) -> None:
        self._kind, self._folder, self._turn = kind, Path(folder) / kind, 0
        self._rank, mesh = setup.rank, mesh_of(setup)
        self._model = nn.Module()
        count = max(1, num_bytes // TENSOR_BYTES)
        rows = TENSOR_BYTES // 4 // 1024 // setup.num_ranks
        for i in range(count):
            local = torch.full((rows, 1024), float(i), device=setup.device)
            self._model.register_parameter(
                f"w{i}", nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
            )
        self._copy = torch.empty(0)

    def turn(self) -> dict[str, float]:
        """Save and load once, remove the files, and return seconds: of a "save", of the part of a background save for which a
        step waits ("block"), and of a "load". A kind that cannot do one of these leaves it out. Collective."""
        self._turn += 1
        path = self._folder / f"{self._turn}"
        if self._rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            os.sync()  # so that the disk has finished the writes and removals of the turn before
        times = {}
        work: dict[str, Callable[[Path], object]] = {
            name.removeprefix(f"_{self._kind}_"): getattr(self, name)
            for name in (f"_{self._kind}_{what}" for what in ("save", "block", "load"))
            if hasattr(self, name)
        }
        for what, do in work.items():
            if what == "load":
                _read_once(path, self._rank)
                _forget(path)
            dist.barrier()
            start = time.perf_counter()
            after = do(path)
            times[what] = time.perf_counter() - start
            if callable(after):
                after()
        dist.barrier()
        if self._rank == 0:
            shutil.rmtree(path)
        return times

    def _locals(self) -> list[Tensor]:
        return [_torch.local_of(p.detach()) for p in self._model.parameters()]

    def _accordion_save(self, path: Path) -> None:
        save(path / "a", self._model)

    def _accordion_block(self, path: Path) -> Callable[[], None]:
        return save(path / "b", self._model, background=True).wait

    def _accordion_load(self, path: Path) -> None:
        load(path / "a", self._model)

    def _unsummed_save(self, path: Path) -> None:
        with _without_sums():
            self._accordion_save(path)

    def _unsummed_load(self, path: Path) -> None:
        with _without_sums():
            self._accordion_load(path)

    def _dcp_save(self, path: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

        dcp_save(self._model.state_dict(), checkpoint_id=path / "a")

    def _dcp_block(self, path: Path) -> Callable[[], Any]:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        future: Any = async_save(self._model.state_dict(), checkpoint_id=path / "b")
        return lambda: future.result()

    def _dcp_load(self, path: Path) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

        dcp_load(self._model.state_dict(), checkpoint_id=path / "a")

    def _disk_save(self, path: Path) -> None:
        with open(path / f"{self._rank}.bin", "wb", buffering=0) as file:
            for tensor in self._locals():
                file.write(tensor.cpu().view(torch.uint8).numpy().data)
            os.fsync(file.fileno())

    def _disk_load(self, path: Path) -> None:
        with open(path / f"{self._rank}.bin", "rb", buffering=0) as file:
            for tensor in self._locals():
                file.readinto(tensor.cpu().view(torch.uint8).numpy().data)

    def _memory_block(self, path: Path) -> None:
        tensors = self._locals()
        into = self._copy.split([t.numel() for t in tensors]) if self._copy.numel() else [torch.empty(0)] * len(tensors)
        if not self._copy.numel():
            self._copy = torch.cat([t.flatten().cpu() for t in tensors])
            return
        for copy, tensor in zip(into, tensors, strict=True):
            copy.copy_(tensor.flatten())


@contextmanager
def _without_sums() -> Iterator[None]:
    """Context manager in which saves write a constant in place of checksums, and loads verify none; for this measurement only."""

    class Same:
        def __init__(self, kind: str) -> None:
            self.hexdigest = lambda: "0" * DIGITS[kind]

        def update(self, data: Buffer, /) -> None: ...

    with ExitStack() as stack:
        for name in ("writing", "reading"):
            module = import_module(f"accordion.checkpoint.{name}")
            stack.enter_context(patch.object(module, "running", lambda kind: partial(Same, kind)))
        stack.enter_context(patch.object(import_module("accordion.checkpoint.load"), "_check", lambda *_: None))
        yield


def _read_once(path: Path, rank: int) -> None:
    """On rank 0 read the files below `path`, so that the timed load is not their first reading; on other ranks do nothing.

    On a virtual disk, the first reading of a file took up to 2.2 times as long as a later one, even a minute later. So the
    first reading would compare ways of writing, not of reading.
    """
    if rank == 0:
        buffer = memoryview(bytearray(TENSOR_BYTES))
        for name in sorted(path.rglob("*")):
            if name.is_file():
                with open(name, "rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass


def _forget(path: Path) -> None:
    """Drop the files below `path` from the page cache, so that a load reads the disk. Does nothing unless on Linux."""
    with suppress(AttributeError):  # Linux only
        for file in path.rglob("*"):
            if file.is_file():
                handle = os.open(file, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)


def page_of(turns: Mapping[str, list[list[dict[str, float]]]], what: str, machine: dict[str, Any]) -> Page:
    """Return the result page. `turns`: kind -> [round][rank] result of `CheckpointLoop.turn`. The time of a round is that of its
    slowest rank; the first round is left out. `what`: first note. `machine`: from `describe`."""
    times = {
        kind: {name: [max(rank[name] for rank in ranks) for ranks in rounds[1:]] for name in rounds[0][0]}
        for kind, rounds in turns.items()
    }
    steps = {"save": "disk", "block": "memory", "load": "disk"}  # step -> kind that is its floor
    rows = [
        [kind, *(spread(extremes(seconds[name]), 1e3, 0) if name in seconds else "" for name in steps)]
        for kind, seconds in times.items()
    ]
    ours = times["accordion"]
    over = [
        [
            f"accordion / {kind}",
            *(_over(ours[name], times[kind].get(name), floor == kind) for name, floor in steps.items()),
        ]
        for kind in KINDS
        if kind != "accordion"
    ]
    return Page(
        name="checkpoint",
        notes=[
            what,
            "block: time that a step waits for a background save; the slowest rank; median (lowest-highest) of rounds",
            *(f"{kind}: {about}" for kind, about in KINDS.items()),
        ],
        tables=[
            Table(title="milliseconds", columns=["", *steps], rows=rows),
            Table(title="ratios, * to the floor", columns=["", *steps], rows=over),
        ],
        data={"times": times, "machine": machine},
    )


def _over(ours: list[float], theirs: list[float] | None, is_floor: bool) -> str:
    if theirs is None:
        return ""
    return spread(ratio([[s] for s in ours], [[s] for s in theirs]), 1, 2) + (" *" if is_floor else "")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure saving and loading a model's state, compared with torch's DCP, the disk and a copy in memory.

    Args:
        mib: MiB of state, over all ranks
        nproc: ranks on this machine
        device: auto (the accelerators of this machine, or CPU if there are none), cpu, or another device type
        rounds: turns of each, interleaved, after one that is not measured
        to: folder on the disk that is measured; its new files are removed afterwards
    """

    mib: int = at_least(16, 1024)
    nproc: int = at_least(1, 2)
    device: str = "auto"
    rounds: int = at_least(1, 5)
    to: str = "runs/bench/checkpoints"


def page(o: Options) -> Page:
    world = command.world_of(o.nproc, o.device)
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="bench-", dir=check_folder(Path(o.to))))
        teams = [
            stack.enter_context(WorkerTeam(kind, world, CheckpointLoop, (kind, o.mib * 2**20, folder)))
            for kind in KINDS
        ]
        turns = interleaved(teams, o.rounds + 1, "turn")
    what = f"{o.mib:,} MiB of float32 in shards of {world.num_ranks} ranks on {world.device_type}, to {Path(o.to).resolve()}"
    return page_of(turns, what, describe(world.device_type))


def run(words: list[str]) -> int:
    options = read(Options, words, "benchmarks/checkpoint.py", (Options.__doc__ or "").splitlines()[0])
    return 0 if options is None else command.measure(options, page)


if __name__ == "__main__":
    sys.exit(main(run=run))
