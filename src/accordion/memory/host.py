"""Homes of shards in host memory: optimizers step there, and copies on streams of their own bring rows to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.home import Allocate, Home, flats_of, zeros_on
from accordion.engine.layout import Message, message
from accordion.engine.streams import Flight, Lane
from accordion.memory.arena import page_aligned

ALIGNED_ITEMSIZE = 4  # of what never travels: only where each tensor begins depends on it


class HostHome(Home):
    """Owns the shards of one group on the host, the rows that travel to the device, and the room for their gradients.

    `locals`: what the optimizer steps, each in its own dtype. Rows travel in the dtype in which they are gathered, so what is
    kept in another one has a second row on the host, written before it travels. With `keeps` rows also lie on the device,
    and are copied there once a step; else each gather copies them. Gradients come back into slots, one a parameter;
    what is added to others comes into `landing`, which all homes share.
    """

    is_memory_of_locals = False

    def __init__(
        self,
        msg: Message,
        rank: int,
        dtypes: Sequence[torch.dtype],
        gathered: torch.dtype,
        *,
        allocate: Allocate,
        landing: Tensor,
        keeps: bool,
        device: torch.device,
        fetch_lane: Lane,
        store_lane: Lane,
    ) -> None:
        self._travel = Home(msg, rank, [gathered] * len(dtypes), allocate)
        self._wide = [i for i, dtype in enumerate(dtypes) if dtype != gathered]
        masters = Home(_some(msg, self._wide), rank, [dtypes[i] for i in self._wide], allocate) if self._wide else None
        self.locals = list(self._travel.locals)
        for i, local in zip(self._wide, masters.locals if masters is not None else [], strict=True):
            self.locals[i] = local
        self._masters = masters
        self._slots = [_Slot(local) for local in Home(_plain(msg), rank, dtypes, allocate).locals]
        self._landing = [part.view(dtypes[i]) for i, part in enumerate(_split(landing, self.locals))]
        self._stage = Home(msg, rank, [gathered] * len(dtypes), zeros_on(device)) if keeps else None
        source = self._travel if self._stage is None else self._stage
        self.padded, self.pack_row, self.dtype = source.padded, source.pack_row, source.dtype
        self.away = self._stage is None
        self.flats = [*self._travel.flats, *(masters.flats if masters is not None else [])]
        self.tag = self._travel.tag
        self._fetch_lane, self._store_lane = fetch_lane, store_lane
        self._shown = self._staged = -1  # versions of the shards in `_travel` and in `_stage`
        self._reading: list[Flight] = []
        self._steps: list[Callable[[], None]] = []  # under way; each returns when it has ended
        self._is_written = False  # the rows that travel are those of a step that has ended

    def defer(self, wait: Callable[[], None]) -> None:
        """A step of these shards is under way, which ends in `write_rows`; `wait` returns when it has ended."""
        self._steps.append(wait)

    def ready(self) -> None:
        while self._steps:
            self._steps.pop(0)()
            self._is_written = True

    def write_rows(self) -> None:
        """Write what travels in another dtype than it is kept in; nothing reads it then."""
        if self._wide:
            rows = self._travel.locals
            _torch.foreach_copy_([rows[i] for i in self._wide], [self.locals[i] for i in self._wide])

    def refresh(self, version: int) -> Flight | None:
        if self._shown != version and not self._is_written:
            self.synchronize()
            self.write_rows()
        self._shown, self._is_written = version, False
        if self._stage is None or self._staged == version:
            return None
        self._staged = version
        copies = partial(_copy, self._stage.flats, self._travel.flats)
        self.read_by(self._fetch_lane.copy(copies, [], "copies shards to the device"))
        return self._reading[-1]

    def read_by(self, flight: Flight) -> None:
        self._reading = [flight]  # of one lane, so that it ends after those before it

    def synchronize(self) -> None:
        self.ready()
        self._is_written = False  # a caller who waits may write
        for flight in self._reading:
            flight.synchronize()
        self._reading.clear()

    def mark_stale(self) -> None:
        self._shown = self._staged = -1
        self._is_written = False

    def put(
        self, chosen: Sequence[int], rows: Sequence[Tensor | None], adding: Sequence[bool]
    ) -> tuple[Sequence[Tensor | None], Flight | None]:
        to: list[Tensor] = []
        source: list[Tensor] = []
        result: list[Tensor | None] = []
        for i, row, is_added in zip(chosen, rows, adding, strict=True):
            if row is None:
                result.append(None)
                continue
            target = (
                self._landing[i].as_strided(row.shape, self.locals[i].stride()) if is_added else self._slots[i].take()
            )
            to.append(target)
            source.append(row)
            result.append(target)
        if not to:
            return result, None
        return result, self._store_lane.copy(partial(_copy, to, source), source, "copies gradients to the host")


class _Slot:
    """Owns the memory in which one gradient rests, and gives it out while nobody else has it."""

    def __init__(self, rest: Tensor) -> None:
        self._rest = rest
        self._alone = _torch.holders_of_memory(rest)

    def take(self) -> Tensor:
        """A tensor over the slot; over new memory where a gradient that was given out before is still held."""
        if _torch.holders_of_memory(self._rest) > self._alone:
            return torch.empty_like(self._rest)
        return self._rest.detach()


def home_bytes(msg: Message, dtypes: Sequence[torch.dtype], gathered: torch.dtype) -> int:
    """What a `HostHome` takes of an arena."""
    wide = [i for i, dtype in enumerate(dtypes) if dtype != gathered]
    parts = [(msg, [gathered] * len(dtypes)), (_plain(msg), dtypes)]
    if wide:
        parts.append((_some(msg, wide), [dtypes[i] for i in wide]))
    flats = [(part.shard_numel, dtype) for m, ds in parts for dtype, _, part in flats_of(m, ds)]
    return sum(page_aligned(numel * dtype.itemsize) for numel, dtype in flats)


def landing_bytes(msg: Message, dtypes: Sequence[torch.dtype]) -> int:
    """What gradients of one group take beside others of their unit, where they land to be added."""
    return sum(page_aligned(c.shard_numel * dtype.itemsize) for c, dtype in zip(msg.cuts, dtypes, strict=True))


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    _torch.foreach_copy_(list(to), list(source), non_blocking=True)


def _plain(msg: Message) -> Message:
    """The same tensors with nothing behind them."""
    return _some(msg, range(len(msg.cuts)))


def _some(msg: Message, chosen: Sequence[int]) -> Message:
    return message([msg.cuts[i] for i in chosen], ALIGNED_ITEMSIZE)


def _split(landing: Tensor, locals_: Sequence[Tensor]) -> list[Tensor]:
    """For each parameter its part of `landing`, bytes."""
    parts, at = [], 0
    for local in locals_:
        parts.append(landing[at : at + local.nbytes])
        at += page_aligned(local.nbytes)
    return parts
