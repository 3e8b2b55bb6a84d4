"""The second process of a search."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from accordion.garbage import end_with_one_collection
from accordion.plan.search.evaluate import Evaluator, Outcome, Say, SearchTask
from accordion.plan.search.space import Choice


class SecondProcess:
    """Owns a process that is told of the search, where `subject_for` can be pickled. What it cannot do is done here."""

    def __init__(self, task: SearchTask, say: Say) -> None:
        self._task, self._say = task, say
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_one_collection)

    def __enter__(self) -> SecondProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def asked(self, work: Callable[..., Outcome], *about: Any) -> Callable[[], Outcome]:
        """Begin `work(task, *about, say)` there. Gives what waits for its end."""
        try:
            future: Future[Outcome] | None = self._pool.submit(work, self._task, *about, _quiet)
        except BrokenProcessPool:
            future = None

        def outcome() -> Outcome:
            try:
                if future is not None:
                    return future.result()
            except (
                BrokenProcessPool,
                pickle.PicklingError,
                AttributeError,
            ):  # killed, or a model that cannot be pickled
                self._say("the second process ended early; its part is searched here")
            return work(self._task, *about, self._say)

        return outcome


def _quiet(text: str) -> None:
    """Says nothing: two at once would be a jumble."""


def theirs_of(first: Sequence[Choice]) -> list[Choice]:
    """What the second process takes of these: every other way of checkpointing."""
    ways = list(dict.fromkeys(c.checkpoint_activations for c in first))
    return [c for c in first if c.checkpoint_activations in ways[1::2]]


def search_half(task: SearchTask, theirs: Sequence[Choice], say: Say) -> Outcome:
    evaluator = Evaluator(task, say)
    return evaluator.candidates(theirs), evaluator.traces.traced
