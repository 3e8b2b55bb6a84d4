"""Copies the inputs of recomputed units off the device during the forward, and back for the backward."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from accordion.config import folder_of
from accordion.engine.streams import Transfer
from accordion.errors import OffloadError, UsageError
from accordion.offload.activations.stores import (
    DiskActivationStore,
    DiskSlot,
    HostActivationStore,
    HostSlot,
    room_for,
)
from accordion.offload.host_shards import Resources
from accordion.offload.swap_file import CopyToDisk


class ActivationOffload:
    """Copies inputs of recomputed units of one model into stores on the host or on disk, which are created at the first use.
    `offload` copies an input away; the `OffloadedInput` that it returns copies the input back."""

    def __init__(self, resources: Resources) -> None:
        self.resources = resources
        self._stores: dict[str, HostActivationStore | DiskActivationStore] = {}
        self._last: weakref.ref[OffloadedInput] | None = None
        self._storing: tuple[Transfer | CopyToDisk, Tensor, int] | None = None  # copy under way, input and its version

    @property
    def host_bytes(self) -> int:
        return sum(store.host_bytes for store in self._stores.values())

    @property
    def disk_bytes(self) -> int:
        return sum(store.disk_bytes for store in self._stores.values())

    def offload(self, tensor: Tensor, place: str) -> OffloadedInput:
        """Start copying `tensor`, the input of a unit, to `place`, "host" or "disk:FOLDER". Return an object that copies it back.

        First calls `finish_store` for the previous input, so that the device memory of that one can be freed. Raises `UsageError`
        or `OffloadError` if there is no room.
        """
        self.finish_store()
        if place not in self._stores:
            folder, resources = folder_of(place), self.resources
            self._stores[place] = (
                HostActivationStore(resources) if folder is None else DiskActivationStore(folder, resources)
            )
        slot = self._stores[place].take(room_for(tensor.nbytes))
        offloaded = OffloadedInput(self, tensor, slot, self._last)
        self._last, self._storing = weakref.ref(offloaded), (offloaded.storing, tensor, tensor._version)
        return offloaded

    def finish_store(self) -> None:
        """Make the compute stream wait for the last started copy to a store. Do nothing if there is none, or if this was called
        for it before. Raise `UsageError` if the copied tensor was changed in place meanwhile."""
        storing, self._storing = self._storing, None
        if storing is not None:
            move, tensor, version = storing
            move.land()
            if tensor._version != version:
                raise UsageError(
                    f"the input {tuple(tensor.shape)} of a recomputed unit was changed in place while it was copied "
                    "to the host; change a clone of it, or leave out Offload(activations=...)."
                )


class OffloadedInput:
    """An input of a recomputed unit that is stored in `slot`, which is freed when this object is deleted. The constructor starts
    the copy. `before`: the previous offloaded input of this forward, which the backward needs next; None for the first one."""

    def __init__(
        self,
        activation_offload: ActivationOffload,
        tensor: Tensor,
        slot: HostSlot | DiskSlot,
        before: weakref.ref[OffloadedInput] | None,
    ) -> None:
        self._owner, self._slot, self._before = activation_offload, slot, before
        self._fetched: tuple[Transfer, Tensor] | None = None
        self._live: Tensor | None = tensor  # until the unit's forward has ended
        self._like = torch.empty_like(tensor, device="meta")  # its shape and dtype, and its strides if it is dense
        self.storing = slot.store(tensor, self._like)

    def leave(self) -> None:
        """Drop the reference to the input on the device; `tensor` then returns a copy. Call when the unit's forward ends."""
        self._live = None

    def fetch(self) -> None:
        """Start copying the input back to the device, unless it is still there or the copy was started already."""
        if self._live is None and self._fetched is None:
            self._owner.finish_store()
            tensor = torch.empty_strided(
                self._like.shape, self._like.stride(), dtype=self._like.dtype, device=self._owner.resources.device
            )
            self._fetched = self._slot.fetch(tensor), tensor

    def tensor(self) -> Tensor:
        """Return the input itself before `leave`. After `leave`, return a copy on the device, a leaf that requires a gradient,
        and start fetching `before`. An `OffloadError` is reported to the other ranks and raised."""
        if self._live is not None:
            return self._live
        self._owner._last = None  # a backward runs: the next offloaded input is the first one of a new forward
        try:
            with torch.no_grad():
                self.fetch()
                before = None if self._before is None else self._before()  # the backward needs it next
                if before is not None:
                    before.fetch()
                assert self._fetched is not None, "fetch() was called"
                move, tensor = self._fetched
                move.land()
        except OffloadError as error:  # the other ranks may be waiting for this rank in the backward
            self._owner.resources.fetch_stream.waiter.tell(f"failed: {type(error).__name__}: {error}")
            raise
        self._fetched = None
        return tensor.requires_grad_()

    def __del__(self) -> None:
        self._slot.free(is_fetched=self._fetched is not None)
