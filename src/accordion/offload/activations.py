"""Copies the inputs of recomputed units to the host during the forward, and back before they are used in the backward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from accordion.engine.streams import SideStream, Transfer
from accordion.errors import UsageError
from accordion.offload.arena import ALIGN_BYTES, Arena, ArenaMaker, page_aligned

log = logging.getLogger("accordion")

GROWTH = 8  # a buffer that replaces a smaller one is larger than requested by 1 / GROWTH


class ActivationOffload:
    """Offloads the inputs of a model's recomputed units into buffers that are created in the first forward and reused.

    `side_streams`: (for copies to the device, for copies from the device).
    """

    def __init__(
        self, device: torch.device, side_streams: tuple[SideStream, SideStream], make_arena: ArenaMaker = Arena
    ) -> None:
        self.device, self.side_streams, self._make_arena = device, side_streams, make_arena
        self.host_bytes = 0  # of all buffers
        self._free: list[Arena] = []
        self._reported_bytes = 0  # in the last log message
        self._last: weakref.ref[OffloadedInput] | None = None
        self._storing: tuple[Transfer, Tensor, int] | None = None  # copy under way, input and its version

    def offload(self, tensor: Tensor) -> OffloadedInput:
        """Start copying the input `tensor` to the host. First finishes the copy of the last input, to free its memory."""
        self.finish_store()
        offloaded = OffloadedInput(self, tensor, self.take(room_for(tensor.nbytes)), self._last)
        self._last, self._storing = weakref.ref(offloaded), (offloaded.storing, tensor, tensor._version)
        return offloaded

    def finish_store(self) -> None:
        """Make the compute stream wait for the copy under way. Raise `UsageError` if the input was changed during the copy."""
        storing, self._storing = self._storing, None
        if storing is not None:
            transfer, tensor, version = storing
            transfer.land()
            if tensor._version != version:
                raise UsageError(
                    f"the input {tuple(tensor.shape)} of a recomputed unit was changed in place while it was copied "
                    "to the host; change a clone of it, or leave out Offload(activations=...)."
                )

    def begin_backward(self) -> None:
        """Call in a backward: inputs that are offloaded later belong to another forward. Logs `host_bytes` if it has grown."""
        self._last = None
        if self.host_bytes != self._reported_bytes:
            self._reported_bytes = self.host_bytes
            log.info("offload: inputs of recomputed units take %d bytes of host memory", self.host_bytes)

    def take(self, num_bytes: int) -> Arena:
        """Return a buffer of at least `num_bytes`: the smallest free one that fits, or a new one."""
        fits = [buffer for buffer in self._free if buffer.num_bytes >= num_bytes]
        if fits:
            buffer = min(fits, key=lambda buffer: buffer.num_bytes)
            self._free.remove(buffer)
            return buffer
        if self._free:  # inputs have grown: replace the largest free buffer by a larger one
            largest = max(self._free, key=lambda buffer: buffer.num_bytes)
            self._free.remove(largest)
            self.host_bytes -= largest.num_bytes
            del largest
            # Larger than requested: if lengths grew a little in each step, each step would pin new memory and wait for it.
            num_bytes = page_aligned(num_bytes + num_bytes // GROWTH)
        buffer = self._make_arena(num_bytes, self.device)
        self.host_bytes += num_bytes
        return buffer

    def give(self, buffer: Arena) -> None:
        """Make `buffer` free again; callable on any thread."""
        self._free.append(buffer)


class OffloadedInput:
    """One offloaded input, in `buffer`. `before`: the input that was offloaded last before it in the same forward."""

    def __init__(
        self,
        activation_offload: ActivationOffload,
        tensor: Tensor,
        buffer: Arena,
        before: weakref.ref[OffloadedInput] | None,
    ) -> None:
        self._owner, self._buffer, self._before = activation_offload, buffer, before
        self._fetched: tuple[Transfer, Tensor] | None = None
        self._live: Tensor | None = tensor  # until the unit's forward has ended
        self._like = torch.empty_like(tensor, device="meta")  # its shape and dtype, and its strides if it is dense
        copies = copying(shaped(buffer.memory, self._like), tensor)
        self.storing = self._owner.side_streams[1].copy(copies, [tensor], "copies activations to the host")

    def leave(self) -> None:
        """Drop the reference to the input on the device. Call when the unit's forward has ended."""
        self._live = None

    def fetch(self) -> None:
        """Start copying the input back to the device, unless that was started already."""
        if self._live is None and self._fetched is None:
            self._owner.finish_store()
            like = self._like
            tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self._owner.device)
            copies = copying(tensor, shaped(self._buffer.memory, like))
            fetch_stream = self._owner.side_streams[0]
            self._fetched = fetch_stream.copy(copies, [tensor], "copies activations to the device"), tensor

    def tensor(self) -> Tensor:
        """Return the input itself during the unit's forward, and later a copy of it, a leaf that requires a gradient."""
        if self._live is not None:
            return self._live
        self._owner.begin_backward()
        with torch.no_grad():
            self.fetch()
            before = None if self._before is None else self._before()  # the backward needs it next
            if before is not None:
                before.fetch()
            assert self._fetched is not None, "fetch() was called"
            transfer, tensor = self._fetched
            transfer.land()
        self._fetched = None
        return tensor.requires_grad_()

    def __del__(self) -> None:
        # The host must not wait for a copy to the device that nobody has used: the device may be waiting for ranks that
        # never arrive. Later copies into the buffer wait for it.
        if self._fetched is not None:
            transfer, _ = self._fetched
            transfer.join(self._owner.side_streams[1])
            transfer.land()
        self._owner.give(self._buffer)


def shaped(memory: Tensor, like: Tensor) -> Tensor:
    """Return a view of the first bytes of `memory`, 1-D uint8, with dtype, shape and strides of the dense tensor `like`."""
    return memory[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())


def copying(to: Tensor, source: Tensor) -> Callable[[], None]:
    def copy() -> None:
        to.copy_(source.detach(), non_blocking=True)

    return copy


def room_for(num_bytes: int) -> int:
    """Return the bytes of the buffer for an input of `num_bytes`: whole pages, at least one."""
    return max(page_aligned(num_bytes), ALIGN_BYTES)
