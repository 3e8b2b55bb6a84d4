"""A step cut into chunks: which elements of which tensors it takes at a time, where they lie, and the step of one chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accordion.engine.shards import own_storage
from accordion.errors import UsageError
from accordion.offload.arena import ALIGN_BYTES, page_aligned
from accordion.offload.host_shards import OffDeviceShards
from accordion.offload.step.optimizer_copy import Entry, OptimizerCopy, flat_of, has_elements, local_of, write_back
from accordion.offload.swap_file import FileRange, SwapFile

CHUNK_NUMEL = 2**21  # stepped at a time at most: 8 MiB of each float32 state
LEAST_NUMEL = 2**16  # and at least: with four requests in flight disks still reach their speed with 256 KiB each
NUM_CHUNKS = 100  # into which what is stepped is cut in between: the buffers of four of them are small beside it


@dataclass(frozen=True, slots=True)
class Memory:
    """States of several parameters in one chunk of memory, of the host or of the device; `owner` keeps it pinned."""

    whole: Tensor  # bytes
    owner: object = None

    def mapped(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) of it, shared with it."""
        return own_storage(self.whole[offset : offset + numel * dtype.itemsize].view(dtype))


@dataclass(frozen=True, slots=True)
class StateBlock:
    """A part of a store for the parameters of one unit, param group and dtype: for each state a run of `numel` elements.

    `keys`: the states that have an element for each of the parameter's, with their dtypes; `starts`: where each one's run
    begins, in bytes. `itemsize`: the smallest of whatever is stepped with them. `most`: elements of the largest chunk.
    `from_disk`, `besides`: bytes an element of parameter, gradient and row, those on disk and all of them.
    """

    store: SwapFile | Memory
    numel: int
    keys: dict[str, torch.dtype]
    starts: dict[str, int]
    itemsize: int
    most: int
    from_disk: int = 0
    besides: int = 0

    @property
    def step(self) -> int:
        """Parameters begin, and chunks are cut, at multiples of so many elements: of a page, whatever the dtype."""
        return ALIGN_BYTES // self.itemsize

    def buffer_bytes(self, *, on_device: bool) -> int:
        """Return the most that a chunk takes in a buffer of the device, or of the host."""
        in_buffer = on_device or isinstance(self.store, SwapFile)
        states = sum(dtype.itemsize for dtype in self.keys.values()) if in_buffer else 0
        return ((self.besides if on_device else self.from_disk) + states) * min(self.most, self.numel)


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where the states of one parameter lie: elements [start, start + own.numel()) of each run of a block."""

    block: StateBlock
    start: int
    shown: dict[str, Tensor]  # each state as the outside sees it, in the shape of the shard


@dataclass(slots=True)
class ParamStep:
    """A parameter of a step under way. `shards`: of its shard, and which parameter of it; None: on the device.

    `made`: its states that have not the parameter's shape, as the last chunk left them.
    """

    entry: Entry
    place: StatePlace
    present: frozenset[str]
    shard_buffer: tuple[OffDeviceShards, int] | None = None
    made: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """A run of elements that a chunk needs: in `memory`, else at `offset` of a file. `reads`: their values matter.

    `writes`: they change, and go back to where they lie.
    """

    dtype: torch.dtype
    numel: int
    reads: bool
    writes: bool
    memory: Tensor | None = None
    file: SwapFile | None = None
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        """In a buffer, and in a file."""
        return page_aligned(self.numel * self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Elements [low, high) of a parameter; `own`, `grad`, `row`: which spans of the chunk have them."""

    todo: ParamStep
    low: int
    high: int
    own: int
    grad: int
    row: int | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [start, stop) of a block: what of them is stepped, and all that this takes. States come first, by key."""

    block: StateBlock
    start: int
    stop: int
    parts: list[ChunkPart]
    spans: list[Span]


def chunk_numel(itemsize: int, total: int) -> int:
    """Elements of the largest chunk of a step of `total`, where the smallest dtype has `itemsize` bytes.

    Chunks are cut at pages of each dtype.
    """
    step = ALIGN_BYTES // itemsize
    return max(step, min(CHUNK_NUMEL, max(LEAST_NUMEL, total // NUM_CHUNKS)) // step * step)


def chunks_of(todos: Sequence[ParamStep]) -> Iterator[Chunk]:
    """Cut what is to be stepped of one unit into chunks, in the order of the store; what nobody steps is not read."""
    by_block: dict[int, list[ParamStep]] = {}
    for todo in todos:
        by_block.setdefault(id(todo.place.block), []).append(todo)
    for mine in by_block.values():
        block, mine = mine[0].place.block, sorted(mine, key=lambda t: t.place.start)
        runs: list[tuple[int, int, list[ParamStep]]] = []
        for todo in mine:  # neighbours join
            start = todo.place.start
            stop = start + -(-todo.entry.own.numel() // block.step) * block.step
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop, [*runs[-1][2], todo])
            else:
                runs.append((start, stop, [todo]))
        for start, stop, inside in runs:
            for at in range(start, stop, block.most):
                yield _chunk(block, at, min(stop, at + block.most), inside)


def _chunk(block: StateBlock, start: int, stop: int, inside: Sequence[ParamStep]) -> Chunk:
    cut = []
    for todo in inside:
        first, numel = todo.place.start, todo.entry.own.numel()
        low, high = max(start, first), min(stop, first + numel)
        if low < high:
            cut.append((todo, low - first, high - first))
    spans, parts = list[Span](), list[ChunkPart]()
    for key, dtype in block.keys.items():
        there, at = any(key in todo.present for todo, _, _ in cut), block.starts[key] + start * dtype.itemsize
        if isinstance(block.store, SwapFile):
            spans.append(Span(dtype, stop - start, there, True, file=block.store, offset=at))
        else:
            spans.append(Span(dtype, stop - start, there, True, memory=block.store.mapped(at, stop - start, dtype)))
    for todo, low, high in cut:
        entry, at, (shard_buffer, i) = todo.entry, len(spans), todo.shard_buffer or (None, 0)
        own = grad = row = None
        if shard_buffer is not None:
            own, row = shard_buffer.own_range(i), shard_buffer.row(i)
            grad = shard_buffer.grads.file_range(i, entry.grad)
        spans.append(_span_of(own or flat_of(entry.own, entry.own), low, high, writes=True))
        spans.append(_span_of(grad or flat_of(entry.grad, entry.own), low, high, writes=False))
        if row is not None:
            spans.append(_span_of(row, low, high, writes=True, reads=False))
        parts.append(ChunkPart(todo, low, high, at, at + 1, None if row is None else at + 2))
    return Chunk(block, start, stop, parts, spans)


def _span_of(whole: Tensor | FileRange, low: int, high: int, *, writes: bool, reads: bool = True) -> Span:
    """Elements [low, high) of a 1-D tensor in memory, or of a range of a file."""
    if isinstance(whole, FileRange):
        at = whole.offset + low * whole.dtype.itemsize
        return Span(whole.dtype, high - low, reads, writes, file=whole.file, offset=at)
    return Span(whole.dtype, high - low, reads, writes, memory=whole[low:high])


def step_chunk(optimizer_copy: OptimizerCopy, chunk: Chunk, views: Sequence[Tensor]) -> None:
    """Step what a chunk has, with its spans in `views`, which afterwards hold what they become."""
    work = []
    blocks = dict(zip(chunk.block.keys, views, strict=False))
    for part in chunk.parts:
        todo, own = part.todo, views[part.own].detach()
        own.grad = views[part.grad]
        at = todo.place.start + part.low - chunk.start
        mine = {k: block[at : at + part.high - part.low] for k, block in blocks.items()}
        state = {
            k: optimizer_copy.scalar(todo.entry.group, k, v, own)
            for k, v in todo.entry.state.items()
            if k not in blocks
        }
        work.append((part, own, {k: mine.get(k, state.get(k)) for k in todo.entry.state}, mine))
    states = optimizer_copy.step(
        [(part.todo.entry.group, part.todo.entry.param, own, state) for part, own, state, _ in work]
    )
    for part, own, _, mine in work:
        made = states.get(own, {})
        for key, value in made.items():
            if key in mine:
                if value.data_ptr() != mine[key].data_ptr():
                    mine[key].copy_(value)
            elif has_elements(value, own):
                raise UsageError(
                    f"the optimizer made a state {key!r} that it had not when it was wrapped, or that is a list or dict; states "
                    "that a step brings chunk by chunk are tensors that are laid out then: set its options before "
                    "wrap_optimizer, or keep the optimizer where it steps."
                )
        # What was copied into its place is not kept beside it.
        part.todo.made = {k: part.todo.place.shown.get(k, v) if k in mine else v for k, v in made.items()}
        if part.row is not None:
            views[part.row].copy_(own)


def finish(todo: ParamStep) -> None:
    """After all chunks of a parameter: show its states to the outside."""
    entry, shown = todo.entry, todo.place.shown
    write_back(entry.state, {k: shown.get(k, v) for k, v in todo.made.items()}, entry.param, local_of(entry.param))
