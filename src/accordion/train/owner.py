"""Whose a run folder is: a lock that goes with the process that holds it, in a file that says who that is."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accordion.errors import UsageError
from accordion.files import is_open_at

FILE = ".owner"  # in the folder; after a kill it stays behind, the lock on it does not
PATIENCE_S = 5.0  # in which a job that was ended just now is gone
BEAT_S = 5.0  # between two signs of life in the file
SILENCE_S = 4 * BEAT_S  # where a lock alone does not tell, an owner is gone that gave no sign of life for so long
SETTLE_S = 1.0  # without locks: in which another one that took the file in the same moment shows
LOOK_S = 0.2
# flock's answers where a file system has no locks, or its lock server none to give (NFS, FUSE, Lustre without `-o flock`).
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOwner:
    """A process that has a folder. `job`: what its launcher calls the job, on all hosts and over restarts alike."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    since: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))
    job: str | None = None
    word: str = field(default_factory=lambda: secrets.token_hex(8))  # that no other owner has

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
    """Raise `UsageError` where another living job has one of `folders`, said as the setting that named it; changes nothing.

    An owner that only its signs of life can tell from a dead one is left to `Claim`.
    """
    for setting, folder in folders.items():
        until = time.monotonic() + PATIENCE_S
        while (holder := holder_of(folder)) is not None and (job is None or holder.job != job):
            if time.monotonic() > until:
                raise _taken(setting, folder, holder)
            time.sleep(LOOK_S)


def holder_of(folder: Path) -> FolderOwner | None:
    """Who holds the lock on `folder`'s file now; None also where its file system has no locks, see `lives_by_signs`."""
    try:
        handle = os.open(folder / FILE, os.O_RDWR)  # NFS locks no file that is not open for writing
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(folder)[0] or _unknown()
    except OSError:
        return None
    finally:
        os.close(handle)
    return None


def lives_by_signs(folder: Path) -> bool:
    """Whether the owner of `folder` gave a sign of life of late, by this machine's clock; without waiting for the next one."""
    try:
        return time.time() - (folder / FILE).stat().st_mtime < SILENCE_S
    except OSError:
        return False


class Claim:
    """Owns folders for the life of this process, or until `release`: a locked file in each, and a thread of signs of life."""

    def __init__(self, folders: Mapping[str, Path], job: str | None, wait_s: float, say: Say) -> None:
        """Take `folders`, which exist, each under the setting that named it. Raises `UsageError` where another job has one.

        An owner that is dead, or that ends within a few seconds, or an earlier start of this same job that ends within `wait_s`,
        is followed. The kernel drops the lock of a process that ends, and a server that of a host. Where a file system has no
        locks, or one that other hosts do not see, the owner's signs of life tell.
        """
        self._mine, self._say = FolderOwner(job=job), say
        self._one_at_a_time = threading.Lock()  # of signs of life and the release: handles are closed between them
        self._held: dict[str, tuple[Path, int]] = {}
        self._done = threading.Event()
        self._beats = 0
        seen = set[Path]()
        try:
            for setting, folder in folders.items():
                if (real := folder.resolve()) not in seen:
                    seen.add(real)
                    self._held[setting] = real, self._wait(setting, real, wait_s)
        except BaseException:
            self.release()
            raise
        threading.Thread(target=self._beat, name="accordion-owner", daemon=True).start()

    def release(self) -> None:
        """Give the folders back and leave no file. Not while a thread of this job may write, as after a failure."""
        self._done.set()
        with self._one_at_a_time:
            while self._held:
                folder, handle = self._held.popitem()[1]
                if is_open_at(handle, folder / FILE) and _is_of(self._mine, folder):
                    (folder / FILE).unlink(missing_ok=True)
                os.close(handle)

    def _wait(self, setting: str, folder: Path, wait_s: float) -> int:
        began, told = time.monotonic(), False
        while isinstance(got := self._take(folder), FolderOwner):
            again = got.job is not None and got.job == self._mine.job
            if time.monotonic() - began > (wait_s if again else PATIENCE_S):
                raise _taken(setting, folder, got)
            if again and not told and time.monotonic() - began > PATIENCE_S:
                told = True
                self._say(f"waiting for an earlier start of this job to leave {setting} {str(folder)!r}: {got}")
            time.sleep(LOOK_S)
        return got

    def _take(self, folder: Path) -> int | FolderOwner:
        """The handle of the locked file, or who has it."""
        path = folder / FILE
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UsageError(
                f"{str(path)!r}, which says whose the folder is, cannot be opened: {error.strerror}."
            ) from None
        kept = False
        try:
            locks = True
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return _read(folder)[0] or _unknown()
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise UsageError(f"{str(path)!r} cannot be locked: {error.strerror}.") from None
                locks = False
            if not is_open_at(handle, path):
                return _unknown()  # the one before removed it as it ended: look again
            before, text = _read(folder)
            left_here = locks and before is not None and before.host == self._mine.host
            if text and not left_here and _lives(folder):  # a text that names nobody may be half of a sign of life
                return before or _read(folder)[0] or _unknown()
            self._write(handle)
            if not locks:
                time.sleep(SETTLE_S)
                if not _is_of(self._mine, folder):
                    return _read(folder)[0] or _unknown()
                self._say(
                    f"the file system of {str(folder)!r} has no locks: signs of life in {FILE} keep other jobs out"
                )
            kept = True
            return handle
        finally:
            if not kept:
                os.close(handle)

    def _write(self, handle: int) -> None:
        self._beats += 1
        text = json.dumps({**asdict(self._mine), "beats": self._beats}).encode()
        try:
            os.pwrite(handle, text, 0)
            os.ftruncate(handle, len(text))
        except OSError:  # a full disk: the lock holds all the same
            pass

    def _beat(self) -> None:
        while not self._done.wait(BEAT_S):
            with self._one_at_a_time:
                for setting, (folder, handle) in list(self._held.items()):
                    if is_open_at(handle, folder / FILE) and (_is_of(self._mine, folder) or _read(folder)[0] is None):
                        self._write(handle)
                    elif folder.is_dir():
                        self._again(setting, folder, handle)

    def _again(self, setting: str, folder: Path, handle: int) -> None:
        """The file was removed, with the folder perhaps, or written by another: have it again, or end before two jobs write."""
        try:
            got = self._take(folder)
        except UsageError:  # no room, no permission: nobody else has it either
            return
        if not isinstance(got, FolderOwner):
            self._held[setting] = folder, got
            os.close(handle)
        elif got.word not in (self._mine.word, ""):
            print(
                f"accordion: stopped: {setting} {str(folder)!r} was taken from this job while it ran; it is in use by {got}.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)


def _taken(setting: str, folder: Path, holder: FolderOwner) -> UsageError:
    return UsageError(
        f"{setting} {str(folder)!r} is in use by another job: {holder}; wait until it ends, or take another {setting}."
    )


def _unknown() -> FolderOwner:
    """One that has the lock and has not said its name yet."""
    return FolderOwner(host="", pid=0, since="", word="")


def _read(folder: Path) -> tuple[FolderOwner | None, bytes]:
    """Who wrote the file last, None where nobody or where it cannot be read; and all of it."""
    try:
        text = (folder / FILE).read_bytes()
        said = json.loads(text)
        return FolderOwner(**{key: said[key] for key in ("host", "pid", "since", "job", "word")}), text
    except OSError:
        return None, b""
    except (ValueError, KeyError, TypeError):
        return None, text


def _is_of(owner: FolderOwner, folder: Path) -> bool:
    found = _read(folder)[0]
    return found is not None and found.word == owner.word


def _lives(folder: Path) -> bool:
    """Whether the file changes; clocks of hosts may differ, so it is watched."""
    before, until = _read(folder)[1], time.monotonic() + SILENCE_S
    while time.monotonic() < until:
        time.sleep(LOOK_S)
        if _read(folder)[1] != before:
            return True
    return False
