"""Folders in file systems, also in those that machines share."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accordion.checkpoint import claims
from accordion.checkpoint.format import MANIFEST
from accordion.errors import CheckpointError


class Local:
    """A folder in a file system, with the files of one checkpoint or with several checkpoints as folders.

    To save, the first rank calls `begin`, which returns a hidden folder that owns the `lock` on the name of the checkpoint
    `target`; other ranks then call `begun`. Ranks `create` their files there. At the end the first rank calls `commit`, which
    renames the folder to `target`, or `discard`.
    """

    def __init__(self, path: Path, target: Path | None = None, lock: claims.NameLock | None = None) -> None:
        self.path, self._target, self._lock = path, target, lock

    def __str__(self) -> str:
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        """Return {name of file: bytes}. Raises `FileNotFoundError` or `NotADirectoryError` if this is no folder."""
        sizes = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another job may remove it meanwhile
                    if entry.is_file():
                        sizes[entry.name] = entry.stat().st_size
        return sizes

    def folders(self) -> list[str]:
        """Return the names of the folders in this folder, except hidden ones. A checkpoint that a save is replacing is included.
        Return [] if this folder is missing. Raises `NotADirectoryError` if it is a file."""
        names: dict[str, None] = {}
        with suppress(FileNotFoundError):
            for _ in range(2):  # a folder that is renamed meanwhile may be missing in one listing
                with os.scandir(self.path) as entries:
                    for entry in entries:
                        name = claims.replaced(entry.name) or entry.name
                        if name[0] != "." and os.path.isdir(entry):
                            names[name] = None
        return list(names)

    def foreign(self) -> list[str]:
        """Return the names of files and folders in this folder that no save writes; [] if there is no such folder."""
        return claims.foreign_in(self.path)

    def inside(self, name: str) -> Local:
        return Local(self.path / name)

    def open(self, name: str) -> LocalReader:
        return LocalReader(self.path / name)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def written_at(self, name: str) -> int:
        """Return the time in ns at which a file was last written."""
        return (self.path / name).stat().st_mtime_ns

    def mark(self) -> tuple[int, ...] | None:
        """Return a value that changes if a save replaces the checkpoint in this folder; None if it has none."""
        try:
            stat = os.stat(self.path / MANIFEST)
        except OSError:
            return None
        return stat.st_dev, stat.st_ino, stat.st_mtime_ns

    def replaced(self) -> Local | None:
        """Return the hidden folder with the older checkpoint that a save, running or killed, replaces; None without one."""
        old = Local(claims.hidden(self.path, "old"))
        return old if old.mark() else None

    def begin(self, save: str) -> Local:
        """Lock this folder's name, remove leftovers of killed saves, and return a new hidden folder for a checkpoint of that
        name. `save`: 8 hexadecimal digits, unique for each save, so that no two saves write into one folder.

        Missing parent folders are created. An older checkpoint that a killed save has renamed gets its name back. Raises
        `CheckpointError` if anything but a checkpoint or an empty folder has the name, or if another job is saving under it.
        """
        path = self.path
        claims.check_free(path)
        missing = [above for above in path.parents if not above.exists()]
        if missing:
            path.parent.mkdir(parents=True, exist_ok=True)
        for above in missing:
            _sync(above.parent)
        lock = claims.NameLock.take(path, claims.LOCK_TIMEOUT_S)
        try:
            if not os.path.lexists(path) and (old := self.replaced()) is not None:
                old.path.rename(path)
            left = [draft for name, draft in claims.drafts(path.parent) if name == path.name]
            for folder in (claims.hidden(path, "old"), *left):
                claims.remove_quietly(folder)
            begun = Local(self.begun(save).path, path, lock)
            begun.path.mkdir()
        except BaseException:
            lock.release()
            raise
        return begun

    def begun(self, save: str) -> Local:
        """Return the hidden folder that `begin(save)` creates on the first rank, for other ranks: without the lock."""
        return Local(claims.hidden(self.path, f"{save}.tmp"))

    @contextmanager
    def create(self, name: str) -> Iterator[LocalWriter]:
        """Context manager that yields a new file with `write(memoryview)`; after its body the file is on the disk. Raises
        `CheckpointError` if this folder does not exist."""
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}, which rank 0 created, does not exist on this rank; all ranks must share the storage, and no other "
                "job may save under this name."
            )
        with _with_path(self.path / name):
            handle = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                yield LocalWriter(handle)
                os.fsync(handle)
            finally:
                os.close(handle)

    def commit(self, manifest: bytes) -> None:
        """Write the manifest into this folder, which `begin` returned, and rename the folder to the checkpoint's name. Afterwards
        remove an older checkpoint and unlock the name. Raises `CheckpointError` if another program has taken the name."""
        assert self._target is not None
        assert self._lock is not None
        target, old = self._target, claims.hidden(self._target, "old")
        with self.create(MANIFEST) as file:
            file.write(memoryview(manifest))
        time_ns = time.time_ns()
        # The precise time, because the file system's clock is so coarse that two saves may have the same one.
        with suppress(OSError):
            os.utime(self.path / MANIFEST, ns=(time_ns, time_ns))
        _sync(self.path)
        claims.check_free(target)
        try:
            if os.path.lexists(target):
                target.rename(old)
            self.path.rename(target)
        except OSError as error:
            with suppress(OSError):  # the older checkpoint gets its name back
                old.rename(target)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            raise CheckpointError(  # possible on a file system without locks
                f"{target} was saved by another job at the same time; no other job may save under this name."
            ) from error
        _sync(target.parent)
        claims.remove_quietly(old)
        self._lock.release()

    def discard(self) -> None:
        """Remove this folder, which `begin` returned, and unlock the checkpoint's name. Raises `OSError` if removing fails."""
        try:
            if self.path.exists():
                claims.remove(self.path)
        finally:
            if self._lock is not None:
                self._lock.release()

    def remove(self, mark: object) -> None:
        """Remove this checkpoint. Does nothing if a job is saving under its name, or if `mark()` no longer equals `mark`, because
        a save has replaced the checkpoint. Raises `OSError` if removing fails."""
        try:
            lock = claims.NameLock.take(self.path.with_name(claims.replaced(self.path.name) or self.path.name))
        except CheckpointError:
            return
        except OSError:  # on a full disk, where no lock file can be written, the removal makes space
            lock = None
        try:
            if self.mark() == mark:
                claims.remove(self.path)
        finally:
            if lock is not None:
                lock.release()


class LocalWriter:
    def __init__(self, handle: int) -> None:
        self._handle, self._at = handle, 0

    def write(self, data: memoryview, /) -> None:
        while data:
            count = os.pwrite(self._handle, data, self._at)
            self._at, data = self._at + count, data[count:]


class LocalReader:
    """A file that is open for reading, until `close`."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self.num_bytes = os.fstat(self._file.fileno()).st_size

    def read_into(self, into: memoryview, at: int) -> None:
        while into:
            count = os.preadv(self._file.fileno(), [into], at)
            if count == 0:
                raise OSError(f"it ends at byte {at}")
            into, at = into[count:], at + count

    def close(self) -> None:
        self._file.close()


def _sync(folder: Path) -> None:
    """Wait until the names in `folder`, not the files' contents, are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with _with_path(folder):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _with_path(path: Path) -> Iterator[None]:
    """Context manager that turns an `OSError` that names no file, such as that of a full disk, into one that names `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
