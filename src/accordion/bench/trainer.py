"""One rank of `accordion bench`: train under one contender, and measure when the parent process asks."""

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

from accordion.bench.contenders import Loop, Setting, loop_of
from accordion.bench.meters import Wire
from accordion.bench.model import batches_of, shape_of
from accordion.observe.allocations import Allocations
from accordion.workers.ranks import RankSetup

STATUS = Path("/proc/self/status")
Times = dict[str, float]


class Clock:
    """Clock of one step. Call `mark` before the forward, after it, after the backward, and after the optimizer's step; then
    call `times`."""

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
        """Return a dict of seconds. "forward", "backward", "optimizer" and their sum "step" are device time (on a CPU, wall
        time). "host" is the wall time of the step, and "cpu" its CPU time on all threads of this process. Call `times` when an
        accelerator has run all work up to the last mark."""
        marks = [self._events[0].elapsed_time(e) / 1e3 for e in self._events] if self._events else self._host
        parts = [b - a for a, b in pairwise(marks)]
        return {
            **dict(zip(("forward", "backward", "optimizer"), parts, strict=True)),
            "step": marks[-1] - marks[0],
            "host": self._host[-1] - self._host[0],
            "cpu": self._cpu[-1] - self._cpu[0],
        }


class Trainer:
    """Trains one rank under one contender. `losses`, `turn` (times), `memory` and `wire` (bytes sent) run steps and measure
    them; a `WorkerTeam` calls each on all ranks at once. After each, the device is idle and its cached memory is freed."""

    def __init__(self, setup: RankSetup, build: Callable[[], Loop], batches: Iterator[tuple[Any, ...]]) -> None:
        """Create the trainer of one rank. `build`: called at once, returns the loop to measure. `batches`: yields, for each
        step, the arguments of `Loop.forward`, on the CPU; does not end."""
        self._device, self._batches = setup.device, batches
        self._num_steps = 0
        # Created before the model, since it does not count storages that exist already.
        self._allocations = Allocations() if setup.device.type == "cpu" else None
        with self._allocations or nullcontext():
            self._loop = build()

    def _batch(self) -> tuple[Any, ...]:
        self._num_steps += 1
        return tuple(part.to(self._device, non_blocking=True) for part in next(self._batches))

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
        """Run `count` steps on the next batches, and return this rank's loss in each."""
        with self._allocations or nullcontext():
            losses = [float(self._step()[0]) for _ in range(count)]
        self._free_cache()
        return losses

    def turn(self, warm: int, count: int) -> list[Times]:
        """Run `warm` steps, then `count` measured ones, and return `Clock.times` of each measured step. The host does not wait
        for an accelerator between steps. On an accelerator one more step runs, after the device has become idle, and all results
        have the "host" and "cpu" of that step."""
        batches = [self._batch() for _ in range(warm + count)]
        clocks = [self._step(batch)[1] for batch in batches][warm:]
        if self._device.type == "cpu":
            return [clock.times() for clock in clocks]
        self._synchronise()
        last = self._step()[1]
        self._free_cache()
        host = {key: last.times()[key] for key in ("host", "cpu")}
        return [clock.times() | host for clock in clocks]

    def memory(self) -> dict[str, int]:
        """Run a step, and return a dict of bytes: those of all tensors before the step ("rest"), and the peaks of allocated and
        reserved memory during the step ("allocated", "reserved").

        On CPU, "rest" and "allocated" count storages that operators made, without temporaries inside operators and the backend,
        and "reserved" is the highest resident set of the process: on Linux in this step, elsewhere since the process started.
        """
        if self._allocations is None:
            self._synchronise()
            memory = torch.accelerator.memory
            memory.reset_peak_memory_stats()
            rest = memory.memory_allocated()
            self._step()
            self._synchronise()
            peaks = {"allocated": memory.max_memory_allocated(), "reserved": memory.max_memory_reserved()}
            self._free_cache()
            return {"rest": rest, **peaks}
        with self._allocations as meter:
            rest = meter.live_bytes
            start, end = f"start {self._num_steps}", f"end {self._num_steps}"
            if STATUS.exists():  # on Linux: reset the peak of the resident set
                STATUS.with_name("clear_refs").write_text("5")
            meter.mark(start)
            self._step()
            meter.mark(end)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if STATUS.exists():
            resident = 1024 * int(re.findall(r"VmHWM:\s*(\d+)", STATUS.read_text())[0])
        return {"rest": rest, "allocated": meter.peak(start, end), "reserved": resident}

    def wire(self) -> dict[str, dict[str, int]]:
        """Run a step. Returns a dict with "bytes": kind of collective -> bytes that this rank sends, and "launches": kind of
        collective -> number of collectives."""
        with Wire() as wire:
            self._step()
        self._free_cache()
        return {"bytes": dict(wire.num_bytes), "launches": dict(wire.launches)}

    def _free_cache(self) -> None:
        self._synchronise()
        if self._device.type != "cpu":
            torch.accelerator.memory.empty_cache()

    def _synchronise(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def start(setup: RankSetup, contender: str, setting: Setting) -> Trainer:
    """Build the model of `setting` with weights from its seed, shard or replicate it as `contender` does, and return the
    `Trainer` of this rank. Collective."""
    shape = shape_of(setting.model)

    def build() -> Loop:
        torch.manual_seed(setting.seed)
        return loop_of(contender, shape.make().to(setup.device).train(), setup, setting)

    batches = batches_of(setup.rank, (setting.batch, setting.seq), shape.vocab)
    return Trainer(setup, build, batches)
