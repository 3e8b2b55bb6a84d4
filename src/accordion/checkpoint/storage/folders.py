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

NUM_TRIES = 3  # to find a folder, since between the two renames of a save none has its name
SAVING = "saving.json"  # in a folder of remote storage while a job saves there: names the job and the save
BLOCK_BYTES = 4 * 2**20  # fetched at once
STALE_S = 900.0  # age of `SAVING` at which a job on another machine is considered dead


Folder: TypeAlias = "Local | Remote"
Reader: TypeAlias = "LocalReader | RemoteReader"


def folder_at(path: str | os.PathLike[str]) -> Folder:
    """Return the folder of a path, or of a URL such as `s3://bucket/run`, which needs the package fsspec.

    Raises `UsageError` for anything else, also for an empty string.
    """
    if path is None:
        raise UsageError("the path is None; if `latest` returned it, there is no checkpoint yet.")
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
    """Return the folder from which to read the checkpoint at `path`; see `readable`."""
    return readable(folder_at(path))


def readable(folder: Folder) -> Folder:
    """Return `folder`. If a save is replacing it, or was killed meanwhile, return the hidden folder of the older checkpoint."""
    if isinstance(folder, Local):
        for _ in range(NUM_TRIES):
            if os.path.lexists(folder.path):
                break
            if (old := folder.replaced()) is not None:
                return old
    return folder


class Local:
    """A folder of a file system that contains the files of one checkpoint, or several checkpoints.

    The `Local` that `begin` returns owns the lock on the checkpoint's name until `commit` or `discard`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: claims.NameLock | None = None

    def __str__(self) -> str:
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        """Return the size of each file. Raises `FileNotFoundError` or `NotADirectoryError` if this is no folder."""
        sizes = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another job may remove it meanwhile
                    if entry.is_file():
                        sizes[entry.name] = entry.stat().st_size
        return sizes

    def folders(self) -> list[str]:
        """Return the names of the visible folders in this one. A checkpoint that is being replaced counts as visible."""
        names: dict[str, None] = {}
        with suppress(FileNotFoundError):
            for _ in range(2):  # a folder that is renamed meanwhile may be missing in one listing
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
        """Return the time in ns at which a file was last written."""
        return (self.path / name).stat().st_mtime_ns

    def mark(self) -> tuple[int, ...] | None:
        """Return a value that changes when another checkpoint takes this name; None if there is no checkpoint."""
        try:
            stat = os.stat(self.path / MANIFEST)
        except OSError:
            return None
        return stat.st_dev, stat.st_ino, stat.st_mtime_ns

    def replaced(self) -> Local | None:
        """Return the checkpoint that a save of this name is replacing, or was replacing when it was killed; None without one."""
        old = Local(claims.hidden(self.path, "old"))
        return old if old.mark() else None

    def begin(self, save: str) -> Local:
        """Lock this name, remove leftovers of killed saves, and return an empty hidden folder for a new checkpoint.

        Raises `CheckpointError` if the name is taken by something else or another job is saving under it, `UsageError` if no
        checkpoint can have this name.

        Args:
            save: 8 hexadecimal digits, unique for each save, so that no two saves write into one folder.
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
        """Return the folder that `begin` returned on the rank that called it, without the lock."""
        return Local(claims.hidden(self.path, f"{save}.tmp"))

    @contextmanager
    def create(self, name: str, num_bytes: int) -> Iterator[Any]:
        """Context manager for a new file of `num_bytes` with `write(memoryview)`; at its end the file is on the disk."""
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}, which rank 0 created, does not exist on this rank; all ranks must share the storage, and no other "
                "job may save under this name."
            )
        with _with_path(self.path / name), created(self.path / name, num_bytes) as file:
            yield file

    def commit(self, begun: Folder, manifest: bytes) -> None:
        """Write the manifest into `begun`, the folder that `begin` returned on this rank, and give it this folder's name."""
        assert isinstance(begun, Local)
        with begun.create(MANIFEST, len(manifest)) as file:
            file.write(memoryview(manifest))
        time_ns = time.time_ns()
        # The precise time, because the file system's clock is so coarse that two saves may have the same one.
        with suppress(OSError):
            os.utime(begun.path / MANIFEST, ns=(time_ns, time_ns))
        _sync(begun.path)
        claims.check_free(self.path)
        old = claims.hidden(self.path, "old")
        try:
            if os.path.lexists(self.path):
                self.path.rename(old)
            begun.path.rename(self.path)
        except OSError as error:
            with suppress(OSError):  # the older checkpoint gets its name back
                old.rename(self.path)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            raise CheckpointError(  # possible on a file system without locks
                f"{self.path} was saved by another job at the same time; no other job may save under this name."
            ) from error
        _sync(self.path.parent)
        claims.remove_quietly(old)
        if begun._lock is not None:
            begun._lock.release()

    def discard(self) -> None:
        """Remove this folder, which `begin` returned, and unlock its name. Raises `OSError`."""
        try:
            if self.path.exists():
                claims.remove(self.path)
        finally:
            if self._lock is not None:
                self._lock.release()

    def remove(self, mark: object) -> None:
        """Remove this checkpoint, unless a job is saving under its name or `mark()` is not `mark`. Raises `OSError`."""
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


class Remote:
    """A folder of remote storage, through fsspec. Files appear there complete; the manifest makes them a checkpoint."""

    def __init__(self, storage: Any, path: str, protocol: str) -> None:
        self._storage, self._path, self._protocol = storage, path.rstrip("/"), protocol
        self._save = ""  # the argument of `begin`

    @classmethod
    def at(cls, url: str) -> Remote:
        """Return the folder of `url`. Raises `UsageError` if fsspec, or its package for this storage, is not installed."""
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
        return 0  # checkpoints on remote storage are never replaced

    def begin(self, save: str) -> Remote:
        try:
            sizes = self.sizes()
        except FileNotFoundError:
            sizes = {}
        if MANIFEST in sizes:
            raise CheckpointError(f"{self} is a checkpoint, and on remote storage none is replaced; pass another path.")
        if any(not name.endswith(".safetensors") for name in sizes if name != SAVING):
            raise CheckpointError(f"{self} exists and is no checkpoint; pass another path or remove it.")
        if SAVING in sizes and time.time() - self.written_at(SAVING) / 1e9 <= STALE_S:
            host, pid = (self._owner().get(key) for key in ("host", "pid"))
            if type(pid) is int and (host != os.uname().nodename or (pid != os.getpid() and _is_alive(pid))):
                raise CheckpointError(
                    f"{self} is being saved by process {pid} on {host}; no other job may save under this name. If that job has "
                    f"ended, remove {self.inside(SAVING)}, or wait until it is {STALE_S / 60:.0f} minutes old."
                )
        self._storage.makedirs(self._path, exist_ok=True)
        owner = {"save": save, "host": os.uname().nodename, "pid": os.getpid()}
        self._storage.pipe_file(self._at(SAVING), json.dumps(owner).encode())
        for name in sizes.keys() - {SAVING}:
            self._storage.rm_file(self._at(name))  # left by a save that was killed
        self._save = save
        return self

    def _owner(self) -> dict[str, Any]:
        """Return the content of `SAVING`: "save", "host" and "pid" of the job that saves here; empty if there is none."""
        try:
            owner = json.loads(self.read(SAVING))
        except (FileNotFoundError, ValueError):
            return {}
        return owner if isinstance(owner, dict) else {}

    def begun(self, save: str) -> Remote:
        return self

    def fetch(self, into: Path) -> Path:
        """Copy this file or folder into the folder `into`; return the copy's path. Raises `UsageError` if it does not exist."""
        if not self._storage.exists(self._path):
            raise UsageError(f"{self} is neither a file nor a folder.")
        self._storage.get(self._path, str(into / _last(self._path)), recursive=True)
        return into / _last(self._path)

    def put(self, source: Path) -> list[str]:
        """Copy the file or folder `source` to this URL and return the URLs of the files. Raises `UsageError` if it exists."""
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

    def remove(self, mark: object) -> None:  # `mark()` never changes here
        with suppress(FileNotFoundError):
            self._storage.rm_file(self._at(MANIFEST))
        with suppress(FileNotFoundError):
            self._storage.rm(self._path, recursive=True)


class RemoteReader:
    """An open file of remote storage. Each block is fetched once and cached, since it is read to be checked and to be used."""

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
    """Return True for a folder, and for an entry that cannot be examined, since reading it will raise the error."""
    try:
        return entry.is_dir()
    except OSError as error:
        return error.errno != errno.ELOOP


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # a process of another user
        return True
    return True


def _make(folder: Path) -> None:
    """Create a folder and its parents, and wait until their names are on the disk."""
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
    for above in missing:
        _sync(above.parent)


def _sync(folder: Path) -> None:
    """Wait until the names of the files in `folder` are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with _with_path(folder):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _with_path(path: Path) -> Iterator[None]:
    """Context manager that adds `path` to an `OSError` without a file name, as for a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
