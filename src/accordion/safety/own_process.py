"""Settings of a whole process that `accordion train`, `run` or `bench` started."""

import contextlib
import ctypes

import torch

# The numbers of these options in glibc's malloc.h.
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
# Blocks up to this size come from the heap, which may have so many free bytes at its end.
KEPT_BYTES = 2**30


def keep_freed_memory() -> None:
    """Keep freed host memory in this process for its next allocation. Does nothing if an accelerator is available.

    Full parameters and gradients are allocated and freed with every unit. By default glibc returns their memory to the system,
    which clears each page when it is touched again. Without that, a step of a small GPT takes 0.87 to 0.89 of its processor
    time (docs/performance.md). `malloc_trim(0)` returns free memory. Other C libraries are left unchanged.
    """
    if torch.accelerator.is_available():
        return
    with contextlib.suppress(OSError, TypeError, AttributeError):
        library = ctypes.CDLL(None)
        for threshold in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            library.mallopt(threshold, KEPT_BYTES)
