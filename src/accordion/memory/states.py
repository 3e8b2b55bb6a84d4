"""Optimizer states on disk: where each lies, and the step that streams them through a few buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accordion.errors import UsageError
from accordion.memory.arena import ALIGN_BYTES
from accordion.memory.disk import SwapFile, aligned_buffer
from accordion.memory.entries import Entry, Recipe, flat_of, local_of, write_back

PIECE_NUMEL = 2**21  # stepped at a time: 8 MiB of each float32 state, where disks reach their speed
NUM_BUFFERS = 4  # pieces in flight: one is stepped, the others are written or read


@dataclass(frozen=True, slots=True)
class Area:
    """A part of a file for parameters of one unit, param group and dtype: for each state a run of `numel` elements.

    `keys`: the states that have an element for each of the parameter's, with their dtypes; `starts`: where each one's run
    begins, in bytes.
    """

    file: SwapFile
    numel: int
    keys: dict[str, torch.dtype]
    starts: dict[str, int]

    def block_bytes(self, numel: int) -> int:
        return sum(dtype.itemsize for dtype in self.keys.values()) * numel


@dataclass(frozen=True, slots=True)
class Place:
    """Where the states of one parameter lie: elements [start, start + own.numel()) of each run of an area."""

    area: Area
    start: int
    shown: dict[str, Tensor]  # each state as the outside sees it, in the shape of the shard


@dataclass(slots=True)
class Todo:
    """A parameter of a step under way. `rest`: its states that have not the parameter's shape, as the last piece left them."""

    entry: Entry
    place: Place
    present: frozenset[str]
    made: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of an area, and what of them is stepped: (parameter, from, to) in elements of the parameter."""

    area: Area
    start: int
    stop: int
    parts: list[tuple[Todo, int, int]]

    def blocks(self, buffer: Tensor) -> dict[str, Tensor]:
        """The part of `buffer`, bytes, for each state, as elements."""
        result, at = {}, 0
        for key, dtype in self.area.keys.items():
            stop = at + (self.stop - self.start) * dtype.itemsize
            result[key] = buffer[at:stop].view(dtype)
            at = stop
        return result

    def offset(self, key: str) -> int:
        return self.area.starts[key] + self.start * self.area.keys[key].itemsize


class Stream:
    """Owns the buffers through which the pieces of one step pass, in order, and what is read and written meanwhile."""

    def __init__(self, pieces: Sequence[Piece], pool: ThreadPoolExecutor, buffers: list[Tensor]) -> None:
        self._pieces, self._pool, self._buffers = pieces, pool, buffers
        self._next = 0
        self._broken: BaseException | None = None
        self._ready: list[Future[None]] = [
            pool.submit(self._refill, None, i) for i in range(min(len(buffers), len(pieces)))
        ]

    def _refill(self, finished: int | None, coming: int | None) -> None:
        """Write the piece that was stepped in a buffer, then read another one into it."""
        for which, write in ((finished, True), (coming, False)):
            if which is None or which >= len(self._pieces):
                continue
            piece = self._pieces[which]
            for key, block in piece.blocks(self._buffers[which % len(self._buffers)]).items():
                if write:
                    piece.area.file.write(piece.offset(key), block.view(torch.uint8))
                elif any(key in todo.present for todo, _, _ in piece.parts):
                    piece.area.file.read(piece.offset(key), block.view(torch.uint8))
                else:
                    block.zero_()

    def take(self) -> tuple[Piece, dict[str, Tensor]]:
        """The next piece and its states."""
        slot = self._next % len(self._buffers)
        self._ready[slot].result()
        piece = self._pieces[self._next]
        return piece, piece.blocks(self._buffers[slot])

    def give(self) -> None:
        """What `take` gave was stepped."""
        slot = self._next % len(self._buffers)
        self._ready[slot] = self._pool.submit(self._refill, self._next, self._next + len(self._buffers))
        self._next += 1

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """What fails inside ends the stream: later pieces would be taken for others."""
        if self._broken is not None:
            raise self._broken
        try:
            yield
        except BaseException as error:
            self._broken = error
            raise

    def finish(self) -> None:
        """Wait until all is written."""
        for future in self._ready:
            future.result()


class DiskStates:
    """Owns where the states of one optimizer lie, and the buffers of its steps: `NUM_BUFFERS` pieces are in memory, no more."""

    def __init__(self, checksums: bool) -> None:
        self._checksums = checksums
        self._places: dict[int, tuple[Tensor, Place]] = {}  # by id of the parameter, which is kept
        self.files: list[SwapFile] = []
        self._buffers: list[Tensor] = []
        self.is_exposed = False  # the outside has had states in its hands, and may have written them

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)

    def cover(self, wanted: Sequence[tuple[int, int, Tensor, Tensor]], recipe: Recipe, folder: Path) -> None:
        """Give a place to each (unit, param group, parameter, its local tensor) that has none yet."""
        by_area: dict[tuple[int, int, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for unit, group, p, own in wanted:
            if id(p) not in self._places and own.numel():
                by_area.setdefault((unit, group, own.dtype), []).append((p, own))
        planned, total = [], 0
        keys_of = {(group, dtype): recipe.shaped_states(group, dtype) for _, group, dtype in by_area}
        for (_, group, dtype), members in by_area.items():
            keys = keys_of[group, dtype]
            step = ALIGN_BYTES // min((d.itemsize for d in keys.values()), default=ALIGN_BYTES)
            starts, numel = [], 0
            for _, own in members:
                starts.append(numel)
                numel += -(-own.numel() // step) * step
            planned.append((members, starts, numel, keys, total))
            total += sum(d.itemsize for d in keys.values()) * numel
        if not planned:
            return
        file = SwapFile(folder, total, checksums=self._checksums)
        self.files.append(file)
        for members, starts, numel, keys, base in planned:
            bases = {}
            for key, dtype in keys.items():
                bases[key] = base
                base += numel * dtype.itemsize
            area = Area(file, numel, keys, bases)
            for (p, own), start in zip(members, starts, strict=True):
                shown = {k: _shown(area, k, start, own) for k in keys}
                self._places[id(p)] = (p, Place(area, start, shown))
        self._size_buffers()

    def _size_buffers(self) -> None:
        areas = [place.area for _, place in self._places.values()]
        largest = max(area.block_bytes(min(PIECE_NUMEL, area.numel)) for area in areas)
        if not self._buffers or self._buffers[0].numel() < largest:
            self._buffers = [aligned_buffer(largest) for _ in range(NUM_BUFFERS)]

    def adopt(self, state: Any) -> None:
        """Take states that lie elsewhere, after a load, into the file, and show them there."""
        for p, place in self._places.values():
            for key in place.shown if p in state else ():
                value = state[p].get(key)
                if isinstance(value, Tensor) and local_of(value).data_ptr() != place.shown[key].data_ptr():
                    place.shown[key].copy_(local_of(value))
                    _show(state[p], {key: place.shown[key]}, p)
                    self.is_exposed = True

    def flush(self) -> None:
        """What the outside wrote into states is in the files."""
        for file in self.files:
            file.flush()
        self.is_exposed = False

    def todo(self, entries: Sequence[Entry]) -> list[Todo]:
        found = []
        for entry in entries:
            if (
                id(entry.param) not in self._places
            ):  # without a row on this rank, or of a unit whose states are elsewhere
                continue
            _, place = self._places[id(entry.param)]
            found.append(Todo(entry, place, frozenset(k for k in place.shown if k in entry.state)))
        return found

    def stream(self, pieces: Sequence[Piece], pool: ThreadPoolExecutor) -> Stream:
        return Stream(pieces, pool, self._buffers)


def _shown(area: Area, key: str, start: int, own: Tensor) -> Tensor:
    dtype = area.keys[key]
    flat = area.file.mapped(area.starts[key] + start * dtype.itemsize, own.numel(), dtype)
    return flat.as_strided(own.shape, own.stride())


def _show(outer: dict[str, Any], shown: dict[str, Tensor], p: Tensor) -> None:
    write_back(outer, shown, p, local_of(p))


def pieces_of(todos: Sequence[Todo]) -> Iterator[Piece]:
    """Cut what is to be stepped of one unit into pieces, in the order of the file; what nobody steps is not read."""
    by_area: dict[int, list[Todo]] = {}
    for todo in todos:
        by_area.setdefault(id(todo.place.area), []).append(todo)
    for mine in by_area.values():
        area, mine = mine[0].place.area, sorted(mine, key=lambda t: t.place.start)
        step = ALIGN_BYTES // min((d.itemsize for d in area.keys.values()), default=ALIGN_BYTES)
        runs: list[tuple[int, int, list[Todo]]] = []
        for todo in mine:  # neighbours join
            start = todo.place.start
            stop = start + -(-todo.entry.own.numel() // step) * step
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop, [*runs[-1][2], todo])
            else:
                runs.append((start, stop, [todo]))
        for start, stop, inside in runs:
            for at in range(start, stop, PIECE_NUMEL):
                end, parts = min(stop, at + PIECE_NUMEL), []
                for todo in inside:
                    first, numel = todo.place.start, todo.entry.own.numel()
                    low, high = max(at, first), min(end, first + numel)
                    if low < high:
                        parts.append((todo, low - first, high - first))
                yield Piece(area, at, end, parts)


def step_piece(recipe: Recipe, piece: Piece, blocks: dict[str, Tensor]) -> None:
    """Step the parts of parameters that a piece has, with its states in `blocks`, which afterwards hold the new ones."""
    work = []
    for todo, low, high in piece.parts:
        entry, at = todo.entry, todo.place.start - piece.start
        own = flat_of(entry.own, entry.own)[low:high]
        own.grad = flat_of(entry.grad, entry.own)[low:high]
        state = {k: v for k, v in entry.state.items() if k not in blocks}
        state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        mine = {k: block[at + low : at + high] for k, block in blocks.items()}
        ordered = {k: mine.get(k, state.get(k)) for k in entry.state}
        work.append((todo, own, ordered, mine))
    states = recipe.step([(todo.entry.group, own, state) for todo, own, state, _ in work])
    for todo, own, _, mine in work:
        made = states.get(own, {})
        for key, value in made.items():
            if key in mine:
                if value.data_ptr() != mine[key].data_ptr():
                    mine[key].copy_(value)
            elif isinstance(value, Tensor) and value.shape == own.shape and value.dim():
                raise UsageError(
                    f"the optimizer made a state {key!r} that it had not when it was wrapped; states on disk are laid out then: "
                    "set its options before wrap_optimizer, or keep the optimizer on the host."
                )
        todo.made = made


def finish(todo: Todo) -> None:
    """After all pieces of a parameter: show its states to the outside."""
    entry, shown = todo.entry, todo.place.shown
    _show(entry.state, {k: shown.get(k, v) for k, v in todo.made.items()}, entry.param)
