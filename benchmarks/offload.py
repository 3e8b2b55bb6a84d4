"""Offload beside none and beside the peers': time, memory, what the disk carries, and how much of the optimizer is hidden."""

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

from accordion.bench import command
from accordion.bench.contenders import ENVIRON, Loop, Setting, blocks_of, deepspeed, fsdp2, mesh_of, optimizer_of
from accordion.bench.model import batch_of, shape_of
from accordion.bench.trainer import STATUS
from accordion.cli import main
from accordion.config import Offload, Precision
from accordion.errors import UsageError, nearest
from accordion.offload.estimate import estimate_memory
from accordion.offload.step.optimizer_copy import local_of
from accordion.offload.step.pipelines import NUM_BUFFERS
from accordion.offload.swap_file import SwapFile, aligned_buffer
from accordion.offload.tiers import Tiers
from accordion.optim import wrap_optimizer
from accordion.options import read
from accordion.pages.machine import describe
from accordion.pages.page import Page, Table, mebi, spread
from accordion.pages.stats import Spread, extremes, flat, quartiles
from accordion.shard.api import shard
from accordion.state import sharded_engine, synchronize
from accordion.workers.ranks import BenchError, Seat, WorkerTeam, interleaved

OURS, HOST, DISK = "accordion", "accordion host", "accordion disk"
PEER, PEER_HOST = "fsdp2", "fsdp2 host"
DEEPSPEED_HOST, DEEPSPEED_DISK = "deepspeed host", "deepspeed disk"
PEERS = {"fsdp2": (PEER, PEER_HOST), "deepspeed": (DEEPSPEED_HOST, DEEPSPEED_DISK)}


class OffloadLoop:
    """One rank that trains with its states in one place."""

    def __init__(self, seat: Seat, kind: str, setting: Setting, folder: str) -> None:
        torch.manual_seed(setting.seed)
        shape = shape_of(setting.model)
        self._seat, self._setting, self._vocab, self._num_steps = seat, setting, shape.vocab, 0
        self._folder, self._ours, self._stated = folder, kind in (OURS, HOST, DISK), 0
        self._model = shape.make().to(seat.device).train()
        self._loop = self._made(kind)
        self._train(waits=True)  # reads no states from the disk: there are none
        self._before = self._num_steps, self._moved()  # is not counted

    def _made(self, kind: str) -> Loop:
        """Shards the model under `kind`."""
        setting = self._setting
        if kind in PEERS["deepspeed"]:
            place = {"device": "cpu"} if kind == DEEPSPEED_HOST else {"device": "nvme", "nvme_path": self._folder}
            zero = {"offload_param": {"device": "cpu"}, "offload_optimizer": place}
            return deepspeed(self._model, setting, zero, offloads=True)
        if kind == PEER:
            fsdp2(self._model, self._seat, setting.bf16)
        elif kind == PEER_HOST:
            _fsdp2_host(self._model, self._seat, setting.bf16)
        else:
            self._shard(kind)
        optimizer = optimizer_of(self._model.parameters(), setting)
        return Loop(self._model, wrap_optimizer(optimizer) if self._ours else optimizer, False, self._seat.device.type)

    def _shard(self, kind: str) -> None:
        places = {OURS: Offload(), HOST: Offload(params="host", optimizer="host")}
        offload = places.get(kind) or Offload(params="host", optimizer=f"disk:{self._folder}")
        precision = Precision(params=torch.bfloat16) if self._setting.bf16 else Precision()
        said = estimate_memory(self._model, offload, self._seat.num_ranks, precision=precision)
        self._stated = said.arena + said.host_buffers
        self._model = shard(self._model, mesh_of(self._seat), precision=precision, offload=offload)

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
        """Steps that end behind the next forward, and close to them in time steps that end before it, and the disk's speed."""
        found = {"deferred": self.turn(warm, count, waits=False), "waiting": self.turn(warm, count, waits=True)}
        files = self._files()
        dist.barrier()
        return found | {"floor": sum(floor_s(self._folder, f.num_bytes, self._block()) for f in files)}

    def turn(self, warm: int, count: int, *, waits: bool) -> list[dict[str, float]]:
        found = [self._train(waits=waits) for _ in range(warm + count)][warm:]
        if self._ours:
            synchronize(self._model)
        return found

    def _forward(self) -> Tensor:
        tokens, targets = batch_of(
            self._num_steps, self._seat.rank, (self._setting.batch, self._setting.seq), self._vocab
        )
        self._num_steps += 1
        return self._loop.forward(tokens.to(self._seat.device), targets.to(self._seat.device))

    def _train(self, *, waits: bool) -> dict[str, float]:
        """Seconds of a step, of `optimizer` in it, and of what of that is `shown`: the call, and waits for the step before."""
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
        """Bytes that are read or written at a time, at most."""
        tiers = self._tiers()
        return 0 if tiers is None else max((one.block_bytes for one in tiers.states.values()), default=0)

    def bytes(self) -> dict[str, int]:
        """Of this rank: memory that is the process's own, the disk's traffic so far, and what was stated before."""
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
    """Elements of this rank."""
    whole: int | None = getattr(param, "ds_numel", None)  # of DeepSpeed's, which show none
    return local_of(param).numel() if whole is None else -(-whole // dist.get_world_size())


def _fsdp2_host(model: nn.Module, seat: Seat, bf16: bool) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=seat.device.type != "cpu")}
    options |= {"mp_policy": policy} if bf16 else {}
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh_of(seat), **options)
    fully_shard(model, mesh=mesh_of(seat), **options)


def own_bytes() -> int:
    """Resident bytes of this process that no file backs, once what is free is given back (Linux; 0 elsewhere)."""
    if not STATUS.exists():
        return 0
    # Of 20 MiB that MKL keeps for gpt-30m, 2 or 15 are resident, as the pages that it got were.
    with suppress(OSError, AttributeError):  # a build without MKL
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).mkl_serv_free_buffers()
    with suppress(OSError, AttributeError):  # of another C library
        ctypes.CDLL(None).malloc_trim(0)
    lines = STATUS.read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def floor_s(folder: str, num_bytes: int, block: int) -> float:
    """Seconds to write a file like that of the states from one end to the other, and to read it so.

    As many requests in flight, and as large, as in a step, and as there over what was written before, which takes file systems
    half of the time of a first write: what fio does with `--rw=write` and `read`, `--direct=1`, `--bs=` the block and
    `--iodepth=4` on a file of an earlier run.
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
    """One kind. Seconds are of the slowest rank of each step; bytes of the first rank.

    `waiting`: a step that ends before the next forward begins. `optimizer`: of it, what the optimizer takes. `shown`: what an
    ordinary step stands still for it: its call, and waits of the next forward. `hidden`: the share of the optimizer that it
    does not. `gained`: the share by which the step is shorter than the waiting one. `disk_rate`: of sequential access.
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


def measured(asked: list[list[dict[str, Any]]], held: Mapping[str, int]) -> OffloadResult:
    """`asked`: what `turns` gave, by round and rank."""

    def slowest(turn: str, key: str) -> list[list[float]]:
        return [
            [max(rank[key] for rank in step) for step in zip(*(r[turn] for r in one), strict=True)] for one in asked
        ]

    steps, shown = slowest("deferred", "step"), slowest("deferred", "shown")
    waits, optimizer = slowest("waiting", "step"), slowest("waiting", "optimizer")
    hidden = [1 - median(a) / median(b) for a, b in zip(shown, optimizer, strict=True)]
    gained = [(median(w) - median(s)) / median(o) for s, w, o in zip(steps, waits, optimizer, strict=True)]
    floors = [max(rank["floor"] for rank in one) for one in asked]
    return OffloadResult(
        step=quartiles(flat(steps)),
        waiting=quartiles(flat(waits)),
        optimizer=quartiles(flat(optimizer)),
        shown=quartiles(flat(shown)),
        hidden=extremes(hidden) if held["arena"] else None,
        gained=extremes(gained) if held["arena"] else None,
        disk_rate=extremes([f / median(o) for f, o in zip(floors, optimizer, strict=True)]) if held["disk"] else None,
        bytes=held,
        losses=[step["loss"] for one in asked for step in one[0]["deferred"]],
    )


def kinds_of(against: str) -> tuple[list[str], dict[str, str]]:
    """The kinds to measure in order, and those that are left out with the reason. Raises `UsageError` for unknown names."""
    kinds, left_out = [OURS, HOST, DISK], dict[str, str]()
    for name in filter(None, against.split(",")):
        if name not in PEERS:
            raise UsageError(f"contender {name!r} has no offload to compare; {nearest(name, list(PEERS))}")
        for kind in PEERS[name]:
            reason = _missing(kind)
            kinds += [] if reason else [kind]
            left_out |= {kind: reason} if reason else {}
    return kinds, left_out


def _missing(kind: str) -> str:
    """What a kind lacks here; empty where it can run."""
    if kind not in PEERS["deepspeed"]:
        return ""
    if find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    if kind == DEEPSPEED_DISK and find_library("aio") is None:
        return "libaio is not installed, with which deepspeed reads and writes"
    return ""


def check(found: Mapping[str, OffloadResult]) -> None:
    """Raise `BenchError` where a place has changed what is trained."""
    wanted = found[OURS].losses
    for name, m in found.items():
        exact = name in (HOST, DISK)
        wrong = (
            m.losses != wanted
            if exact
            else any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(m.losses, wanted, strict=True))
        )
        if wrong:
            raise BenchError(
                f"the losses of {name} are not those of {OURS}, so nothing is compared: {m.losses}, {wanted}."
            )


def folder_of(asked: str) -> str:
    """Where states on disk go: what was asked for, made where it is missing."""
    os.makedirs(asked, exist_ok=True)
    return asked


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure training with the states on the host and on disk, beside none of that and beside the peers' offload, on CPU.

    Args:
        against: whose offload is measured too, separated by commas: fsdp2, deepspeed; empty for nobody's
        model: as of accordion bench
        nproc: ranks, on CPU
        batch: sequences of one rank in a step; 0: what suits the model
        seq: tokens in a sequence; 0: what suits the model
        threads: of each rank; 0: the cores, shared out
        precision: fp32, or bf16 over fp32 parameters
        swap: folder for the states on disk
        rounds: turns of each, interleaved
        steps: counted steps of a turn
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
        asked = interleaved(teams, o.rounds, "turns", 1, o.steps)
        held = {team.name: team.ask("bytes")[0] for team in teams}
    found = {name: measured(asked[name], held[name]) for name in held}
    check(found)
    what = (
        f"{o.model}, batch {setting.batch} x {setting.seq}, {'bf16 over fp32' if setting.bf16 else 'fp32'}, fused AdamW, "
        f"{world.num_ranks} ranks on CPU with {world.threads} threads each; {o.rounds} interleaved rounds"
    )
    what = "; ".join([what, *(f"{kind} is left out: {reason}" for kind, reason in left_out.items())])
    return of_offload(found, what, describe("cpu"))


def of_offload(found: Mapping[str, OffloadResult], what: str, machine: Mapping[str, str]) -> Page:
    plain = found[OURS].bytes["grads"]
    times, sizes, disks = [], [], []
    for name, m in found.items():
        shares = ["" if s is None else spread(s, 100, 0) for s in (m.hidden, m.gained)]
        times.append([name, *(spread(s, 1e3) for s in (m.step, m.waiting, m.optimizer, m.shown)), *shares])
        b = m.bytes
        falls = f"{100 * (plain - b['grads']) / b['states']:.1f}"
        sizes.append([name, *(mebi(b[key]) for key in ("own", "grads", "states", "stated", "arena", "buffers")), falls])
        if m.disk_rate is not None:
            moved, floor = b["moved"] / b["steps"], 2 * b["states"]
            cells = [mebi(b["disk"]), mebi(moved), f"{moved / floor:.3f}", f"{b['block'] / 1024:,.0f}"]
            disks.append([name, *cells, spread(m.disk_rate, 1, 2)])
    return Page(
        name="offload",
        notes=[
            what,
            "times: median (quartiles) of steps, ms, the slowest rank of each; waiting: the step ends before the next forward "
            "begins; optimizer: its part of that; shown: what an ordinary step stands still for it, in the call and where the "
            "next forward waits",
            "hidden: the share of the optimizer that is not shown; gained: the share by which the ordinary step is shorter than "
            "the waiting one, which other work on the machine blurs; of rounds",
            "own: resident bytes of the first rank that no file backs, at rest and when its gradients are there; states: two of "
            "each element; stated: arena and buffers, said before the run; falls: what is less than without offload with "
            "gradients there, % of the states",
            "rate: the seconds that sequential access takes to write and to read the states once, with as many requests of the "
            "same size in flight, over those of the optimizer in a waiting step",
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
                title="bytes of a rank, MiB",
                columns=[
                    *("states", "own", "with gradients", "of states", "stated", "arena", "buffers", "falls"),
                ],
                rows=sizes,
            ),
            Table(
                title="the disk of a rank, MiB",
                columns=["states", "on disk", "moved in a step", "of the floor", "block KiB", "rate"],
                rows=disks,
            ),
        ],
        data={"machine": machine, "found": found},
    )


def run(words: list[str]) -> int:
    options = read(Options, words, "benchmarks/offload.py", (Options.__doc__ or "").splitlines()[0])
    return 0 if options is None else command.measure(options, page)


if __name__ == "__main__":
    sys.exit(main(run=run))
