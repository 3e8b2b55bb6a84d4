"""Python's garbage collections, where they cost much and find nothing: while much is made, and as a process ends."""

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """No garbage collection meanwhile, for code that makes much and drops nothing: a quarter of the time of transformers'
    import, more than half of that of a large manifest."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def end_with_one_collection() -> None:
    """This process, one of our commands or its ranks, ends with one garbage collection.

    Python itself makes several then, each over all of torch and transformers: 1.0 s of a rank's end, and 0.33 s with one.
    """
    atexit.unregister(_last_collection)
    atexit.register(_last_collection)


def _last_collection() -> None:
    gc.collect()  # what is dropped in cycles says and writes what it has to at its end
    gc.freeze()
