"""torchrun's rendezvous over c10d, but for one thing: a store that is out of reach ends the agent in time.

`torchrun --rdzv-backend accordion` takes what `--rdzv-backend c10d` takes. torch's agents ask the store at every look at their
ranks, and torch's client of it waits for an answer until the system gives the connection up, on Linux after a quarter of an hour
and more, whatever `read_timeout` says (2.11 to 2.13). Here `read_timeout` holds. torch imports this file with its own
rendezvous, by the entry point `torchrun.handlers`, in every program that does so: so it imports nothing of the package.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

NAME = "accordion"
READ_TIMEOUT_S = 60  # torch's own, where --rdzv-conf says nothing


def handler() -> Callable[[Any], Any]:
    """What torchrun calls with its parameters where it is told `--rdzv-backend accordion`."""
    return create


def create(params: Any) -> Any:
    """A rendezvous handler. `params`: torchrun's, of which `read_timeout` is in seconds."""
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

    inner, store = create_backend(params)
    timeout_s = params.get_as_int("read_timeout", READ_TIMEOUT_S)
    within = Within(timeout_s, f"the store of the rendezvous at {params.endpoint}")

    class Backend(RendezvousBackend):
        """c10d's, each call of which comes to an end."""

        @property
        def name(self) -> str:
            return NAME

        def get_state(self) -> Any:
            return within(inner.get_state)

        def set_state(self, state: bytes, token: Any = None) -> Any:
            return within(inner.set_state, state, token)

    return create_handler(store, Backend(), params)


class Within:
    """Calls what may not return, in a thread. Owns the thread of a call that has not."""

    def __init__(self, timeout_s: float, what: str) -> None:
        self._timeout_s, self._what = timeout_s, what
        self._one = threading.Lock()  # at a time
        self._asking: threading.Thread | None = None

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        """What `call` returns or raises; `RendezvousConnectionError` where it does neither in time, or one before did not."""
        from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

        found: list[Any] = []
        failed: list[BaseException] = []

        def ask() -> None:
            try:
                found.append(call(*args))
            except BaseException as error:
                failed.append(error)

        with self._one:
            if self._asking is None or not self._asking.is_alive():
                self._asking = threading.Thread(target=ask, name="accordion-rendezvous", daemon=True)
                self._asking.start()
                self._asking.join(self._timeout_s)
        if failed:
            raise failed[0]
        if not found:
            raise RendezvousConnectionError(
                f"{self._what} has not answered for {self._timeout_s:g} s (read_timeout of --rdzv-conf); its machine, or the "
                "network to it, is gone."
            )
        return found[0]
