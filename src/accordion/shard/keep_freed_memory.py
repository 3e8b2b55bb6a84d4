"""The heap of the C library: all that stands between torch and the system on a CPU."""

import contextlib
import ctypes

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # as glibc's malloc.h has them
KEPT_BYTES = 2**30  # blocks up to it come from the heap, and as much may be free at its end


def keep_what_is_freed() -> None:
    """Have memory that is let go stay with this process for what is asked for next, as an accelerator's allocator has it.

    Full parameters and gradients come and go with every unit. glibc hands what is free at the end of its heap back to the
    system, and large blocks at once; the system clears each page when it is touched anew, in the middle of a copy. With two
    ranks of a 30 M-parameter GPT that was 16,416 pages a step and rank (64 MiB); without, 0.87 to 0.89 of a step's processor
    time is left (docs/performance.md). `malloc_trim(0)` gives back what is free. Of the whole process; another C library is
    left as it is.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):
        library = ctypes.CDLL(None)
        for threshold in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            library.mallopt(threshold, KEPT_BYTES)
