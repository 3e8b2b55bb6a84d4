"""Ownership of run folders, so that only one job writes to them: a file lock, on a file that names its owner."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from filelock import FileLock, Timeout

from accordion.errors import UsageError

FILE = ".owner"  # in the folder; a killed job leaves it
EXIT_S = 5.0  # time for a job that was just ended to exit
POLL_S = 0.2


def check_free(folders: Mapping[str, Path], job: str | None) -> None:
    """Raise `UsageError` if another job owns one of `folders` (configuration key -> folder) and does not exit within `EXIT_S`.
    A folder that an earlier start of this job owns counts as free. `job`: the launcher's name for this job, or None."""
    for setting, folder in folders.items():
        until = time.monotonic() + EXIT_S
        while (owner := holder_of(folder)) is not None and (job is None or not owner.endswith(f" of {job}")):
            if time.monotonic() > until:
                raise _taken(setting, folder, owner)
            time.sleep(POLL_S)


def holder_of(folder: Path) -> str | None:
    """Return a text that names the process that owns `folder`; None if no process does, or if this cannot be found out."""
    if not (folder / FILE).exists():
        return None
    try:
        with FileLock(folder / FILE, blocking=False):
            return None
    except Timeout:
        return _name_in(folder)
    except OSError:
        return None


def claim(folders: Mapping[str, Path], job: str | None, wait_s: float, say: Callable[[str], None]) -> ExitStack:
    """Take ownership of `folders` (configuration key -> existing folder) until `close` of the returned stack, or until this
    process ends. Call `close` only when no thread of this job writes there any more. If another job owns a folder, wait up to
    `EXIT_S` for it to exit; if an earlier start of this job does, up to `wait_s` seconds. Raises `UsageError` if a folder does
    not become free or its lock file cannot be opened; then none is taken. `job`: the launcher's name for this job, or None.
    `say`: function that is called with a text if the wait for an earlier start takes longer than `EXIT_S`."""
    taken = set[Path]()
    with ExitStack() as stack:
        for setting, folder in folders.items():
            if (real := folder.resolve()) not in taken:
                taken.add(real)
                stack.callback(_locked(setting, real, job, wait_s, say).release)
                stack.callback((real / FILE).unlink, missing_ok=True)
        return stack.pop_all()


def _locked(setting: str, folder: Path, job: str | None, wait_s: float, say: Callable[[str], None]) -> FileLock:
    lock, began, is_reported = FileLock(folder / FILE, thread_local=False), time.monotonic(), False
    while True:
        try:
            lock.acquire(blocking=False)
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            name = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
            (folder / FILE).write_text(name if job is None else f"{name} of {job}")
            return lock
        except Timeout:
            pass
        except OSError as error:
            raise UsageError(
                f"{str(error.filename or folder / FILE)!r}, which names the folder's owner, cannot be opened: {error.strerror}."
            ) from None
        owner, waited = _name_in(folder), time.monotonic() - began
        again = job is not None and owner.endswith(f" of {job}")
        if waited > (wait_s if again else EXIT_S):
            raise _taken(setting, folder, owner)
        if again and not is_reported and waited > EXIT_S:
            is_reported = True
            say(f"waiting for an earlier start of this job to release {setting} {str(folder)!r}: {owner}")
        time.sleep(POLL_S)


def _name_in(folder: Path) -> str:
    try:
        name = (folder / FILE).read_text()
    except OSError:  # released meanwhile
        name = ""
    return name or "a process that has not written its name yet"


def _taken(setting: str, folder: Path, owner: str) -> UsageError:
    return UsageError(
        f"{setting} {str(folder)!r} is in use by another job: {owner}; wait until it ends, or take another {setting}."
    )
