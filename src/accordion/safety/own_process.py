"""Effects on the whole process, for processes that `accordion train`, `run` and `bench` started."""

import contextlib
import ctypes

import torch

# As glibc's malloc.h has them.
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
# Blocks up to it come from the heap, and as much may be free at its end.
KEPT_BYTES = 2**30


def take_process() -> None:
    """Set what `shard` leaves alone in a process of somebody else."""
    if not torch.accelerator.is_available():
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Keep freed host memory with this process for the next allocation, as an accelerator's allocator does.

    Full parameters and gradients are allocated and freed with every unit. glibc returns what is free at the end of its heap to
    the system, and large blocks at once; the system clears each page when it is touched anew, in the middle of a copy. With two
    ranks of a 30 M-parameter GPT that was 16,416 pages a step and rank (64 MiB); without, 0.87 to 0.89 of a step's processor
    time is left (docs/performance.md). `malloc_trim(0)` gives back what is free. Another C library is left as it is.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):
        library = ctypes.CDLL(None)
        for threshold in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            library.mallopt(threshold, KEPT_BYTES)
