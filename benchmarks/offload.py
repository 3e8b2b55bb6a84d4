"""Compare training with offload to training without it, and to offload of FSDP2 and DeepSpeed: time, memory and disk traffic."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from ctypes.util import find_library
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accordion._torch import local_or_same
from accordion.bench import command
from accordion.bench.contenders import ENVIRON, Loop, Setting, blocks_of, deepspeed, fsdp2, mesh_of, optimizer_of
from accordion.bench.model import batch_of, shape_of
from accordion.bench.trainer import STATUS
from accordion.cli import main
from accordion.config import Offload, Precision
from accordion.errors import UsageError, nearest
from accordion.offload.arena import aligned_buffer
from accordion.offload.budget import estimate_memory
from accordion.offload.step.pipelines import NUM_BUFFERS
from accordion.offload.swap_file import FileRange, SwapFile
from accordion.offload.tiers import Tiers
from accordion.optimizers.wrap import wrap_optimizer
from accordion.options import read
from accordion.pages.machine import describe
from accordion.pages.page import Page, Table, mebi, spread
from accordion.pages.stats import Spread, extremes, flat, quartiles
from accordion.shard.api import shard
from accordion.state import sharded_engine, synchronize
from accordion.workers.ranks import BenchError, RankSetup, WorkerTeam, interleaved

OURS, HOST, DISK = "accordion", "accordion host", "accordion disk"
PEER, PEER_HOST = "fsdp2", "fsdp2 host"
DEEPSPEED_HOST, DEEPSPEED_DISK = "deepspeed host", "deepspeed disk"
PEERS = {"fsdp2": (PEER, PEER_HOST), "deepspeed": (DEEPSPEED_HOST, DEEPSPEED_DISK)}


class OffloadLoop:
    """One rank that trains with state on the device, the host or the disk. `kind`: engine and place, such as "fsdp2 host"."""

    def __init__(self, setup: RankSetup, kind: str, setting: Setting, folder: str) -> None:
        torch.manual_seed(setting.seed)
        shape = shape_of(setting.model)
        self._setup, self._setting, self._vocab, self._num_steps = setup, setting, shape.vocab, 0
        self._folder, self._ours, self._stated = folder, kind in (OURS, HOST, DISK), 0
        self._model = shape.make().to(setup.device).train()
        self._loop = self._build(kind)
        self._train(waits=True)  # the first step: there are no states on the disk to read
        self._before = self._num_steps, self._moved()

    def _build(self, kind: str) -> Loop:
        """Shard the model as `kind` says, and return its training loop."""
        setting = self._setting
        if kind in PEERS["deepspeed"]:
            place = {"device": "cpu"} if kind == DEEPSPEED_HOST else {"device": "nvme", "nvme_path": self._folder}
            zero = {"offload_param": {"device": "cpu"}, "offload_optimizer": place}
            return deepspeed(self._model, setting, zero, offloads=True)
        if kind == PEER:
            fsdp2(self._model, self._setup, setting.bf16)
        elif kind == PEER_HOST:
            _fsdp2_host(self._model, self._setup, setting.bf16)
        else:
            self._shard(kind)
        optimizer = optimizer_of(self._model.parameters(), setting)
        return Loop(self._model, wrap_optimizer(optimizer) if self._ours else optimizer, False, self._setup.device.type)

    def _shard(self, kind: str) -> None:
        places = {OURS: Offload(), HOST: Offload(params="host", optimizer="host")}
        offload = places.get(kind) or Offload(params="host", optimizer=f"disk:{self._folder}")
        precision = Precision(params=torch.bfloat16) if self._setting.bf16 else Precision()
        estimate = estimate_memory(self._model, offload, self._setup.num_ranks, precision=precision)
        self._stated = estimate.arena + estimate.host_buffers
        self._model = shard(self._model, mesh_of(self._setup), precision=precision, offload=offload)

    def _tiers(self) -> Tiers | None:
        tiers = sharded_engine(self._model, "bench").context.shard_buffers if self._ours else None
        return tiers if isinstance(tiers, Tiers) else None

    def _waited_s(self) -> float:
        tiers = self._tiers()
        return 0.0 if tiers is None else tiers.waited_s

    def _files(self) -> list[SwapFile]:
        tiers = self._tiers()
        return [] if tiers is None else [file for one in tiers.states.values() for file in one.files]

    def _moved(self) -> int:
        return sum(sum(file.traffic.values()) for file in self._files())

    def turns(self, warm: int, count: int) -> dict[str, Any]:
        """Time `count` steps whose optimizer ends during the next forward ("deferred"), and `count` that wait for it ("waiting").

        "floor" in the result is the seconds that the disk needs to write and read the states.
        """
        turns = {"deferred": self.turn(warm, count, waits=False), "waiting": self.turn(warm, count, waits=True)}
        files = self._files()
        dist.barrier()
        return turns | {"floor": sum(floor_s(self._folder, f.num_bytes, self._block()) for f in files)}

    def turn(self, warm: int, count: int, *, waits: bool) -> list[dict[str, float]]:
        times = [self._train(waits=waits) for _ in range(warm + count)][warm:]
        if self._ours:
            synchronize(self._model)
        return times

    def _forward(self) -> Tensor:
        tokens, targets = batch_of(
            self._num_steps, self._setup.rank, (self._setting.batch, self._setting.seq), self._vocab
        )
        self._num_steps += 1
        return self._loop.forward(tokens.to(self._setup.device), targets.to(self._setup.device))

    def _train(self, *, waits: bool) -> dict[str, float]:
        """Run a step, and return a dict of seconds: the "step", its "optimizer" call, and "shown", that call plus waits in the
        forward and backward for the optimizer of the step before; and of the "loss". `waits`: let the call wait until the step
        has ended."""
        dist.barrier()
        start, waited = time.perf_counter(), self._waited_s()
        loss = self._forward()
        self._loop.backward(loss)
        middle, waited = time.perf_counter(), self._waited_s() - waited
        self._loop.step()
        if waits and self._ours:
            synchronize(self._model)
        end = time.perf_counter()
        return {"step": end - start, "optimizer": end - middle, "shown": end - middle + waited, "loss": float(loss)}

    def _block(self) -> int:
        """Return the largest number of bytes that one read or write of optimizer state has; 0 without state on disk."""
        tiers = self._tiers()
        blocks = [] if tiers is None else [block for one in tiers.states.values() for block in one.blocks]
        pairs = [(b, run) for b in blocks for run in b.runs.values() if isinstance(run, FileRange)]
        return max((min(b.max_numel, b.numel) * run.dtype.itemsize for b, run in pairs), default=0)

    def bytes(self) -> dict[str, int]:
        """Run one step, and return a dict of this rank's bytes: resident memory between steps ("own") and with gradients
        ("grads"), "states", on "disk", "moved" to and from the disk in all "steps" so far, "arena", "buffers", "stated" (their
        estimate before the run), "block"."""
        moved, steps = self._moved() - self._before[1], self._num_steps - self._before[0]
        at_rest = own_bytes()
        self._loop.backward(self._forward())
        with_gradients = own_bytes()
        self._loop.step()
        tiers = self._tiers()
        params = [p for p in self._model.parameters() if p.requires_grad]
        local = sum(_rows_of(p) for p in params)
        return {
            "own": at_rest,
            "grads": with_gradients,
            "states": 2 * 4 * local,
            "disk": sum(file.num_bytes for file in self._files()),
            "moved": moved,
            "arena": 0 if tiers is None else tiers.arena.num_bytes,
            "buffers": 0 if tiers is None else sum(one.buffer_bytes for one in tiers.states.values()),
            "stated": self._stated,
            "block": self._block(),
            "steps": steps,
        }


def _rows_of(param: nn.Parameter) -> int:
    """Return the number of elements of a parameter that this rank keeps."""
    whole: int | None = getattr(param, "ds_numel", None)  # DeepSpeed's parameters have no elements between uses
    return local_or_same(param).numel() if whole is None else -(-whole // dist.get_world_size())


def _fsdp2_host(model: nn.Module, setup: RankSetup, bf16: bool) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=setup.device.type != "cpu")}
    options |= {"mp_policy": policy} if bf16 else {}
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh_of(setup), **options)
    fully_shard(model, mesh=mesh_of(setup), **options)


def own_bytes() -> int:
    """Return the resident bytes of this process that no file backs, after freeing caches (Linux; 0 elsewhere)."""
    if not STATUS.exists():
        return 0
    # MKL caches 20 MiB for gpt-30m, of which 2 or 15 MiB are resident, depending on the pages that it got.
    with suppress(OSError, AttributeError):  # a build without MKL
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).mkl_serv_free_buffers()
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    lines = STATUS.read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def floor_s(folder: str, num_bytes: int, block: int) -> float:
    """Return the seconds to write a file of `num_bytes` and read it, sequentially, with as many requests as in a step.

    The file was written before, as in training, since a first write takes file systems twice as long. This is what fio does
    with `--rw=write` and `read`, `--direct=1`, `--bs=` the block and `--iodepth=4` on a file of an earlier run.
    """
    buffers = [aligned_buffer(block).zero_() for _ in range(NUM_BUFFERS)]
    file = SwapFile(Path(folder), num_bytes)

    def part(call: Any, which: int) -> None:
        for at in range(which * block, file.num_bytes, NUM_BUFFERS * block):
            call(at, buffers[which][: file.num_bytes - at])

    with ThreadPoolExecutor(NUM_BUFFERS) as pool:
        list(pool.map(part, [file.write] * NUM_BUFFERS, range(NUM_BUFFERS)))
        start = time.perf_counter()
        for call in (file.write, file.read):
            list(pool.map(part, [call] * NUM_BUFFERS, range(NUM_BUFFERS)))
        return time.perf_counter() - start


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadResult:
    """Figures of one kind. Seconds are those of the slowest rank of each step; bytes those of the first rank.

    `waiting`: a step that ends before the next forward begins; `optimizer`: its optimizer part. `shown`: time of an ordinary
    step in the optimizer's call and in waits of the next forward; `hidden`: the share of `optimizer` that is not shown.
    `gained`: share of `optimizer` by which a step is shorter than a waiting one. `disk_rate`: over sequential access.
    """

    step: Spread
    waiting: Spread
    optimizer: Spread
    shown: Spread
    hidden: Spread | None
    gained: Spread | None
    disk_rate: Spread | None
    bytes: Mapping[str, int]
    losses: Sequence[float]


def measured(turns: list[list[dict[str, Any]]], num_bytes: Mapping[str, int]) -> OffloadResult:
    """Return the figures of one kind. `turns`: [round][rank] results of `OffloadLoop.turns`. `num_bytes`: result of `bytes`."""

    def slowest(turn: str, key: str) -> list[list[float]]:
        return [
            [max(rank[key] for rank in step) for step in zip(*(r[turn] for r in one), strict=True)] for one in turns
        ]

    steps, shown = slowest("deferred", "step"), slowest("deferred", "shown")
    waits, optimizer = slowest("waiting", "step"), slowest("waiting", "optimizer")
    hidden = [1 - median(a) / median(b) for a, b in zip(shown, optimizer, strict=True)]
    gained = [(median(w) - median(s)) / median(o) for s, w, o in zip(steps, waits, optimizer, strict=True)]
    floors = [max(rank["floor"] for rank in one) for one in turns]
    return OffloadResult(
        step=quartiles(flat(steps)),
        waiting=quartiles(flat(waits)),
        optimizer=quartiles(flat(optimizer)),
        shown=quartiles(flat(shown)),
        hidden=extremes(hidden) if num_bytes["arena"] else None,
        gained=extremes(gained) if num_bytes["arena"] else None,
        disk_rate=extremes([f / median(o) for f, o in zip(floors, optimizer, strict=True)])
        if num_bytes["disk"]
        else None,
        bytes=num_bytes,
        losses=[step["loss"] for one in turns for step in one[0]["deferred"]],
    )


def kinds_of(against: str) -> tuple[list[str], dict[str, str]]:
    """Return (kinds to measure: ours, and those of the engines in `against`, a list with commas; kind that is left out ->
    reason). Raises `UsageError` for an unknown name."""
    kinds, left_out = [OURS, HOST, DISK], dict[str, str]()
    for name in filter(None, against.split(",")):
        if name not in PEERS:
            raise UsageError(f"the offload of {name!r} cannot be compared; {nearest(name, list(PEERS))}")
        for kind in PEERS[name]:
            reason = _missing(kind)
            kinds += [] if reason else [kind]
            left_out |= {kind: reason} if reason else {}
    return kinds, left_out


def _missing(kind: str) -> str:
    """Return why `kind` cannot run on this machine, or "" if it can."""
    if kind not in PEERS["deepspeed"]:
        return ""
    if find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    if kind == DEEPSPEED_DISK and find_library("aio") is None:
        return "libaio is not installed, which deepspeed needs to read and write"
    return ""


def check(results: Mapping[str, OffloadResult]) -> None:
    """Raise `BenchError` if losses of a kind differ from those of accordion without offload; for peers, by more than 0.1 %."""
    wanted = results[OURS].losses
    for name, m in results.items():
        exact = name in (HOST, DISK)
        wrong = (
            m.losses != wanted
            if exact
            else any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(m.losses, wanted, strict=True))
        )
        if wrong:
            raise BenchError(
                f"the losses of {name} differ from those of {OURS}, so nothing is compared: {m.losses}, {wanted}."
            )


def folder_of(asked: str) -> str:
    """Create the folder `asked` if it is missing, and return it."""
    os.makedirs(asked, exist_ok=True)
    return asked


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure training on CPU with the states on the host and on disk, compared with no offload and with the peers' offload.

    Args:
        against: peers whose offload is measured too, separated by commas: fsdp2, deepspeed; may be empty
        model: as for accordion bench
        nproc: number of CPU ranks
        batch: sequences per rank and step; 0: the model's default
        seq: tokens per sequence; 0: the model's default
        threads: threads per rank; 0: the cores divided by the ranks
        precision: fp32, or bf16 over fp32 parameters
        swap: folder for the states on disk
        rounds: turns of each, interleaved
        steps: measured steps per turn
    """

    against: str = ",".join(PEERS)
    model: str = "gpt-30m"
    nproc: int = 1
    batch: int = 0
    seq: int = 0
    threads: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    swap: str = "runs/bench/swap"
    rounds: int = 5
    steps: int = 5


def page(o: Options) -> Page:
    world, folder = command.world_of(o.nproc, "cpu"), folder_of(o.swap)
    setting = command.setting_of(o.model, o.batch, o.seq, bf16=o.precision == "bf16")
    world = replace(world, threads=o.threads or world.threads)
    kinds, left_out = kinds_of(o.against)
    with ExitStack() as stack:
        teams = []
        for kind in kinds:
            environ = ENVIRON.get(kind.partition(" ")[0])
            args = (kind, setting, folder)
            teams.append(stack.enter_context(WorkerTeam(kind, world, OffloadLoop, args, environ)))
        turns = interleaved(teams, o.rounds, "turns", 1, o.steps)
        num_bytes = {team.name: team.ask("bytes")[0] for team in teams}
    results = {name: measured(turns[name], num_bytes[name]) for name in num_bytes}
    check(results)
    what = (
        f"{o.model}, batch {setting.batch} x {setting.seq}, {'bf16 over fp32' if setting.bf16 else 'fp32'}, fused AdamW, "
        f"{world.num_ranks} ranks on CPU with {world.threads} threads each; {o.rounds} interleaved rounds"
    )
    what = "; ".join([what, *(f"{kind} is left out: {reason}" for kind, reason in left_out.items())])
    return of_offload(results, what, describe("cpu"))


def of_offload(results: Mapping[str, OffloadResult], what: str, machine: Mapping[str, str]) -> Page:
    plain = results[OURS].bytes["grads"]
    times, sizes, disks = [], [], []
    for name, m in results.items():
        shares = ["" if s is None else spread(s, 100, 0) for s in (m.hidden, m.gained)]
        times.append([name, *(spread(s, 1e3) for s in (m.step, m.waiting, m.optimizer, m.shown)), *shares])
        b = m.bytes
        saved = f"{100 * (plain - b['grads']) / b['states']:.1f}"
        sizes.append([name, *(mebi(b[key]) for key in ("own", "grads", "states", "stated", "arena", "buffers")), saved])
        if m.disk_rate is not None:
            moved, floor = b["moved"] / b["steps"], 2 * b["states"]
            cells = [mebi(b["disk"]), mebi(moved), f"{moved / floor:.3f}", f"{b['block'] / 1024:,.0f}"]
            disks.append([name, *cells, spread(m.disk_rate, 1, 2)])
    return Page(
        name="offload",
        notes=[
            what,
            "times: median (quartiles) of steps, ms, the slowest rank of each; waiting: the step ends before the next forward "
            "begins; optimizer: its part of that; shown: time that an ordinary step spends in the optimizer's call and waiting "
            "for it in the next forward",
            "hidden: the share of the optimizer that is not shown; gained: the share of the optimizer by which the ordinary step "
            "is shorter than the waiting one, which other work on the machine blurs; of rounds",
            "own: resident bytes of the first rank that no file backs, between steps, and with gradients; states: 2 an element; "
            "stated: arena and buffers, estimated before; saved: less than without offload, with gradients, in % of the states",
            "rate: the seconds of sequential access to write and read the states once, with as many requests of the same size in "
            "flight, over those of the optimizer in a waiting step",
        ],
        tables=[
            Table(
                title="time",
                columns=[
                    *("states", "step ms", "waiting ms", "optimizer ms", "shown ms", "hidden %", "gained %"),
                ],
                rows=times,
            ),
            Table(
                title="memory per rank, MiB",
                columns=[
                    *("states", "own", "with gradients", "of states", "stated", "arena", "buffers", "saved %"),
                ],
                rows=sizes,
            ),
            Table(
                title="the disk of a rank, MiB",
                columns=["states", "on disk", "moved in a step", "of the floor", "block KiB", "rate"],
                rows=disks,
            ),
        ],
        data={"machine": machine, "found": results},
    )


def run(words: list[str]) -> int:
    options = read(Options, words, "benchmarks/offload.py", (Options.__doc__ or "").splitlines()[0])
    return 0 if options is None else command.measure(options, page)


if __name__ == "__main__":
    sys.exit(main(run=run))
