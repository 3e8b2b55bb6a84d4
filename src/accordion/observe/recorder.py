"""Record the steps of a sharded model through the engine's observers and side streams."""

from __future__ import annotations

import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from accordion import _torch
from accordion.checkpoint.collective import Team
from accordion.engine.engine import Engine
from accordion.engine.observer import CallInForward, Observer
from accordion.engine.streams import Transfer
from accordion.engine.unit import Unit
from accordion.errors import UsageError
from accordion.observe.allocations import Allocations
from accordion.observe.clock import DeviceClock, HostClock, Mark
from accordion.observe.trace import Trace
from accordion.observe.values import COMPUTE, UNITS, WAIT, MemoryPoint, RankTrace, TraceSpan, UnitFacts
from accordion.offload.tiers import Tiers
from accordion.optimizers.wrap import step_hooks
from accordion.state import sharded_engine

NO_UNIT = -1
OTHER = ("other", NO_UNIT)
HOST_STEP = "host step"  # lane of the threads that step offloaded parameters


@contextmanager
def observe(model: nn.Module, *, steps: int = 3) -> Iterator[Trace]:
    """Context manager that records the next `steps` training steps of a sharded model, and yields their `Trace`.

    A step is everything from the first forward with gradients to the end of the last `optimizer.step()` before the next such
    forward, so all micro-batches belong to it. The trace is empty until the block ends. The end of the block is collective: on
    every rank, the trace gets the steps of all ranks. If the block raises, its end is not collective, and the trace has this
    rank alone. On CPU one more step is recorded before the others, to count allocations, which takes time. Begin the block
    after a few steps of training, because in the first ones the host waits for other ranks. Raises `UsageError` if the model is
    not sharded or is observed already, or if `steps` is less than 1.
    """
    engine = sharded_engine(model, "observe")
    if steps < 1:
        raise UsageError(f"observe(steps={steps}) takes a number of steps, 1 or more.")
    if engine.observers.find(Recorder) is not None:
        raise UsageError(
            "this model is observed already; end the block of the first observe() before the second begins."
        )
    trace, recorder = Trace(), Recorder(engine, steps)
    recorder.attach()
    try:
        yield trace
    except BaseException:
        recorder.detach()
        trace.ranks = [recorder.result()]
        raise
    recorder.detach()
    team = Team.of(param.sharded for param in engine.params)
    trace.ranks = [RankTrace.from_json(json.loads(text)) for text in team.shared(recorder.result().as_json(), None)]


@dataclass(slots=True)
class StepLog:
    """The record of one step; its times are marks of the recorder's clock. `end`: the mark after the last optimizer step so far;
    None before the first.

    `switches`: (mark, kind, unit) of each change of work on the compute stream: when it began, and the new work. `spans`: (lane,
    kind, unit, start, end) on all other lanes. `points`: (mark, bytes of full parameters, of gradients, of all allocations).
    """

    start: Mark
    end: Mark = None
    switches: list[tuple[Mark, str, int]] = field(default_factory=list)
    spans: list[tuple[str, str, int, Mark, Mark]] = field(default_factory=list)
    points: list[tuple[Mark, int, int, int]] = field(default_factory=list)


class Recorder(Observer):
    """Observer that records the first `num_steps` training steps between `attach` and `detach`: spans of the compute stream and
    the side streams, times in which units are unsharded, and memory. On CPU, memory is that of one more step before these.
    `result` returns the record."""

    def __init__(self, engine: Engine, num_steps: int) -> None:
        self._engine, self._device, self._num_steps = engine, engine.context.device, num_steps
        # Allocations of the CPU are counted in a step of their own.
        self._counter = Allocations() if self._device.type == "cpu" else None
        self._counted: StepLog | None = None
        self.clock = HostClock() if self._device.type == "cpu" else DeviceClock(self._device)
        self._thread = threading.get_ident()  # other threads step offloaded parameters
        self._host_starts: dict[int, int] = {}  # thread -> start of its optimizer step under way, of the host's clock
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._logs: list[StepLog] = []
        self.log: StepLog | None = None  # of the step under way, if it is recorded
        self._stack: list[tuple[str, int]] = []  # work on the compute stream, the innermost last
        self._ranges: list[tuple[tuple[str, int], record_function]] = []  # names of that work for torch.profiler
        self._full: dict[int, Mark] = {}  # unit -> since when its full parameters are in memory
        self._full_bytes = self._grad_bytes = 0
        self._sent: dict[int, int] = {}  # unit -> bytes of its full gradients until they are reduced
        self._has_grads: set[int] = set()  # units whose sharded gradients are counted in `_grad_bytes`
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Observe the engine and all optimizers, and make side streams create recorded transfers, until `detach`."""
        engine, context = self._engine, self._engine.context
        streams = {"gather": context.gather_stream, "reduce": context.reduce_stream, "fetch": context.fetch_stream}
        if context.replicate_stream is not context.reduce_stream:
            streams["all-reduce"] = context.replicate_stream
        if isinstance(context.shard_buffers, Tiers):
            streams["store"] = context.shard_buffers.store_stream
        for lane, stream in streams.items():
            self._undo.append(partial(setattr, stream, "makes", stream.makes))
            stream.makes = partial(self._transfer, lane)
        engine.observers.attach(self, first=True)
        step_hooks().add(self)

    def _transfer(self, lane: str, *args: Any) -> Transfer:
        """Return a new transfer on the side stream `lane`, recorded if a step is being recorded. `args`: those of `Transfer`."""
        return Transfer(*args) if self.log is None else _RecordedTransfer(self, self.log, lane, *args)

    def detach(self) -> None:
        """Stop recording, and restore the side streams. Keep a step under way if its optimizer has stepped, otherwise drop it."""
        self._finish_step()
        self._num_steps = 0
        while self._undo:
            self._undo.pop()()
        self._engine.observers.detach(self)

    # -- steps

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        if not differentiable or (self.log is not None and self.log.end is None):
            return
        self._finish_step()
        if len(self._logs) >= self._num_steps:
            return
        self.log = StepLog(start=self.clock.mark())
        if self._counter is not None and self._counted is None:
            self._counter.__enter__()
        self._full = {unit.index: self.log.start for unit in self._engine.units if unit.is_unsharded}
        self._full_bytes = sum(self._engine.units[index].full_bytes for index in self._full)
        grads = [(unit.index, p.grad) for unit in self._engine.units for p in unit.trained.params if p.grad is not None]
        self._has_grads = {index for index, _ in grads}
        self._grad_bytes, self._sent = sum(_torch.local_of(grad).nbytes for _, grad in grads), {}
        self._stack, self._ranges = [], []
        self.log.switches.append((self.log.start, *OTHER))
        self._note_memory()

    def _finish_step(self) -> None:
        log, self.log = self.log, None
        if log is None:
            return
        for index, since in self._full.items():
            log.spans.append((UNITS, "full", index, since, self.clock.mark()))
        if self._counter is None or self._counted is not None:
            self._logs += [] if log.end is None else [log]
            return
        self._counter.__exit__(None, None, None)
        self._counted = None if log.end is None else log

    def steps(self, optimizer: Optimizer) -> None:
        """Record that `optimizer` starts a step. Does nothing if it has no parameter of this model, or between recorded steps."""
        if self.log is None or not self._is_ours(optimizer):
            return
        if threading.get_ident() == self._thread:
            self._optimizers.add(optimizer)
            self._push("optimizer", NO_UNIT)
        else:
            self._host_starts[threading.get_ident()] = time.perf_counter_ns()

    def stepped(self, optimizer: Optimizer) -> None:
        """Record that `optimizer` ended a step. Does nothing if it has no parameter of this model, or between recorded steps."""
        if self.log is None or not self._is_ours(optimizer):
            return
        if threading.get_ident() == self._thread:
            self._optimizers.add(optimizer)  # that of offloaded parameters has only this callback
            self._pop("optimizer", NO_UNIT)
            self.log.end = self.clock.mark()
        elif (start := self._host_starts.pop(threading.get_ident(), None)) is not None:
            self.log.spans.append((HOST_STEP, HOST_STEP, NO_UNIT, start, time.perf_counter_ns()))

    def _is_ours(self, optimizer: Optimizer) -> bool:
        params = [param.sharded for param in self._engine.params]
        ids = {id(tensor) for param in params for tensor in (param, _torch.local_of(param))}
        return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])

    # -- the compute stream

    def unit_enters(self, unit: Unit, differentiable: bool, by_read: bool) -> None:
        self._push("forward", unit.index)

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        self._pop("forward", call.unit.index)
        return out

    def unit_returns(self, unit: Unit, call: CallInForward | None) -> None:
        if ("backward", unit.index) not in self._stack:
            self._push("backward", unit.index)

    def full_gradients(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        if self.log is None:
            return
        self._pop("backward", unit.index)
        num_bytes = sum(grad.nbytes for grad in grads if grad is not None)
        self._sent[unit.index] = self._sent.get(unit.index, 0) + num_bytes
        self._grad_bytes += num_bytes
        self._note_memory()

    def backward_ends(self) -> None:
        for work in [work for work in self._stack[::-1] if work[0] == "backward"]:  # of units that train nothing
            self._pop(*work)

    def _push(self, kind: str, unit: int) -> None:
        if self.log is not None:
            self._stack.append((kind, unit))
            # Names the work in torch.profiler's traces and in memory snapshots, if one of these is recorded.
            name = f"{kind} {self._engine.units[unit].name or 'root'}" if unit != NO_UNIT else kind
            self._ranges.append(((kind, unit), record_function(name)))
            self._ranges[-1][1].__enter__()
            self._switch(self.log)

    def _pop(self, kind: str, unit: int) -> None:
        """Remove the newest entry (`kind`, `unit`) of the stack, end its profiler range and those inside, and record the switch
        to the work that is on top now. Does nothing if there is no such entry, or if no step is being recorded."""
        if self.log is not None and (kind, unit) in self._stack:
            index = len(self._stack) - 1 - self._stack[::-1].index((kind, unit))
            del self._stack[index]
            if any(work == (kind, unit) for work, _ in self._ranges):
                ended = None
                while ended != (kind, unit):  # ranges inside this one that an error left open end first
                    ended, named = self._ranges.pop()
                    named.__exit__(None, None, None)
            self._switch(self.log)

    def _switch(self, log: StepLog) -> None:
        log.switches.append((self.clock.mark(), *(self._stack[-1] if self._stack else OTHER)))
        self._note_memory()

    # -- memory

    def unit_unshards(self, unit: Unit) -> None:
        if self.log is not None and unit.index not in self._full:
            self._full[unit.index] = self.clock.mark()
            self._full_bytes += unit.full_bytes
            self._note_memory()

    def unit_reshards(self, unit: Unit) -> None:
        if self.log is not None and (since := self._full.pop(unit.index, None)) is not None:
            self.log.spans.append((UNITS, "full", unit.index, since, self.clock.mark()))
            self._full_bytes -= unit.full_bytes
            self._note_memory()

    def landed(self, lane: str, unit: int, before: Mark) -> None:
        """Record that the compute stream has waited since the mark `before` for a transfer of `unit` on the side stream `lane`.
        After a reduce, count the sharded gradients of `unit` in place of the full ones. Does nothing between recorded steps."""
        if self.log is None:
            return
        self.log.spans.append((WAIT, lane, unit, before, self.clock.mark()))
        if lane in ("reduce", "all-reduce") and unit in self._sent:
            self._grad_bytes -= self._sent.pop(unit)
            if unit not in self._has_grads:
                self._has_grads.add(unit)
                self._grad_bytes += sum(_torch.local_of(p).nbytes for p in self._engine.units[unit].trained.likes)
            self._note_memory()

    def _note_memory(self) -> None:
        assert self.log is not None
        if self._counter is not None and self._counted is not None:
            return
        total = torch.accelerator.memory_allocated(self._device) if self._counter is None else self._counter.live_bytes
        self.log.points.append((self.clock.mark(), self._full_bytes, self._grad_bytes, total))

    # -- the result

    def result(self) -> RankTrace:
        """Return the recorded steps as plain values. Call this after `detach`. The host waits for the device."""
        clock, engine = self.clock, self._engine
        clock.settle()
        start_us = clock.us(self._logs[0].start) if self._logs else 0.0
        units = [
            UnitFacts(
                name=unit.name or "root",
                full_bytes=unit.full_bytes,
                shard_bytes=sum(_torch.local_of(param.sharded).nbytes for param in unit.params),
            )
            for unit in engine.units
        ]
        leaves = [leaf for optimizer in self._optimizers for leaf in tree_leaves(dict(optimizer.state))]
        states = [_torch.local_or_same(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        trace = RankTrace(
            rank=dist.get_rank() if dist.is_initialized() else 0,
            device=self._device.type,
            strategy=engine.strategy.name,
            units=units,
            steps=[(clock.us(log.start) - start_us, clock.us(log.end) - start_us) for log in self._logs],
            spans=[span for log in self._logs for span in _spans_of(log, clock, start_us)],
            memory=[],
            memory_step=len(self._logs) - 1 if self._counter is None else -1,
            shard_bytes=sum(unit.shard_bytes for unit in units),
            state_bytes=sum(state.nbytes for state in states if state.device.type == self._device.type),
        )
        return replace(trace, memory=self._memory(trace))

    def _memory(self, trace: RankTrace) -> list[MemoryPoint]:
        log = self._counted if self._counter is not None else next(iter(self._logs[::-1]), None)
        if log is None:
            return []
        start_us, end_us = self.clock.us(log.start), self.clock.us(log.end)
        # The counter of the CPU sees what was allocated since the step began; full parameters are in memory that is not new.
        _, full_before, grads_before, total_before = log.points[0]
        before = max(total_before - trace.shard_bytes - trace.state_bytes - full_before - grads_before, 0)
        points = []
        for mark, full, gradients, total in log.points:
            if self.clock.us(mark) > end_us:
                break
            new, other = total - (gradients - grads_before), 0
            if self._counter is None:
                new, other = new - total_before - (full - full_before), before
            point = MemoryPoint(
                time_us=self.clock.us(mark) - start_us,
                full=full,
                gradients=gradients,
                activations=max(new, 0),
                other=max(other + min(new, 0), 0),
            )
            points.append(point)
        return points


def _spans_of(log: StepLog, clock: HostClock, start_us: float) -> Iterator[TraceSpan]:
    """Yield the spans of the step `log`, with times in microseconds after `start_us`. Spans are cut off at the step's end, and
    left out if they begin later, except on the lane `HOST_STEP`, because threads may go on after `optimizer.step()`."""
    step_end_us = clock.us(log.end) - start_us
    ends = [mark for mark, _, _ in log.switches[1:]] + [log.end]
    works = [(COMPUTE, kind, unit, start, end) for (start, kind, unit), end in zip(log.switches, ends, strict=True)]
    for lane, kind, unit, start, end in [*works, *log.spans]:
        # What follows the step, such as a validation, is recorded until the next one begins.
        first, last = clock.us(start) - start_us, clock.us(end) - start_us
        if lane != HOST_STEP:
            last = min(last, step_end_us)
        if last > first:
            yield TraceSpan(lane=lane, kind=kind, unit=unit, start_us=first, end_us=last)


# -- side streams


class _RecordedTransfer(Transfer):
    """A transfer that records two spans: in `log`, its time on the side stream `lane`; through `recorder`, the compute stream's
    wait for it. `args`: those of `Transfer`. The unit of both spans is the number after "unit" in the transfer's name in
    messages; -1 if that has none."""

    __slots__ = ("_ends", "_lane", "_log", "_num_works", "_recorder", "_start", "_unit")

    def __init__(self, recorder: Recorder, log: StepLog, lane: str, *args: Any) -> None:
        super().__init__(*args)
        number = re.search(r"\bunit (\d+) ", self._what)
        self._recorder, self._log, self._lane = recorder, log, lane
        self._unit = NO_UNIT if number is None else int(number[1])
        self._start: Mark = None
        self._num_works = 0
        self._ends: list[Mark] = []  # on CPU, of each work of the backend; the host may wait for it much later

    def _run(self) -> None:
        clock, stream = self._recorder.clock, self._side_stream.stream
        if self._start is None:
            self._start = clock.mark(stream)
        super()._run()
        if self._pending is not None:
            self._num_works += len(self._pending.works)
            for work in self._pending.works:
                with suppress(RuntimeError):  # messages between two ranks have no futures
                    work.get_future().add_done_callback(self._ended)
        elif self.ended:
            has_all = 0 < self._num_works == len(self._ends)
            end = max(self._ends) if has_all else clock.mark(stream)
            self._log.spans.append((self._lane, self._lane, self._unit, self._start, end))

    def _ended(self, future: object) -> None:
        self._ends.append(self._recorder.clock.mark())

    def land(self) -> None:
        before = self._recorder.clock.mark()
        super().land()
        self._recorder.landed(self._lane, self._unit, before)
