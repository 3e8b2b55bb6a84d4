"""Split the step of parameters into chunks of a limited number of elements, and step one chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from accordion.errors import UsageError
from accordion.offload.arena import ALIGN_BYTES, page_aligned
from accordion.offload.host_shards import OffDeviceShards
from accordion.offload.step.optimizer_copy import Entry, OptimizerCopy, flat_of, has_elements
from accordion.offload.swap_file import FileRange, Values

CHUNK_NUMEL = 2**21  # largest chunk: 8 MiB of each float32 state
LEAST_NUMEL = 2**16  # smallest chunk: with four requests of 256 KiB in flight disks still reach their full speed
NUM_CHUNKS = 100  # number of chunks of a step between these limits, so that buffers of four chunks are small


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Optimizer states of the parameters of one unit, param group and dtype. Each state is one 1-D run of elements for all of
    these parameters. Parameters and chunks begin at multiples of the elements that a page has in the smallest dtype.

    Args: `runs`: name of a state -> its `numel` elements in memory or in a file, for each state that has the parameter's shape;
    `itemsize`: bytes of the smallest element of parameter, gradient, row (the shard's copy in the gathered dtype) and states;
    `max_numel`: elements of the largest chunk; `steps_on_device`: step chunks on the device instead of the host; `total_bytes`:
    bytes per element of parameter, gradient and row together; `disk_bytes`: the part of `total_bytes` that is on disk.
    """

    runs: dict[str, Values]
    numel: int
    itemsize: int
    max_numel: int
    steps_on_device: bool = False
    disk_bytes: int = 0
    total_bytes: int = 0

    def buffer_bytes(self, *, on_device: bool) -> int:
        """Return the bytes of the largest chunk in a buffer: all its values on the device, on the host only those in files."""
        states = sum(run.dtype.itemsize for run in self.runs.values() if on_device or isinstance(run, FileRange))
        return ((self.total_bytes if on_device else self.disk_bytes) + states) * min(self.max_numel, self.numel)


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The position of the states of `param`: elements [start, start + number of its elements) of each run of `block`."""

    param: Tensor
    block: StateBlock
    start: int
    shown: dict[str, Tensor]  # name -> the state in the shape of the shard, for `optimizer.state`
    # With the index of the parameter in the shard buffer; None if the parameter is on the device.
    shard_buffer: tuple[OffDeviceShards, int] | None = None


@dataclass(slots=True)
class ParamStep:
    """The step of one parameter, chunk by chunk. `step_chunk` sets `states`, the new ones to write to the optimizer."""

    entry: Entry
    place: StatePlace
    states: dict[str, Any] = field(default_factory=dict)  # all states, as the step of the last chunk returned them

    def spans(self, low: int, high: int) -> list[Span]:
        """Return the elements [low, high) of the shard, of its gradient and, if there is one, of the row, the shard's copy in
        the gathered dtype. The step reads shard and gradient, and writes shard and row."""
        entry, row = self.entry, None
        shard: Values = flat_of(entry.local, entry.local)
        grad: Values = flat_of(entry.grad, entry.local)
        if self.place.shard_buffer is not None:
            shard_buffer, i = self.place.shard_buffer
            shard, row = shard_buffer.shard(i), shard_buffer.row(i)
            grad = shard_buffer.slots[i].file_range_of(entry.grad) or grad
        spans = [Span(shard[low:high], reads=True, writes=True), Span(grad[low:high], reads=True, writes=False)]
        return spans if row is None else [*spans, Span(row[low:high], reads=False, writes=True)]


@dataclass(frozen=True, slots=True)
class Span:
    """Elements of a shard, its copy in the gathered dtype, a gradient or state, in memory or a file, that a step uses."""

    values: Values
    reads: bool  # the step needs the values
    writes: bool  # the step changes the values


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Elements [low, high) of the parameter of `todo`. `spans`: the slice of `Chunk.spans` with `todo.spans(low, high)`."""

    todo: ParamStep
    low: int
    high: int
    spans: slice


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [start, stop) of a block of states, and the parts of parameters that are stepped with them."""

    block: StateBlock
    start: int
    stop: int
    parts: list[ChunkPart]
    spans: list[Span]  # first one for each state, in the order of `block.runs`, then those of each part


def chunk_numel(itemsize: int, total: int) -> int:
    """Return the number of elements of the largest chunk of a step of `total` elements. It fills whole pages in each dtype.
    `itemsize`: bytes per element of the smallest dtype."""
    step = ALIGN_BYTES // itemsize
    return max(step, min(CHUNK_NUMEL, max(LEAST_NUMEL, total // NUM_CHUNKS)) // step * step)


def chunks_of(todos: Sequence[ParamStep]) -> Iterator[Chunk]:
    """Yield the chunks of the steps `todos`, each of up to `StateBlock.max_numel` elements: one block after the other, and in
    a block by rising elements. Parameters in `todos` with adjacent states can share a chunk. Elements of other parameters
    are in no chunk."""
    by_block: dict[int, list[ParamStep]] = {}
    for todo in todos:
        by_block.setdefault(id(todo.place.block), []).append(todo)
    for members in by_block.values():
        block, members = members[0].place.block, sorted(members, key=lambda t: t.place.start)
        runs: list[tuple[int, int, list[ParamStep]]] = []
        for todo in members:  # adjacent parameters share chunks
            start = todo.place.start
            stop = start + page_aligned(todo.entry.local.numel() * block.itemsize) // block.itemsize
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop, [*runs[-1][2], todo])
            else:
                runs.append((start, stop, [todo]))
        for start, stop, inside in runs:
            for at in range(start, stop, block.max_numel):
                yield _chunk(block, at, min(stop, at + block.max_numel), inside)


def _chunk(block: StateBlock, start: int, stop: int, inside: Sequence[ParamStep]) -> Chunk:
    cut = []
    for todo in inside:
        first, numel = todo.place.start, todo.entry.local.numel()
        low, high = max(start, first), min(stop, first + numel)
        if low < high:
            cut.append((todo, low - first, high - first))
    spans, parts = list[Span](), list[ChunkPart]()
    for key, run in block.runs.items():
        exists = any(key in todo.entry.state for todo, _, _ in cut)  # else the state begins as zeros
        spans.append(Span(run[start:stop], reads=exists, writes=True))
    for todo, low, high in cut:
        own = todo.spans(low, high)
        parts.append(ChunkPart(todo, low, high, slice(len(spans), len(spans) + len(own))))
        spans += own
    return Chunk(block, start, stop, parts, spans)


def step_chunk(optimizer_copy: OptimizerCopy, chunk: Chunk, views: Sequence[Tensor]) -> None:
    """Step the elements of `chunk` in place, and keep the new states in `ParamStep.states`. `views`: a 1-D tensor with the
    values of each span of the chunk, all on one device; all but the gradients are changed. Raises `UsageError` if the
    optimizer creates a state of a parameter's shape that it did not have when it was wrapped."""
    work = []
    blocks = dict(zip(chunk.block.runs, views, strict=False))
    for part in chunk.parts:
        todo, (local, grad, *rows) = part.todo, views[part.spans]
        local = local.detach()
        local.grad = grad
        at = todo.place.start + part.low - chunk.start
        shaped = {k: block[at : at + part.high - part.low] for k, block in blocks.items()}
        group = todo.entry.group
        state = {
            k: shaped[k] if k in shaped else optimizer_copy.scalar(group, k, v, local)
            for k, v in todo.entry.state.items()
        }
        work.append((part, local, state, shaped, rows))
    states = optimizer_copy.step(
        [(part.todo.entry.group, part.todo.entry.param, local, state) for part, local, state, _, _ in work]
    )
    for part, local, _, shaped, rows in work:
        new_states = states.get(local, {})
        for key, value in new_states.items():
            if key in shaped:
                if value.data_ptr() != shaped[key].data_ptr():
                    shaped[key].copy_(value)
            elif has_elements(value, local):
                raise UsageError(
                    f"the optimizer created a state {key!r} that it did not have when it was wrapped, or that is a list or dict. "
                    "States that a step reads chunk by chunk are tensors, allocated by wrap_optimizer: set the optimizer's "
                    "options before wrap_optimizer, or keep its states on the device that steps."
                )
        # Keep the mapped state in place of a tensor that was just copied into it.
        part.todo.states = {k: part.todo.place.shown.get(k, v) if k in shaped else v for k, v in new_states.items()}
        for row in rows:
            row.copy_(local)
