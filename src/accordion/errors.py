"""The errors that callers may catch, as one tree."""

from collections.abc import Mapping
from difflib import get_close_matches


class AccordionError(Exception):
    """Anything that this package raises on purpose and that is not a plain `ValueError`."""


class CheckpointError(AccordionError):
    """A folder is no checkpoint, is damaged, or belongs to another model; the message lists every tensor concerned."""


class DivergenceError(AccordionError):
    """Ranks disagree on what must be equal on all of them; raised on every rank, naming both values.

    `of_rank`: the rank that failed or ended by itself, where this error only follows from that; else None.
    """

    of_rank: int | None = None


class OffloadError(AccordionError):
    """What rests off the device cannot be read or written; names the place. No checkpoint is touched."""


class UsageError(AccordionError, ValueError):
    """The caller asked for something that cannot be done; says what was asked, what was found and what to do."""


class AssertedUsageError(UsageError, AssertionError):
    """A `UsageError` where torch's FSDP2 raises an AssertionError, for programs that catch that."""


class NonFiniteError(AccordionError, ArithmeticError):
    """NaN or inf, raised on every rank: `shard(debug="finite")` says in which unit and phase it came up first, and
    `clip_grad_norm_(error_if_nonfinite=True)` that the norm of the gradients is.
    """


def nearest(word: str, choices: Mapping[str, object] | list[str]) -> str:
    """A sentence naming the valid choices, the nearest one first where there is one."""
    close = get_close_matches(word, [choice for choice in choices if choice != word], n=1, cutoff=0.5)
    return (f"did you mean {close[0]!r}? " if close else "") + f"valid: {', '.join(choices)}."
