"""Errors of the user's code, shown with the user's files and lines and without Accordion's."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from accordion.errors import AccordionError, advise

OURS = (str(Path(__file__).parents[1]), str(Path(inspect.getfile(torch)).parent), "<frozen")
INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


class TaskError(AccordionError):
    """Raised by `of_the_task` for an exception of the user's code. `shown`: that exception's traceback, see `own_traceback`."""

    def __init__(self, what: str, shown: str = "") -> None:
        super().__init__(what)  # pickles restore `shown` as an attribute
        self.shown = shown


@contextmanager
def of_the_task(where: str) -> Iterator[None]:
    """Context manager that raises a `TaskError` in place of an `Exception` of its body. An `AccordionError` passes unchanged.
    `where`: the user's code that runs in the body, such as "loss(model, batch)", for the message."""
    try:
        yield
    except AccordionError:
        raise
    except Exception as error:
        advise(error)
        raise TaskError(f"the error above was raised by the task's code in {where}.", own_traceback(error)) from error


def is_own(error: BaseException) -> bool:
    """Return True if `error` passed through the user's code: a file outside of Accordion, torch, Python and site-packages."""
    files = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    return any(not name.startswith((*OURS, *INSTALLED)) for name in files)


def own_traceback(error: BaseException) -> str:
    """Return the traceback of `error` as text: the user's frames, or if there are none, all but Accordion's and torch's."""
    others = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OURS)]
    frames = [f for f in others if not f.filename.startswith(INSTALLED)] or others
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*head, *traceback.format_exception_only(error)])
