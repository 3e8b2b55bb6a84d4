"""The errors that callers may catch, in one class hierarchy, and functions that word messages of errors."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec


class AccordionError(Exception):
    """Base class of all errors that this package defines."""


class CheckpointError(AccordionError):
    """A checkpoint cannot be written, does not exist, is damaged or is of another model; the message names what is wrong."""


class DivergenceError(AccordionError):
    """Ranks differ in something that must be equal on all, or wait for a rank that failed. In general all ranks raise this.

    `of_rank`: the rank whose failure or end caused this error; None if there is no such rank. `doing`: the collective in which
    this rank was, such as "gathers unit 3 (layers.3) in the forward of step 7"; "" if that is not known.
    """

    of_rank: int | None = None
    doing: str = ""


class OffloadError(AccordionError):
    """Offloaded state cannot be read or written; the message names the file or folder. Checkpoints are not affected."""


class UsageError(AccordionError, ValueError):
    """The caller asked for something impossible; the message says what was asked, what was found and what to do."""


class AssertedUsageError(UsageError, AssertionError):
    """A `UsageError` that is an AssertionError too, for callers that catch the AssertionError of torch's FSDP2."""


class NotInstalledError(UsageError, ImportError):
    """A package that an optional part needs is not installed; the message names the extra with which pip installs it."""


class NonFiniteError(AccordionError, ArithmeticError):
    """NaN or inf. Raised on every rank: after `shard(debug="finite")`, with the unit and phase in which the first one occurred;
    by `clip_grad_norm_(error_if_nonfinite=True)`, if the norm is NaN or inf; by `accordion train`, if loss or norm is."""


MIXED = "got mixed torch.Tensor and DTensor"  # in torch's error if a sharded parameter meets a plain tensor
WAYS_OUT = (
    "Outside of its unit's forward, a sharded parameter is a DTensor of which each rank holds some rows. Write a loss on weights "
    "as `weight.pow(2).sum().full_tensor()`; move other code into the model's forward, or make its method an entry point with "
    "`accordion.entry_point(module, 'name of the method')`; or read parameters on all ranks with `param.full_tensor()` or "
    "`with accordion.full_params(model):`. See docs/errors.md."
)


def advise(error: BaseException) -> bool:
    """Add the note `WAYS_OUT` to `error` and return True, if it is torch's error about mixed Tensor and DTensor. For any other
    error, and for one that has the note already, do nothing and return False."""
    is_new = MIXED in str(error) and WAYS_OUT not in getattr(error, "__notes__", ())
    if is_new:
        error.add_note(WAYS_OUT)
    return is_new


def some_of(words: Sequence[str], most: int, between: str = ", ") -> str:
    """Return a text with the first `most` of `words`, joined by `between`. If there are more words, it ends in "and N more"."""
    return between.join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def nearest(word: str, choices: Mapping[str, object] | list[str]) -> str:
    """Return the end of a message about a wrong `word`, with all `choices`: "did you mean 'bf16'? valid: fp32, bf16." The
    question is left out if no choice is similar."""
    close = get_close_matches(word, [choice for choice in choices if choice != word], n=1, cutoff=0.5)
    return (f"did you mean {close[0]!r}? " if close else "") + f"valid: {', '.join(choices)}."


def not_installed(what: str, packages: Sequence[str], extra: str) -> NotInstalledError:
    """Return the error for `what`, which needs the missing `packages`. `extra`: the extra with which pip installs these."""
    return NotInstalledError(
        f"{what} needs {', '.join(packages)}, not installed here; pip install 'accordion-fsdp[{extra}]'."
    )


def check_installed(what: str, packages: Iterable[str], extra: str) -> None:
    """Raise `NotInstalledError` if `packages` that `what` needs are missing. Imports none. `extra`: the extra for pip."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise not_installed(what, missing, extra)
