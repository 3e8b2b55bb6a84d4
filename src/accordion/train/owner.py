"""Ownership of run folders: a lease of `filelock` in each, next to a file that says who has it."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event

from filelock import SoftFileLease, Timeout

from accordion.errors import UsageError
from accordion.train.tokens import write_whole

FILE, LEASE = ".owner", ".owner.lease"  # in the folder; after a kill they stay behind
PATIENCE_S = 5.0  # in which a job that was ended just now is gone
BEAT_S = 5.0  # between two refreshes of a lease
SILENCE_S = 4 * BEAT_S  # after which a lease that is not refreshed may be taken over
LOOK_S = 0.2
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOwner:
    """A process that has a folder. `job`: its launcher's name of the job, the same on all hosts and after restarts."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    since: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))
    job: str | None = None

    def __str__(self) -> str:
        return (
            f"process {self.pid} on {self.host}, since {self.since}"
            if self.pid
            else "a process that has yet to say its name"
        )


def job_of(environ: Mapping[str, str]) -> str | None:
    """What the launcher calls this job; None where it has no name of its own. A restart keeps it, so that it waits for itself."""
    torchrun = environ.get("TORCHELASTIC_RUN_ID", "none")
    if torchrun != "none":
        return f"torchrun {torchrun}"
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    return None if job is None or step is None else f"srun {job}.{step}"


def check_free(folders: Mapping[str, Path], job: str | None) -> None:
    """Raise `UsageError` if another living job has one of `folders`, named as the setting in which it is; changes nothing.

    An owner of which this host cannot tell if it lives is left to `Claim`.
    """
    for setting, folder in folders.items():
        until = time.monotonic() + PATIENCE_S
        while (holder := holder_of(folder)) is not None and (job is None or holder.job != job):
            if time.monotonic() > until:
                raise _taken(setting, folder, holder)
            time.sleep(LOOK_S)


def holder_of(folder: Path) -> FolderOwner | None:
    """Return the owner of `folder` if its lease was refreshed of late by this host's clock, and it has not died on this host."""
    refreshed = _refreshed(folder)
    if refreshed is None or abs(time.time() - refreshed) > SILENCE_S:
        return None
    holder = _read(folder)
    if holder.host == socket.gethostname():
        try:
            os.kill(holder.pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # of another user
            pass
    return holder


class Claim:
    """Owns folders for the life of this process, or until `release`."""

    def __init__(self, folders: Mapping[str, Path], job: str | None, wait_s: float, say: Say) -> None:
        """Take `folders`, which exist, each under the setting that named it. Raises `UsageError` if another job has one.

        An owner that is dead is followed, at once on its own host and elsewhere when it has been silent for `SILENCE_S`. So are
        one that ends within a few seconds, and an earlier start of this same job that ends within `wait_s`.
        """
        self._mine, self._say, self._released = FolderOwner(job=job), say, Event()
        self._leases: dict[Path, SoftFileLease] = {}
        try:
            for setting, folder in folders.items():
                if (real := folder.resolve()) not in self._leases:
                    self._wait(setting, real, wait_s)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the folders back and leave no file. Not while a thread of this job may write, as after a failure."""
        self._released.set()
        for folder, lease in self._leases.items():
            if _read(folder) == self._mine:
                (folder / FILE).unlink(missing_ok=True)
            lease.release()
        self._leases.clear()

    def _wait(self, setting: str, folder: Path, wait_s: float) -> None:
        began, told, refreshed = time.monotonic(), False, _refreshed(folder)
        while not self._take(setting, folder):
            holder, waited = _read(folder), time.monotonic() - began
            again = holder.job is not None and holder.job == self._mine.job
            lives = _refreshed(folder) != refreshed
            if waited > (wait_s if again else PATIENCE_S if lives else PATIENCE_S + SILENCE_S):
                raise _taken(setting, folder, holder)
            if again and not told and waited > PATIENCE_S:
                told = True
                self._say(f"waiting for an earlier start of this job to leave {setting} {str(folder)!r}: {holder}")
            time.sleep(LOOK_S)

    def _take(self, setting: str, folder: Path) -> bool:
        lease = self._leases.get(folder) or SoftFileLease(
            folder / LEASE,
            lease_duration=SILENCE_S,
            heartbeat_interval=BEAT_S,
            thread_local=False,
            on_compromise=lambda _: self._again(setting, folder),
        )
        self._leases[folder] = lease
        try:
            lease.acquire(blocking=False)
            write_whole(folder / FILE, json.dumps(asdict(self._mine)))
        except Timeout:
            return False
        except OSError as error:
            raise UsageError(
                f"{str(error.filename or folder / FILE)!r}, which says whose the folder is, cannot be opened: {error.strerror}."
            ) from None
        return True

    def _again(self, setting: str, folder: Path) -> None:
        """The lease was removed, with the folder perhaps, or taken over: have it again, or end before two jobs write."""
        while not self._released.wait(BEAT_S):
            if not folder.is_dir():  # which filelock would make again
                continue
            with suppress(OSError):
                self._leases[folder].release()
            try:
                if self._take(setting, folder):
                    return
            except UsageError:  # no folder, no permission: nobody else has it either
                continue
            print(
                f"accordion: stopped: {setting} {str(folder)!r} was taken from this job while it ran; it is in use by "
                f"{_read(folder)}.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)


def _taken(setting: str, folder: Path, holder: FolderOwner) -> UsageError:
    return UsageError(
        f"{setting} {str(folder)!r} is in use by another job: {holder}; wait until it ends, or take another {setting}."
    )


def _refreshed(folder: Path) -> float | None:
    """Return when the lease of `folder` was refreshed last, by its file system's clock; None if there is none."""
    with suppress(OSError):
        return (folder / LEASE).stat().st_mtime
    return None


def _read(folder: Path) -> FolderOwner:
    """Return who wrote the file of `folder`; one without a name if nobody did, or it cannot be read."""
    try:
        said = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return FolderOwner(**{key: said[key] for key in ("host", "pid", "since", "job")})
    except (OSError, ValueError, KeyError, TypeError):
        return FolderOwner(host="", pid=0, since="")
