"""Ownership of run folders, so that only one job writes to them: a `filelock` lease, and a file that names the owner."""

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

FILE, LEASE = ".owner", ".owner.lease"  # in the folder; a killed job leaves them
EXIT_S = 5.0  # for a job that was just ended to exit
REFRESH_S = 5.0  # between two refreshes of a lease
EXPIRY_S = 4 * REFRESH_S  # after which a lease that was not refreshed may be taken over
POLL_S = 0.2
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOwner:
    """A process that owns a folder. `job`: the launcher's name for its job, equal on all hosts and after a restart."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    since: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))
    job: str | None = None

    def __str__(self) -> str:
        return (
            f"process {self.pid} on {self.host}, since {self.since}"
            if self.pid
            else "a process that has not written its name yet"
        )


def job_of(environ: Mapping[str, str]) -> str | None:
    """Return the launcher's name for this job; None if it has none. It does not change when the job restarts."""
    torchrun = environ.get("TORCHELASTIC_RUN_ID", "none")
    if torchrun != "none":
        return f"torchrun {torchrun}"
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    return None if job is None or step is None else f"srun {job}.{step}"


def check_free(folders: Mapping[str, Path], job: str | None) -> None:
    """Raise `UsageError` if a live owner of another job has one of `folders` (setting -> folder). Changes nothing. Waits `EXIT_S`
    for the owner to exit."""
    for setting, folder in folders.items():
        until = time.monotonic() + EXIT_S
        while (holder := holder_of(folder)) is not None and (job is None or holder.job != job):
            if time.monotonic() > until:
                raise _taken(setting, folder, holder)
            time.sleep(POLL_S)


def holder_of(folder: Path) -> FolderOwner | None:
    """Return the live owner of `folder`; None if there is none. An owner counts as dead if its lease has expired by this host's
    clock, or if it was a process of this host that ended."""
    refreshed = _refreshed(folder)
    if refreshed is None or abs(time.time() - refreshed) > EXPIRY_S:
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
    """Ownership of folders until `release`, or until this process ends."""

    def __init__(self, folders: Mapping[str, Path], job: str | None, wait_s: float, say: Say) -> None:
        """Take `folders` (setting -> existing folder). Raises `UsageError` if another job owns one.

        Takes over from a dead owner (of another host, `EXPIRY_S` after its last refresh), from one that exits within
        `EXIT_S`, or from an earlier start of the same job that exits within `wait_s`.
        """
        self._owner, self._say, self._released = FolderOwner(job=job), say, Event()
        self._leases: dict[Path, SoftFileLease] = {}
        try:
            for setting, folder in folders.items():
                if (real := folder.resolve()) not in self._leases:
                    self._wait(setting, real, wait_s)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the folders and remove the owner files. Call it only when no thread of this job writes any more."""
        self._released.set()
        for folder, lease in self._leases.items():
            if _read(folder) == self._owner:
                (folder / FILE).unlink(missing_ok=True)
            lease.release()
        self._leases.clear()

    def _wait(self, setting: str, folder: Path, wait_s: float) -> None:
        began, is_reported, refreshed = time.monotonic(), False, _refreshed(folder)
        while not self._take(setting, folder):
            holder, waited = _read(folder), time.monotonic() - began
            again = holder.job is not None and holder.job == self._owner.job
            lives = _refreshed(folder) != refreshed
            if waited > (wait_s if again else EXIT_S if lives else EXIT_S + EXPIRY_S):
                raise _taken(setting, folder, holder)
            if again and not is_reported and waited > EXIT_S:
                is_reported = True
                self._say(f"waiting for an earlier start of this job to release {setting} {str(folder)!r}: {holder}")
            time.sleep(POLL_S)

    def _take(self, setting: str, folder: Path) -> bool:
        lease = self._leases.get(folder) or SoftFileLease(
            folder / LEASE,
            lease_duration=EXPIRY_S,
            heartbeat_interval=REFRESH_S,
            thread_local=False,
            on_compromise=lambda _: self._again(setting, folder),
        )
        self._leases[folder] = lease
        try:
            lease.acquire(blocking=False)
            write_whole(folder / FILE, json.dumps(asdict(self._owner)))
        except Timeout:
            return False
        except OSError as error:
            raise UsageError(
                f"{str(error.filename or folder / FILE)!r}, which names the folder's owner, cannot be opened: {error.strerror}."
            ) from None
        return True

    def _again(self, setting: str, folder: Path) -> None:
        """Take a lease again that was removed; if another job has taken it, exit before two jobs write to the folder."""
        while not self._released.wait(REFRESH_S):
            if not folder.is_dir():  # filelock would create it again
                continue
            with suppress(OSError):
                self._leases[folder].release()
            try:
                if self._take(setting, folder):
                    return
            except UsageError:  # no folder or no permission: nobody else can own it
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
    """Return the time at which the lease of `folder` was refreshed, by the clock of its file system; None without lease."""
    with suppress(OSError):
        return (folder / LEASE).stat().st_mtime
    return None


def _read(folder: Path) -> FolderOwner:
    """Return the owner in the owner file of `folder`; one with empty fields if the file cannot be read."""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return FolderOwner(**{key: content[key] for key in ("host", "pid", "since", "job")})
    except (OSError, ValueError, KeyError, TypeError):
        return FolderOwner(host="", pid=0, since="")
