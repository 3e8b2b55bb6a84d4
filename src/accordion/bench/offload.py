"""Offload beside none and beside FSDP2's: time, memory, what the disk carries, and how much of the step is hidden."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accordion.bench.contenders import Setting, blocks_of, fsdp2, mesh_of, optimizer_of
from accordion.bench.model import batch_of, loss_of, shape_of
from accordion.bench.ranks import BenchError, Seat
from accordion.bench.stats import Spread, extremes, flat, quartiles
from accordion.bench.trainer import STATUS
from accordion.config import Offload, Precision
from accordion.memory.disk import SwapFile, aligned_buffer
from accordion.memory.entries import local_of
from accordion.memory.pieces import PIECE_NUMEL
from accordion.memory.tiers import Tiers
from accordion.optim import wrap_optimizer
from accordion.shard import shard
from accordion.state import sharded_engine, synchronize

OURS, HOST, DISK = "accordion", "accordion host", "accordion disk"
PEER, PEER_HOST = "fsdp2", "fsdp2 host"
KINDS = (OURS, HOST, DISK, PEER, PEER_HOST)


class OffloadLoop:
    """One rank that trains with its states in one place. `waits`: its step ends before the next forward begins."""

    def __init__(self, seat: Seat, kind: str, setting: Setting, folder: str) -> None:
        torch.manual_seed(setting.seed)
        shape = shape_of(setting.model)
        self._seat, self._setting, self._vocab, self._num_steps = seat, setting, shape.vocab, 0
        model = shape.make().to(seat.device).train()
        self._ours = kind in (OURS, HOST, DISK)
        self._model = self._sharded(model, kind, folder) if self._ours else _peer(model, seat, setting.bf16, kind)
        self._optimizer = optimizer_of(self._model.parameters(), setting)
        if self._ours:
            self._optimizer = wrap_optimizer(self._optimizer)

    def _sharded(self, model: nn.Module, kind: str, folder: str) -> nn.Module:
        places = {OURS: Offload(), HOST: Offload(params="host", optimizer="host")}
        offload = places.get(kind) or Offload(params="host", optimizer=f"disk:{folder}")
        precision = Precision(params=torch.bfloat16) if self._setting.bf16 else Precision()
        return shard(model, mesh_of(self._seat), precision=precision, offload=offload)

    def turns(self, warm: int, count: int) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        """Steps that end behind the next forward, and close to them in time steps that end before it."""
        return self.turn(warm, count, waits=False), self.turn(warm, count, waits=True)

    def turn(self, warm: int, count: int, *, waits: bool) -> list[dict[str, float]]:
        """Seconds of each step and of what of it the optimizer took, from one call of it to the next; the loss."""
        found = []
        for _ in range(warm + count):
            tokens, targets = batch_of(
                self._num_steps, self._seat.rank, (self._setting.batch, self._setting.seq), self._vocab
            )
            self._num_steps += 1
            dist.barrier()
            start = time.perf_counter()
            loss = loss_of(self._model(tokens.to(self._seat.device)), targets.to(self._seat.device))
            loss.backward()
            middle = time.perf_counter()
            self._optimizer.step()
            self._optimizer.zero_grad()
            if waits and self._ours:
                synchronize(self._model)
            end = time.perf_counter()
            found.append({"step": end - start, "optimizer": end - middle, "loss": float(loss)})
        if self._ours:
            synchronize(self._model)
        return found[warm:]

    def bytes(self) -> dict[str, int]:
        """Of this rank: memory that is the process's own at rest, the disk's traffic so far, and what was stated before."""
        tiers = sharded_engine(self._model, "bench").wiring.home if self._ours else None
        states = list(tiers.states.values()) if isinstance(tiers, Tiers) else []
        files = [file for one in states for file in one.files]
        params = [p for p in self._model.parameters() if p.requires_grad]
        local = sum(local_of(p).numel() for p in params)
        return {
            "own": own_bytes(),
            "states": 2 * 4 * local,
            "disk": sum(file.num_bytes for file in files),
            "moved": sum(sum(file.traffic.values()) for file in files),
            "arena": tiers.arena.num_bytes if isinstance(tiers, Tiers) else 0,
            "buffers": sum(one.buffer_bytes for one in states),
            "steps": self._num_steps,
        }


def _peer(model: nn.Module, seat: Seat, bf16: bool, kind: str) -> nn.Module:
    if kind == PEER:
        return fsdp2(model, seat, bf16)
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=seat.device.type != "cpu")}
    options |= {"mp_policy": policy} if bf16 else {}
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh_of(seat), **options)
    fully_shard(model, mesh=mesh_of(seat), **options)
    return model


def own_bytes() -> int:
    """Resident bytes of this process that no file backs, once what is free is given back (Linux; 0 elsewhere)."""
    if not STATUS.exists():
        return 0
    with contextlib.suppress(OSError, AttributeError):  # of another C library
        ctypes.CDLL(None).malloc_trim(0)
    lines = STATUS.read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential:
    """Bytes a second that a folder's disk reads and writes one after the other, in blocks like those of a step."""

    read: float
    written: float

    def seconds(self, num_bytes: int) -> float:
        """To read and to write so many, each once."""
        return num_bytes / self.read + num_bytes / self.written


def sequential(folder: str, num_bytes: int = 2**28) -> Sequential:
    """Measured now, by one thread, on a file like those of states."""
    block = aligned_buffer(4 * PIECE_NUMEL).zero_()
    file = SwapFile(Path(folder), num_bytes)
    speeds = []
    for call in (file.write, file.read):
        start = time.perf_counter()
        for at in range(0, num_bytes, block.numel()):
            call(at, block)
        speeds.append(num_bytes / (time.perf_counter() - start))
    return Sequential(read=speeds[1], written=speeds[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One kind. Seconds are of the slowest rank of each step; bytes of the first rank.

    `waiting`: a step that ends before the next forward begins. `optimizer`: of it, what the optimizer takes. `hidden`: the
    share of that which the ordinary step does not show.
    """

    step: Spread
    waiting: Spread
    optimizer: Spread
    hidden: Spread | None
    bytes: Mapping[str, int]
    losses: Sequence[float]


def measured(
    asked: list[list[tuple[list[dict[str, float]], list[dict[str, float]]]]], held: Mapping[str, int]
) -> Measured:
    """`asked`: what `turns` gave, by round and rank."""
    deferred, waiting = ([[rank[i] for rank in one] for one in asked] for i in range(2))
    steps, waits, optimizer = (
        [[max(rank[key] for rank in step) for step in zip(*one, strict=True)] for one in rounds]
        for rounds, key in ((deferred, "step"), (waiting, "step"), (waiting, "optimizer"))
    )
    shares = [(median(w) - median(s)) / median(o) for s, w, o in zip(steps, waits, optimizer, strict=True)]
    return Measured(
        step=quartiles(flat(steps)),
        waiting=quartiles(flat(waits)),
        optimizer=quartiles(flat(optimizer)),
        hidden=extremes(shares) if held["arena"] else None,
        bytes=held,
        losses=[step["loss"] for one in deferred for step in one[0]],
    )


def check(found: Mapping[str, Measured]) -> None:
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
