"""Folders of checkpoints: of this machine's file systems, and of remote storage through fsspec."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from accordion.checkpoint import claims
from accordion.checkpoint.format import MANIFEST
from accordion.checkpoint.storage.direct import LocalReader, created
from accordion.errors import CheckpointError, UsageError

NUM_TRIES = 3  # to find the folder of a name, which none has between the two renames of a save
SAVING = "saving.json"  # in a folder of remote storage while a job saves there: which job, and which save
BLOCK_BYTES = 4 * 2**20  # that are fetched at once
STALE_S = 900.0  # without which a job of another machine is taken for dead


Folder: TypeAlias = "Local | Remote"
Reader: TypeAlias = "LocalReader | RemoteReader"


def folder_at(path: str | os.PathLike[str]) -> Folder:
    """The folder of a path, or of a URL such as `s3://bucket/run`, which needs the package fsspec.

    Raises `UsageError` for what is no path; the current folder is called ".".
    """
    if path is None:
        raise UsageError("the path is None; where `latest` gave it, there is no checkpoint yet.")
    try:
        text = os.fspath(path)
    except TypeError:
        raise UsageError(f"the path is a {type(path).__name__}; pass a string or a pathlib.Path.") from None
    if not isinstance(text, str) or "\0" in text:
        raise UsageError("the path is bytes, or holds a zero byte; pass a string or a pathlib.Path.")
    text = text.removeprefix("file://")
    if not text:
        raise UsageError('the path is empty; the current folder is called ".".')
    return Remote.at(text) if "://" in text else Local(Path(os.path.abspath(text)))


def checkpoint_at(path: str | os.PathLike[str]) -> Folder:
    """Return the folder to read a checkpoint from."""
    return readable(folder_at(path))


def readable(folder: Folder) -> Folder:
    """Return `folder`, or, during or after a killed replacement of its checkpoint, the folder that has the older one."""
    if isinstance(folder, Local):
        for _ in range(NUM_TRIES):
            if os.path.lexists(folder.path):
                break
            if (old := folder.replaced()) is not None:
                return old
    return folder


class Local:
    """A folder of a file system that holds the files of one checkpoint, or checkpoints.

    The one that `begin` returned owns the lock of its checkpoint's name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: claims.NameLock | None = None

    def __str__(self) -> str:
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        """Return the files and their bytes. Raises `FileNotFoundError` or `NotADirectoryError` if it is no folder."""
        found = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # it goes while we look
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def folders(self) -> list[str]:
        """Return the names of the folders in it but hidden ones, and of checkpoints that are being replaced."""
        names: dict[str, None] = {}
        with suppress(FileNotFoundError):
            for _ in range(2):  # because a folder that is renamed meanwhile may be missing in one listing
                with os.scandir(self.path) as entries:
                    for entry in entries:
                        name = claims.replaced(entry.name) or entry.name
                        if name[0] != "." and _is_folder(entry):
                            names[name] = None
        return list(names)

    def inside(self, name: str) -> Local:
        return Local(self.path / name)

    def open(self, name: str) -> Reader:
        return LocalReader(self.path / name)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def written_at(self, name: str) -> int:
        """Return when a file was last written, in ns."""
        return (self.path / name).stat().st_mtime_ns

    def mark(self) -> tuple[int, ...] | None:
        """Return a value that changes when another checkpoint takes this name; None if there is none at the moment."""
        try:
            found = os.stat(self.path / MANIFEST)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def replaced(self) -> Local | None:
        """Return the checkpoint that a save of this name was replacing when it was killed, or is replacing now, if any."""
        old = Local(claims.hidden(self.path, "old"))
        return old if old.mark() else None

    def begin(self, save: str) -> Local:
        """Return an empty folder for a new checkpoint of this name, after removing what a killed save left there.

        Raises `CheckpointError` if this name belongs to something else or another job is saving under it, `UsageError` if
        nothing can have it.

        Args:
            save: 8 hexadecimal digits that no other save has, so that no two of them ever write into one folder.
        """
        path = self.path
        claims.check_name(path)
        claims.check_free(path)
        _make(path.parent)
        lock = claims.NameLock.take(path, claims.LOCK_TIMEOUT_S)
        try:
            if not os.path.lexists(path) and (old := self.replaced()) is not None:
                old.path.rename(path)
            left = [draft for name, draft in claims.drafts(path.parent) if name == path.name]
            for folder in (claims.hidden(path, "old"), *left):
                claims.remove_quietly(folder)
            begun = self.begun(save)
            begun.path.mkdir()
        except BaseException:
            lock.release()
            raise
        begun._lock = lock
        return begun

    def begun(self, save: str) -> Local:
        """Return what `begin` returned on the rank that called it."""
        return Local(claims.hidden(self.path, f"{save}.tmp"))

    @contextmanager
    def create(self, name: str, num_bytes: int) -> Iterator[Any]:
        """Context manager for a file of `num_bytes` with `write(memoryview)`; at its end the file is on the disk."""
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}, made by rank 0, is not seen here; checkpoints need storage that all ranks share, and no other "
                "job that saves under this name."
            )
        with _with_path(self.path / name), created(self.path / name, num_bytes) as file:
            yield file

    def commit(self, begun: Folder, manifest: bytes) -> None:
        """Write the manifest into what `begin` returned on this rank, and make that the checkpoint of this name."""
        assert isinstance(begun, Local)
        with begun.create(MANIFEST, len(manifest)) as file:
            file.write(memoryview(manifest))
        now = time.time_ns()
        with suppress(OSError):  # a time of its own: file systems write the last tick's, which two saves may share
            os.utime(begun.path / MANIFEST, ns=(now, now))
        _sync(begun.path)
        claims.check_free(self.path)
        old = claims.hidden(self.path, "old")
        try:
            if os.path.lexists(self.path):
                self.path.rename(old)
            begun.path.rename(self.path)
        except OSError as error:
            with suppress(OSError):  # it was not replaced
                old.rename(self.path)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            raise CheckpointError(  # on a file system without locks
                f"{self.path} was saved by another job at the same time; no other job may save under this name."
            ) from error
        _sync(self.path.parent)
        claims.remove_quietly(old)
        if begun._lock is not None:
            begun._lock.release()

    def discard(self) -> None:
        """Remove what `begin` returned. Raises `OSError`."""
        try:
            if self.path.exists():
                claims.remove(self.path)
        finally:
            if self._lock is not None:
                self._lock.release()

    def remove(self, mark: object) -> None:
        """Remove this checkpoint, unless a job saves under its name or has done so since `mark`. Raises `OSError`."""
        try:
            lock = claims.NameLock.take(self.path.with_name(claims.replaced(self.path.name) or self.path.name))
        except CheckpointError:
            return
        except OSError:  # a full disk, on which this makes room
            lock = None
        try:
            if self.mark() == mark:
                claims.remove(self.path)
        finally:
            if lock is not None:
                lock.release()


class Remote:
    """A folder of a storage that fsspec knows; a file appears there whole, a checkpoint with its manifest."""

    def __init__(self, storage: Any, path: str, protocol: str) -> None:
        self._storage, self._path, self._protocol = storage, path.rstrip("/"), protocol
        self._save = ""  # that `begin` began

    @classmethod
    def at(cls, url: str) -> Remote:
        """Raises `UsageError` where fsspec, or its package for this storage, is not installed."""
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise UsageError(f"{url} needs the package fsspec; pip install 'accordion-fsdp[remote]'.") from None
        try:
            storage, path = url_to_fs(url, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{url} cannot be reached: {error}") from None
        return cls(storage, path, url.split("://")[0])

    def __str__(self) -> str:
        return f"{self._protocol}://{self._path.lstrip('/')}"

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def sizes(self) -> dict[str, int]:
        self._storage.invalidate_cache()
        return {
            _last(e["name"]): int(e["size"]) for e in self._storage.ls(self._path, detail=True) if e["type"] == "file"
        }

    def folders(self) -> list[str]:
        self._storage.invalidate_cache()
        try:
            entries = self._storage.ls(self._path, detail=True)
        except FileNotFoundError:
            return []
        return [_last(e["name"]) for e in entries if e["type"] == "directory" and _last(e["name"])[0] != "."]

    def inside(self, name: str) -> Remote:
        return Remote(self._storage, self._at(name), self._protocol)

    def open(self, name: str) -> Reader:
        return RemoteReader(self._storage, self._at(name))

    def read(self, name: str) -> bytes:
        return bytes(self._storage.cat_file(self._at(name)))

    def written_at(self, name: str) -> int:
        return int(self._storage.modified(self._at(name)).timestamp() * 1e9)

    def mark(self) -> object:
        return 0  # nothing is replaced there

    def begin(self, save: str) -> Remote:
        try:
            held = self.sizes()
        except FileNotFoundError:
            held = {}
        if MANIFEST in held:
            raise CheckpointError(f"{self} is a checkpoint, and remote storage replaces none; pass another path.")
        if any(not name.endswith(".safetensors") for name in held if name != SAVING):
            raise CheckpointError(f"{self} exists and is no checkpoint; pass another path or remove it.")
        if SAVING in held and time.time() - self.written_at(SAVING) / 1e9 <= STALE_S:
            host, pid = (self._owner().get(key) for key in ("host", "pid"))
            if type(pid) is int and (host != os.uname().nodename or (pid != os.getpid() and _is_alive(pid))):
                raise CheckpointError(
                    f"{self} is being saved by process {pid} on {host}; no other job may save under this name. If that job has "
                    f"ended, remove {self.inside(SAVING)}, or wait until it is {STALE_S / 60:.0f} minutes old."
                )
        self._storage.makedirs(self._path, exist_ok=True)
        owner = {"save": save, "host": os.uname().nodename, "pid": os.getpid()}
        self._storage.pipe_file(self._at(SAVING), json.dumps(owner).encode())
        for name in held.keys() - {SAVING}:
            self._storage.rm_file(self._at(name))  # of a save that was killed
        self._save = save
        return self

    def _owner(self) -> dict[str, Any]:
        """The words of the job that saves here, empty if there is none."""
        try:
            owner = json.loads(self.read(SAVING))
        except (FileNotFoundError, ValueError):
            return {}
        return owner if isinstance(owner, dict) else {}

    def begun(self, save: str) -> Remote:
        return self

    def fetch(self, into: Path) -> Path:
        """Copy it into a folder and return where it is there. Raises `UsageError` if it is neither a file nor a folder."""
        if not self._storage.exists(self._path):
            raise UsageError(f"{self} is neither a file nor a folder.")
        self._storage.get(self._path, str(into / _last(self._path)), recursive=True)
        return into / _last(self._path)

    def put(self, source: Path) -> list[str]:
        """Make it a copy of a file or a folder of files, and return the URLs. Raises `UsageError` if it exists."""
        if self._storage.exists(self._path):
            raise UsageError(f"{self} exists; pass another path or remove it.")
        self._storage.put(str(source), self._path, recursive=True)
        return [str(self)] if source.is_file() else [str(self.inside(path.name)) for path in sorted(source.iterdir())]

    @contextmanager
    def create(self, name: str, num_bytes: int) -> Iterator[Any]:
        with self._storage.open(self._at(name), "wb") as file:
            yield file

    def commit(self, begun: Folder, manifest: bytes) -> None:
        if self._owner().get("save") != self._save:
            raise CheckpointError(
                f"{self} was saved by another job at the same time; no other job may save under this name."
            )
        self._storage.pipe_file(self._at(MANIFEST), manifest)
        with suppress(FileNotFoundError):
            self._storage.rm_file(self._at(SAVING))

    def discard(self) -> None:
        if self._owner().get("save") == self._save:
            self.remove(0)

    def remove(self, mark: object) -> None:  # all have one mark: nothing is replaced there
        with suppress(FileNotFoundError):
            self._storage.rm_file(self._at(MANIFEST))
        with suppress(FileNotFoundError):
            self._storage.rm(self._path, recursive=True)


class RemoteReader:
    """A file of remote storage. Each of its blocks is fetched once, and kept from its check to its use."""

    def __init__(self, storage: Any, path: str) -> None:
        self.num_bytes = int(storage.size(path))
        cache = {"maxblocks": self.num_bytes // BLOCK_BYTES + 2}
        self._file = storage.open(path, block_size=BLOCK_BYTES, cache_type="blockcache", cache_options=cache)

    def read_into(self, into: memoryview, at: int) -> None:
        self._file.seek(at)
        while into:
            data = self._file.read(len(into))
            if not data:
                raise OSError(f"it ends at byte {self._file.tell()}")
            into[: len(data)] = data
            into = into[len(data) :]

    def close(self) -> None:
        self._file.close()


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is one, or cannot be looked at: then whoever reads it says so."""
    try:
        return entry.is_dir()
    except OSError as error:
        return error.errno != errno.ELOOP


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    return True


def _make(folder: Path) -> None:
    """Make a folder and those above it, and wait until their names are on the disk."""
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
    for above in missing:
        _sync(above.parent)


def _sync(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with _with_path(folder):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _with_path(path: Path) -> Iterator[None]:
    """Context manager that puts `path` into an `OSError` without a name: a full disk does not tell which one it is."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
