"""The host memory of a sharded model: one piece, sized before the first step, that devices can reach without a copy."""

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

ALIGN_BYTES = 4096  # of each part: a page, which pinning and direct disk access ask for

SETTLE_S = 2.0  # for copies that are under way when pinned memory is dropped


def page_aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Arena:
    """Owns one piece of host memory and hands out parts of it, each once; it never grows.

    Beside an accelerator it is pinned: registered with the driver, since torch's pinned allocator rounds sizes up to powers of
    two. It is let go when nobody holds a part of it any more.
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        purpose: str = "offloading",
        instead: str = "offload less, or use more ranks or the disk",
    ) -> None:
        """`purpose`, `instead`: of what needs the memory, and what to do without, for the error where there is none."""
        self.num_bytes = num_bytes
        try:
            whole = torch.empty(num_bytes + ALIGN_BYTES, dtype=torch.uint8, device="cpu")
        except (RuntimeError, MemoryError) as error:
            raise UsageError(
                f"{purpose} needs {num_bytes} bytes of host memory on this rank, which the machine did not give "
                f"({(str(error).splitlines() or [type(error).__name__])[0]}); {instead}."
            ) from error
        start = -whole.data_ptr() % ALIGN_BYTES
        self.memory, self._used = whole[start : start + num_bytes], 0
        if device.type != "cpu" and num_bytes:
            driver = getattr(torch.get_device_module(device), "cudart", None)
            if driver is not None:  # another accelerator's copies are right, and slower
                settle = partial(torch.get_device_module(device).synchronize, device)
                pin(self, self.memory, driver(), settle, lambda: torch.zeros(1, device=device))

    def take(self, numel: int, dtype: torch.dtype, *, zeros: bool = True) -> Tensor:
        """A 1-D tensor of zeros in a part that nobody has. Without `zeros` of anything, and not resident before it is used."""
        start, num_bytes = self._used, numel * dtype.itemsize
        self._used += page_aligned(num_bytes)
        assert self._used <= self.num_bytes, "the arena is sized for all that is taken from it"
        part = self.memory[start : start + num_bytes].view(dtype)
        return part.zero_() if zeros else part


ArenaMaker = Callable[[int, torch.device], Arena]
"""What takes so many bytes of host memory for what is offloaded from a device; the planner has one of its own."""


def pin(owner: object, memory: Tensor, runtime: Any, settle: Callable[[], None], launch: Callable[[], object]) -> None:
    """Let a device copy from and to `memory` by itself, as long as `owner` lives. Raises `UsageError` where it is refused.

    `runtime`: the driver, as `torch.cuda.cudart()` gives it. `settle`: waits until no copy is under way any more. `launch`:
    launches a kernel.
    """
    result = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(result) != 0:
        # The runtime keeps its last error for whoever launches next, which would be the agreement of ranks on this very error.
        with suppress(RuntimeError):
            launch()
        raise UsageError(
            f"the machine refuses to pin {memory.numel()} bytes of host memory ({runtime.cudaGetErrorString(result)}); raise the "
            "limit of locked memory (ulimit -l), offload less, or use more machines."
        )
    # The finalizer holds the memory: it must not be given back while it is registered. At exit the system takes both back.
    weakref.finalize(owner, _unpin, runtime, memory, settle).atexit = False


def _unpin(runtime: Any, memory: Tensor, settle: Callable[[], None]) -> None:
    """Give memory back once the device has settled; on a thread, as a collective before that may never end."""

    def unregister() -> None:
        settle()
        runtime.cudaHostUnregister(memory.data_ptr())

    waits = threading.Thread(target=unregister, name="accordion-unpin", daemon=True)
    waits.start()
    waits.join(SETTLE_S)
