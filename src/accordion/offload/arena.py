"""The arena: one allocation of host memory for offloaded state, made before the first step, and pinned for CUDA."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accordion.errors import UsageError

ALIGN_BYTES = 4096  # each tensor begins at a page, as pinning and direct disk access require

SETTLE_S = 2.0  # how long freeing pinned memory waits for copies under way


def page_aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def aligned_buffer(num_bytes: int) -> Tensor:
    """Return uninitialised host memory, (num_bytes,) uint8, that begins at a page. Its storage has all of the last page."""
    whole = torch.empty(page_aligned(num_bytes) + ALIGN_BYTES, dtype=torch.uint8, device="cpu")
    start = -whole.data_ptr() % ALIGN_BYTES
    return whole[start : start + num_bytes]


class Arena:
    """One allocation of host memory that `take` divides into tensors. The memory is freed when the arena and all these tensors
    are deleted. Raises `UsageError` if the memory cannot be allocated or pinned.

    For a CUDA device it is pinned as long as this object lives: by the driver, since torch's pinned allocator rounds sizes up.
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        purpose: str = "offloading",
        instead: str = "offload less, or use more ranks or the disk",
    ) -> None:
        # `purpose` and `instead` are for the error message: what needs the memory, and what to do if there is none.
        self.num_bytes = num_bytes
        try:
            self.memory, self._used = aligned_buffer(num_bytes), 0
        except (RuntimeError, MemoryError) as error:
            raise UsageError(
                f"{purpose} needs {num_bytes} bytes of host memory on this rank, which could not be allocated "
                f"({(str(error).splitlines() or [type(error).__name__])[0]}); {instead}."
            ) from error
        if device.type != "cpu" and num_bytes:
            module = torch.get_device_module(device)
            if hasattr(module, "cudart"):  # copies to an accelerator without cudart are correct, and slower
                settle = partial(module.synchronize, device)
                pin(self, self.memory, module.cudart(), settle, lambda: torch.zeros(1, device=device))

    def take(self, numel: int, dtype: torch.dtype, *, zeros: bool = True) -> Tensor:
        """Return a new tensor of `numel` elements that begins at a page of the arena: zeros, or uninitialised if `zeros` is
        False. The caller must not take more than `num_bytes` in all, with each tensor rounded up to whole pages."""
        start, num_bytes = self._used, numel * dtype.itemsize
        self._used += page_aligned(num_bytes)
        assert self._used <= self.num_bytes, "the arena is sized for all that is taken from it"
        part = self.memory[start : start + num_bytes].view(dtype)
        return part.zero_() if zeros else part


ArenaMaker = Callable[[int, torch.device], Arena]
"""(num_bytes, device) -> an arena for state offloaded from `device`; the planner passes another function than `Arena`."""


def pin(owner: object, memory: Tensor, runtime: Any, settle: Callable[[], None], launch: Callable[[], object]) -> None:
    """Pin `memory`, 1-D uint8, and keep it alive, until `owner` is garbage-collected. Raise `UsageError` if the driver refuses.

    `runtime`: `torch.cuda.cudart()`; `settle`: waits until no copy is under way, called on a thread before the memory is
    unpinned; `launch`: launches any kernel, so that no later launch raises the driver's error if it refuses.
    """
    result = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(result) != 0:
        # The runtime reports its last error at the next launch, which otherwise is the collective that reports this error.
        with suppress(RuntimeError):
            launch()
        raise UsageError(
            f"the machine refuses to pin {memory.numel()} bytes of host memory ({runtime.cudaGetErrorString(result)}); raise the "
            "limit of locked memory (ulimit -l), offload less, or use more machines."
        )
    # The finalizer keeps the memory alive, which must not be freed while it is registered. At exit the system frees both.
    weakref.finalize(owner, _unpin, runtime, memory, settle).atexit = False


def _unpin(runtime: Any, memory: Tensor, settle: Callable[[], None]) -> None:
    def unregister() -> None:
        settle()
        runtime.cudaHostUnregister(memory.data_ptr())

    # A collective that never ends may keep the device busy, so a thread waits for the device.
    thread = threading.Thread(target=unregister, name="accordion-unpin", daemon=True)
    thread.start()
    thread.join(SETTLE_S)
