"""Inputs of recomputed blocks on the host: copied there behind the forward, and back ahead of their use in the backward."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor

from accordion.engine.streams import Flight, Lane
from accordion.errors import UsageError
from accordion.memory.arena import Arena, page_aligned


class Parking:
    """Owns the host memory in which inputs wait, made in the first forward and used again, and the order in which they came."""

    def __init__(self, device: torch.device, fetch_lane: Lane, store_lane: Lane) -> None:
        self.device, self.fetch_lane, self.store_lane = device, fetch_lane, store_lane
        self.num_bytes = 0
        self._free: dict[int, list[Arena]] = {}
        self._last: weakref.ref[Parked] | None = None
        self._leaving: tuple[Flight, Tensor, int] | None = None  # the copy, of what, and its version then

    def park(self, tensor: Tensor) -> Parked:
        """Begin to copy an input to the host; what the one before still held on the device goes."""
        self.land()
        parked = Parked(self, tensor, self._last)
        self._last, self._leaving = weakref.ref(parked), (parked.flight, tensor, tensor._version)
        return parked

    def land(self) -> None:
        """Nothing leaves any more. Raises `UsageError` where something was written meanwhile: the copy may have some of it."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            flight, tensor, version = leaving
            flight.land()
            if tensor._version != version:
                raise UsageError(
                    f"the input {tuple(tensor.shape)} of a recomputed unit was changed in place while it was copied "
                    "to the host; change a clone of it, or leave out Offload(activations='host')."
                )

    def turn(self) -> None:
        """A backward has begun: inputs that are parked from now on are of another forward."""
        self._last = None

    def take(self, num_bytes: int) -> Arena:
        """A piece of host memory, free or new."""
        free = self._free.setdefault(num_bytes, [])
        if free:
            return free.pop()
        self.num_bytes += num_bytes
        return Arena(num_bytes, self.device)

    def give(self, piece: Arena) -> None:
        self._free[piece.num_bytes].append(piece)


class Parked:
    """Owns the copy of one input on the host, from its forward until the graph goes that may recompute with it."""

    def __init__(self, parking: Parking, tensor: Tensor, before: weakref.ref[Parked] | None) -> None:
        self._parking, self._before = parking, before
        self._coming: tuple[Flight, Tensor] | None = None
        self._piece = parking.take(page_aligned(tensor.nbytes))
        self._live: Tensor | None = tensor  # until the block's forward has ended
        self._like = torch.empty_like(tensor, device="meta")  # its shape and strides, where it is dense
        flat = self._piece.memory[: tensor.nbytes].view(tensor.dtype)
        self._host = flat.as_strided(self._like.shape, self._like.stride())
        copy = partial(self._host.copy_, tensor.detach(), non_blocking=True)
        self.flight = parking.store_lane.copy(lambda: void(copy()), [tensor], "copies activations to the host")

    def leave(self) -> None:
        """The block's forward has ended."""
        self._live = None

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._live is None and self._coming is None:
            self._parking.land()
            tensor = torch.empty_strided(
                self._like.shape, self._like.stride(), dtype=self._like.dtype, device=self._parking.device
            )
            copy = partial(tensor.copy_, self._host, non_blocking=True)
            flight = self._parking.fetch_lane.copy(lambda: void(copy()), [tensor], "brings activations back")
            self._coming = flight, tensor

    def tensor(self) -> Tensor:
        """The input: itself in its forward, else its copy, a leaf that requires a gradient; the one parked before comes too."""
        if self._live is not None:
            return self._live
        self._parking.turn()
        with torch.no_grad():
            self.fetch()
            before = None if self._before is None else self._before()
            if before is not None:
                before.fetch()
        assert self._coming is not None, "it was fetched"
        (flight, tensor), self._coming = self._coming, None
        flight.land()
        return tensor.requires_grad_()

    def __del__(self) -> None:
        if hasattr(self, "_piece"):
            if self._coming is not None:  # fetched, and never used: nobody waits for it on the device
                self._coming[0].synchronize()
            self._parking.give(self._piece)


def void(result: object) -> None:
    """Copies answer with a tensor, flights ask for none."""
