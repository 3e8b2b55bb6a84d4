"""One rank of `accordion bench`: it trains under one contender, and measures a turn when the parent asks."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accordion.bench.contenders import Loop, Setting, loop_of
from accordion.bench.meters import Allocations, Wire
from accordion.bench.model import batches_of, shape_of
from accordion.train.batches import on_device
from accordion.workers.ranks import Seat

STATUS = Path("/proc/self/status")
MATMUL_ROWS = {"cpu": 1024}  # of others 8192
Times = dict[str, float]


class Clock:
    """Marks of one step: host time, and on an accelerator the device's own, read after the turn."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._host, self._cpu, self._events = device, list[float](), list[float](), list[Any]()

    def mark(self) -> None:
        self._host.append(time.perf_counter())
        self._cpu.append(time.process_time())
        if self._device.type != "cpu":
            event = torch.Event(device=self._device, enable_timing=True)
            event.record()
            self._events.append(event)

    def times(self) -> Times:
        """Seconds of forward, backward and optimizer, of the whole step, until the host was through with it; CPU seconds."""
        marks = [self._events[0].elapsed_time(e) / 1e3 for e in self._events] if self._events else self._host
        parts = [b - a for a, b in pairwise(marks)]
        return {
            **dict(zip(("forward", "backward", "optimizer"), parts, strict=True)),
            "step": marks[-1] - marks[0],
            "host": self._host[-1] - self._host[0],
            "cpu": self._cpu[-1] - self._cpu[0],
        }


class Trainer:
    """Owns the model, the optimizer and the meter of memory of one rank of one contender."""

    def __init__(
        self, seat: Seat, build: Callable[[], Loop], batches: Iterator[tuple[Any, ...]], *, bf16: bool = False
    ) -> None:
        """`build` makes the model and its loop. `batches`: the arguments of each forward of this rank. `bf16`: of products."""
        self._device, self._batches, self._bf16 = seat.device, batches, bf16
        self._num_steps = 0
        # Before the model: what is there already it cannot count.
        self._allocations = Allocations() if seat.device.type == "cpu" else None
        with self._allocations or nullcontext():
            self._loop = build()

    def _batch(self) -> tuple[Any, ...]:
        """Return the arguments of the next step's forward, on the device."""
        self._num_steps += 1
        return tuple(on_device(part, self._device) for part in next(self._batches))

    def _step(self, batch: tuple[Any, ...] | None = None) -> tuple[torch.Tensor, Clock]:
        batch = batch or self._batch()
        clock = Clock(self._device)
        clock.mark()
        loss = self._loop.forward(*batch)
        clock.mark()
        self._loop.backward(loss)
        clock.mark()
        self._loop.step()
        clock.mark()
        return loss.detach(), clock

    def losses(self, count: int) -> list[float]:
        """This rank's loss in each of the first steps."""
        with self._allocations or nullcontext():
            found = [float(self._step()[0]) for _ in range(count)]
        self._let_go()
        return found

    def turn(self, warm: int, count: int) -> list[Times]:
        """`warm` steps that are not counted, then the times of `count` steps.

        An accelerator is not waited for between them, as in a job that runs; host times are those of one more step, which it is.
        """
        batches = [self._batch() for _ in range(warm + count)]
        clocks = [self._step(batch)[1] for batch in batches][warm:]
        if self._device.type == "cpu":
            return [clock.times() for clock in clocks]
        self._synchronise()
        last = self._step()[1]
        self._let_go()
        host = {key: last.times()[key] for key in ("host", "cpu")}
        return [clock.times() | host for clock in clocks]

    def memory(self) -> dict[str, int]:
        """Bytes between steps, and the peaks in a step, of tensors and of what the process takes for them.

        On CPU tensors are the storages that operators made, the inside of operators and of the backend left out, and the
        process is its resident set.
        """
        if self._allocations is None:
            self._synchronise()
            memory = torch.accelerator.memory
            memory.reset_peak_memory_stats()
            rest = memory.memory_allocated()
            self._step()
            self._synchronise()
            peaks = {"allocated": memory.max_memory_allocated(), "reserved": memory.max_memory_reserved()}
            self._let_go()
            return {"rest": rest, **peaks}
        with self._allocations as meter:
            rest = meter.live_bytes
            start, end = f"start {self._num_steps}", f"end {self._num_steps}"
            if STATUS.exists():  # of Linux: let the peak of the resident set start anew
                STATUS.with_name("clear_refs").write_text("5")
            meter.mark(start)
            self._step()
            meter.mark(end)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if STATUS.exists():
            resident = 1024 * int(re.findall(r"VmHWM:\s*(\d+)", STATUS.read_text())[0])
        return {"rest": rest, "allocated": meter.peak(start, end), "reserved": resident}

    def wire(self) -> dict[str, dict[str, int]]:
        """What this rank sends in a step: bytes and launches, by kind of collective."""
        with Wire() as wire:
            self._step()
        self._let_go()
        return {"bytes": dict(wire.num_bytes), "launches": dict(wire.launches)}

    def matmul_flops(self) -> float:
        """Floating-point operations a second of this rank in a matrix product, all ranks at once; the best of ten."""
        dtype = torch.bfloat16 if self._bf16 else torch.float32
        n = MATMUL_ROWS.get(self._device.type, 8192)
        a = torch.randn(n, n, device=self._device, dtype=dtype)
        best = float("inf")
        dist.barrier()
        for _ in range(10):
            self._synchronise()
            start = time.perf_counter()
            a @ a
            self._synchronise()
            best = min(best, time.perf_counter() - start)
        return 2 * n**3 / best

    def _let_go(self) -> None:
        """Be through with it, and leave the accelerator's memory to the contender whose turn comes."""
        self._synchronise()
        if self._device.type != "cpu":
            torch.accelerator.memory.empty_cache()

    def _synchronise(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def start(seat: Seat, contender: str, setting: Setting) -> Trainer:
    """The trainer of one rank, for a team of `contender`."""
    shape = shape_of(setting.model)

    def build() -> Loop:
        torch.manual_seed(setting.seed)
        return loop_of(contender, shape.make().to(seat.device).train(), seat, setting)

    batches = batches_of(seat.rank, (setting.batch, setting.seq), shape.vocab)
    return Trainer(seat, build, batches, bf16=setting.bf16)
