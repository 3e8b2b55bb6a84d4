"""The errors that callers may catch, in one class hierarchy."""

from collections.abc import Mapping
from difflib import get_close_matches


class AccordionError(Exception):
    """Base class of the errors that this package raises on purpose, except plain `ValueError`s."""


class CheckpointError(AccordionError):
    """A folder is not a checkpoint, is damaged, or belongs to another model; the message lists all affected tensors."""


class DivergenceError(AccordionError):
    """Ranks differ in something that must be equal on all of them; raised on every rank, with both values.

    `of_rank`: the rank whose failure or end caused this error; None if there is no such rank.
    """

    of_rank: int | None = None


class OffloadError(AccordionError):
    """Offloaded state cannot be read or written; the message names the file or folder. Checkpoints are not affected."""


class UsageError(AccordionError, ValueError):
    """The caller asked for something impossible; the message says what was asked, what was found and what to do."""


class AssertedUsageError(UsageError, AssertionError):
    """A `UsageError` that is an AssertionError too, raised in cases in which torch's FSDP2 raises an AssertionError."""


class NonFiniteError(AccordionError, ArithmeticError):
    """NaN or inf, raised on every rank: by `shard(debug="finite")`, which names the unit and phase of the first one, and by
    `clip_grad_norm_(error_if_nonfinite=True)` if the norm of the gradients is not finite."""


def nearest(word: str, choices: Mapping[str, object] | list[str]) -> str:
    """Return "valid: " and the `choices`; before it "did you mean ...?" if one of them is similar to `word`."""
    close = get_close_matches(word, [choice for choice in choices if choice != word], n=1, cutoff=0.5)
    return (f"did you mean {close[0]!r}? " if close else "") + f"valid: {', '.join(choices)}."
