"""Errors of the user's own code, shown as their own: their files and lines, and none of ours."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from accordion.errors import AccordionError
from accordion.safety.mixed_tensors import advise

OURS = (str(Path(__file__).parents[1]), str(Path(inspect.getfile(torch)).parent), "<frozen")
INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


class TaskError(AccordionError):
    """Code of the user's failed. `shown`: its traceback, cut to the user's files, and the error."""

    def __init__(self, what: str, shown: str) -> None:
        super().__init__(what, shown)
        self.shown = shown

    def __str__(self) -> str:
        return str(self.args[0])


@contextmanager
def of_the_task(where: str) -> Iterator[None]:
    """What is raised in here and is no error of this package is the user's own. Raises `TaskError`."""
    try:
        yield
    except AccordionError:
        raise
    except Exception as error:
        advise(error)
        raise TaskError(f"the error above is of the task's own code, in {where}.", own_traceback(error)) from error


def is_own(error: BaseException) -> bool:
    """Whether code of the user's was running when it was raised: code that is not installed."""
    files = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    return any(not name.startswith((*OURS, *INSTALLED)) for name in files)


def own_traceback(error: BaseException) -> str:
    """As Python shows an error, with the frames of code that is not installed; if there are none, all but ours and torch's."""
    others = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OURS)]
    frames = [f for f in others if not f.filename.startswith(INSTALLED)] or others
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*head, *traceback.format_exception_only(error)])
