"""Inputs of recomputed blocks off the device: taken away behind the forward, and back ahead of their use in the backward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from accordion.config import folder_of
from accordion.engine.streams import SideStream, Transfer
from accordion.errors import OffloadError, UsageError
from accordion.offload.activations.stores import (
    DiskActivationStore,
    DiskSlot,
    HostActivationStore,
    HostSlot,
    Stored,
    room_for,
)
from accordion.offload.arena import ArenaMaker

log = logging.getLogger("accordion")


class ActivationOffload:
    """Owns the places in which inputs wait, made in the first forward and used again, and the order in which they came.

    `side streams`: on which they come back, and on which they leave.
    """

    def __init__(
        self,
        device: torch.device,
        side_streams: tuple[SideStream, SideStream],
        pool: Callable[[], ThreadPoolExecutor],
        checksums: bool,
        make_arena: ArenaMaker,
    ) -> None:
        self.device, self._side_streams, self._pool, self._checksums = device, side_streams, pool, checksums
        self._make_arena = make_arena
        self._stores: dict[str, HostActivationStore | DiskActivationStore] = {}
        self._told = (0, 0)
        self._last: weakref.ref[OffloadedInput] | None = None
        self._leaving: tuple[Transfer | Stored, Tensor, int] | None = None  # what leaves, of what, and its version then

    @property
    def host_bytes(self) -> int:
        return sum(store.host_bytes for store in self._stores.values())

    @property
    def disk_bytes(self) -> int:
        return sum(store.disk_bytes for store in self._stores.values())

    def offload(self, tensor: Tensor, place: str) -> OffloadedInput:
        """Begin to take an input away; what the one before still held on the device goes."""
        self.land()
        if place not in self._stores:
            folder, common = folder_of(place), (self.device, self._side_streams)
            if folder is None:
                self._stores[place] = HostActivationStore(*common, self._make_arena)
            else:
                self._stores[place] = DiskActivationStore(
                    folder, *common, self._pool, self._checksums, self._make_arena
                )
        slot = self._stores[place].take(room_for(tensor.nbytes))
        offloaded = OffloadedInput(self, tensor, slot, self._last)
        self._last, self._leaving = weakref.ref(offloaded), (offloaded.leaving, tensor, tensor._version)
        return offloaded

    def land(self) -> None:
        """Nothing leaves any more. Raises `UsageError` where something was written meanwhile: the copy may have some of it."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            move, tensor, version = leaving
            move.land()
            if tensor._version != version:
                raise UsageError(
                    f"the input {tuple(tensor.shape)} of a recomputed unit was changed in place while it was copied "
                    "to the host; change a clone of it, or leave out Offload(activations=...)."
                )

    def turn(self) -> None:
        """A backward has begun: inputs that are offloaded from now on are of another forward."""
        self._last, taken = None, (self.host_bytes, self.disk_bytes)
        if taken != self._told:
            self._told = taken
            log.info("offload: inputs of recomputed units take %d bytes of host memory and %d bytes on disk", *taken)

    def report(self, error: OffloadError) -> None:
        """Report an error to other ranks, which may wait for this one in the backward."""
        self._side_streams[0].waiter.tell(f"failed: {type(error).__name__}: {error}")


class OffloadedInput:
    """Owns the place of one input off the device, from its forward until the graph goes that may recompute with it."""

    def __init__(
        self,
        activation_offload: ActivationOffload,
        tensor: Tensor,
        slot: HostSlot | DiskSlot,
        before: weakref.ref[OffloadedInput] | None,
    ) -> None:
        self._owner, self._slot, self._before = activation_offload, slot, before
        self._coming: tuple[Transfer, Tensor] | None = None
        self._live: Tensor | None = tensor  # until the block's forward has ended
        self._like = torch.empty_like(tensor, device="meta")  # its shape and strides, where it is dense
        self.leaving = slot.store(tensor, self._like)

    def leave(self) -> None:
        """The block's forward has ended."""
        self._live = None

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._live is None and self._coming is None:
            self._owner.land()
            tensor = torch.empty_strided(
                self._like.shape, self._like.stride(), dtype=self._like.dtype, device=self._owner.device
            )
            self._coming = self._slot.fetch(tensor), tensor

    def tensor(self) -> Tensor:
        """The input: itself in its forward, else its copy, a leaf that requires a gradient; the one before comes too."""
        if self._live is not None:
            return self._live
        self._owner.turn()
        try:
            with torch.no_grad():
                self.fetch()
                before = None if self._before is None else self._before()
                if before is not None:
                    before.fetch()
                assert self._coming is not None, "it was fetched"
                move, tensor = self._coming
                move.land()
        except OffloadError as error:
            self._owner.report(error)
            raise
        self._coming = None
        return tensor.requires_grad_()

    def __del__(self) -> None:
        self._slot.free(is_coming=self._coming is not None)
