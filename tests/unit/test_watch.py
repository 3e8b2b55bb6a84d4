"""What a wait for a collective takes for its end."""

from __future__ import annotations

import pytest
import torch

from accordion.engine.collectives import Pending, alone
from accordion.engine.watch import Watch
from accordion.errors import DivergenceError


class EndsLate:
    """A work that has ended once a wait for it was given up, as any may between these two words of its backend."""

    def __init__(self, failure: str | None = None) -> None:
        self._failure = failure
        self.waits = 0

    def is_completed(self) -> bool:
        return self.waits > 0

    def wait(self, *timeout: object) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._failure is not None:
            raise RuntimeError(self._failure)


def waits_for(work: EndsLate) -> None:
    Watch([], [0]).wait(Pending(alone(torch.device("cpu")), [work]), "gathers unit 1")


def test_what_ends_while_a_wait_is_given_up_has_ended() -> None:
    work = EndsLate()
    waits_for(work)
    assert work.waits == 2


def test_what_fails_while_a_wait_is_given_up_has_failed() -> None:
    with pytest.raises(DivergenceError, match="while this rank gathers unit 1: Connection closed by peer"):
        waits_for(EndsLate("Connection closed by peer"))
