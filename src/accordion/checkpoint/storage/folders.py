"""Where checkpoints lie: folders of this machine's file systems, and of remote storage through fsspec."""

from __future__ import annotations

import errno
import os
import time
from bisect import bisect_right, insort
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from accordion.checkpoint import claims
from accordion.checkpoint.format import MANIFEST
from accordion.checkpoint.storage.direct import LocalReader, created
from accordion.errors import CheckpointError, UsageError

LOOKS, LOOK_S = 20, 0.002  # for what has two names one after the other, in a folder in which names change
QUIET_NS = 50_000_000  # since the last change: several ticks of the clock by which a file system writes times


class Writer(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview, /) -> object: ...


class Reader(Protocol):
    """A file that is read in parts."""

    num_bytes: int

    def read_into(self, into: memoryview, at: int) -> None:
        """Fill `into` with the bytes from `at` on. Raises `OSError` where the file is shorter."""

    def expect(self, at: int, length: int) -> None:
        """These bytes are asked for next, in parts. Raises `OSError` where the file is shorter."""

    def close(self) -> None: ...


class Folder(Protocol):
    """A folder that holds the files of one checkpoint, or checkpoints."""

    def sizes(self) -> dict[str, int]:
        """The files in it and their bytes. Raises `FileNotFoundError`, `NotADirectoryError` where it is no folder."""

    def folders(self) -> list[str]:
        """Names of the folders in it, without hidden ones; none where it is not there.

        A checkpoint that is being replaced is among them.
        """

    def inside(self, name: str) -> Folder:
        """A folder in it."""

    def open(self, name: str) -> Reader: ...

    def read(self, name: str) -> bytes: ...

    def written_at(self, name: str) -> int:
        """When a file was written last, in ns."""

    def mark(self) -> object:
        """Another one once another checkpoint has taken this name; None where there is none at the moment."""

    def begin(self, save: str) -> Folder:
        """An empty folder for a new checkpoint of this name; what a killed save left there is removed.

        `save`: a word that no other save has, 8 hexadecimal digits, so that two jobs that save under one name never write
        into one folder. Raises `CheckpointError` where this name belongs to something else, `UsageError` where nothing can
        have it.
        """

    def begun(self, save: str) -> Folder:
        """What `begin` gave on the rank that called it."""

    def create(self, name: str, num_bytes: int) -> AbstractContextManager[Writer]:
        """A context that gives a `Writer`, to which `num_bytes` are written; at its end the file is on the disk."""

    def commit(self, begun: Folder) -> None:
        """Make what `begin` gave, its manifest written, the checkpoint of this name. On the rank that called `begin`."""

    def discard(self, mark: object = None) -> None:
        """Remove it and all in it, so that no half of it is ever seen under its name. Raises `OSError`.

        With a `mark`, only if it has that one still: what another job has saved under this name since then stays.
        """


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
    """The folder to read a checkpoint from."""
    return readable(folder_at(path))


def readable(folder: Folder) -> Folder:
    """`folder`, or while a save replaces a checkpoint of this name, or was killed then, the one that was there."""
    for _ in range(LOOKS if isinstance(folder, Local) else 0):
        assert isinstance(folder, Local)
        is_changing = changes_now(folder.path.parent)
        if os.path.lexists(folder.path):
            break
        old = [(mark[-1], path) for path in claims.beside(folder.path, "old") if (mark := Local(path).mark())]
        if old:
            return Local(max(old)[1])
        if not is_changing:
            break
        time.sleep(LOOK_S)
    return folder


def changes_now(folder: Path) -> bool:
    """Whether names in a folder change at this time, so that one may be missed; no where it cannot be asked."""
    try:
        return time.time_ns() - os.stat(folder).st_mtime_ns < QUIET_NS
    except OSError:
        return False


class Local:
    """A folder of a file system. What `begin` gave owns a lock, which tells other jobs that its save lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def __str__(self) -> str:
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        found = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # it goes while we look
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def folders(self) -> list[str]:
        found: dict[str, None] = {}
        with suppress(FileNotFoundError):
            for _ in range(LOOKS):  # one that gets another name while we look may be seen under neither
                is_changing = changes_now(self.path)
                found.update(dict.fromkeys([*self._folders(), *self._folders()]))
                if not is_changing and not changes_now(self.path):
                    break
        return list(found)

    def _folders(self) -> Iterator[str]:
        with os.scandir(self.path) as entries:
            for entry in entries:
                name = claims.replaced(entry.name) or entry.name
                if (name != entry.name or name[0] != ".") and _is_folder(entry):
                    yield name

    def inside(self, name: str) -> Local:
        return Local(self.path / name)

    def open(self, name: str) -> Reader:
        return LocalReader(self.path / name)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def written_at(self, name: str) -> int:
        return (self.path / name).stat().st_mtime_ns

    def mark(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self.path / MANIFEST)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def begin(self, save: str) -> Local:
        path = self.path
        claims.check_name(path)
        claims.check_free(path)
        for left in claims.beside(path, "tmp"):
            claims.remove_rest(left)
        for left in claims.beside(path, "gone"):
            claims.remove_quietly(left)
        made = [above for above in path.parents if not above.exists()]
        if made:
            path.parent.mkdir(parents=True, exist_ok=True)
        for above in made:
            _sync(above.parent)
        begun = self.begun(save)
        for _ in range(LOOKS):  # another save that begins may take it for a rest until it is locked
            begun.path.mkdir(exist_ok=True)
            try:
                begun._lock = claims.lock(begun.path)
            except OSError:
                with suppress(OSError):
                    begun.path.rmdir()
                raise
            if begun._lock is not None:
                return begun
            time.sleep(LOOK_S)
        raise CheckpointError(
            f"{begun.path}, made for a save, is removed again and again by another job; no other job may save under this name."
        )

    def begun(self, save: str) -> Local:
        return Local(claims.hidden(self.path, save, "tmp"))

    @contextmanager
    def create(self, name: str, num_bytes: int) -> Iterator[Writer]:
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}, made by rank 0, is not seen here; checkpoints need storage that all ranks share, and no other "
                "job that saves under this name."
            )
        try:
            with created(self.path / name, num_bytes) as file:
                yield file
        except OSError as error:
            raise _with_path(error, self.path / name) from None

    def commit(self, begun: Folder) -> None:
        """Give `begun` this name, in steps that leave one of the two whatever other saves do between them.

        What is replaced is renamed to a name of its own, and removed when this one is in its place. What killed saves had
        renamed before is older than this one, so it goes too; what another save renames from now on may be this one.
        """
        assert isinstance(begun, Local)
        held = begun.sizes()
        now = time.time_ns()
        with suppress(OSError):  # a time of its own: file systems write the last tick's, which two saves may share
            os.utime(begun.path / MANIFEST, ns=(now, now))
        _sync(begun.path)
        left = claims.beside(self.path, "old")
        replaced = claims.hidden(self.path, begun.path.name.split(".")[-2], "old")
        claims.check_free(self.path)
        try:
            if os.path.lexists(self.path):
                self.path.rename(replaced)
            begun.path.rename(self.path)
        except OSError as error:
            with suppress(OSError):  # not there, or another save was faster
                replaced.rename(self.path)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            raise CheckpointError(
                f"{self.path} was saved by another job at the same time; no other job may save under this name."
            ) from error
        if not self._holds(held):  # its lock too: until it has its name it is not to be taken for a rest
            raise CheckpointError(
                f"{self.path} is not what was written there, another job saved or removed files; the one before is {replaced}."
            )
        begun._release(self.path)
        _sync(self.path.parent)
        for one in [*left, *([replaced] if os.path.lexists(replaced) else [])]:
            claims.remove_quietly(one)

    def _holds(self, sizes: dict[str, int]) -> bool:
        """Whether these files lie there; one that has renamed it in error gives it its name again."""
        for _ in range(LOOKS):
            with suppress(FileNotFoundError):
                if self.sizes() == sizes:
                    return True
            time.sleep(LOOK_S)
        return False

    def _release(self, path: Path) -> None:
        """Give back the lock, which lies in `path` now."""
        if self._lock is not None:
            handle, self._lock = self._lock, None
            claims.unlock(path, handle)

    def discard(self, mark: object = None) -> None:
        self._release(self.path)
        if mark is None:
            claims.remove(self.path)
        elif self.mark() == mark and not claims.lives(self.path):  # a save that looks whether it is all there
            doomed = claims.hide(self.path)
            if Local(doomed).mark() != mark:
                with suppress(OSError):  # the next one has the name already
                    doomed.rename(self.path)
                    return
            claims.remove(doomed)


class Remote:
    """A folder of a storage that fsspec knows; a file appears there whole, a checkpoint with its manifest."""

    def __init__(self, storage: Any, path: str, protocol: str) -> None:
        self._storage, self._path, self._protocol = storage, path.rstrip("/"), protocol

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
        return {_last(e["name"]): int(e["size"]) for e in self._storage.ls(self._path, detail=True) if _is_file(e)}

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
        return _RemoteReader(self._storage, self._at(name))

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
        if any(not name.endswith(".safetensors") for name in held):
            raise CheckpointError(f"{self} exists and is no checkpoint; pass another path or remove it.")
        for name in held:
            self._storage.rm_file(self._at(name))  # of a save that was killed
        self._storage.makedirs(self._path, exist_ok=True)
        return self

    def begun(self, save: str) -> Remote:
        return self

    def fetch(self, into: Path) -> Path:
        """Copy it into a folder; returns where it lies there. Raises `UsageError` where it is neither a file nor a folder."""
        here = into / _last(self._path)
        if self._storage.isfile(self._path):
            self._storage.get_file(self._path, str(here))
            return here
        if not self._storage.isdir(self._path):
            raise UsageError(f"{self} is neither a file nor a folder.")
        here.mkdir()
        for name in self.sizes():
            self._storage.get_file(self._at(name), str(here / name))
        return here

    def put(self, source: Path) -> list[str]:
        """Make it a copy of a file or a folder of files; returns the URLs. Raises `UsageError` where it is there already."""
        if self._storage.exists(self._path):
            raise UsageError(f"{self} exists; pass another path or remove it.")
        if source.is_file():
            self._storage.put_file(str(source), self._path)
            return [str(self)]
        self._storage.makedirs(self._path, exist_ok=True)
        names = sorted(Local(source).sizes())
        for name in names:
            self._storage.put_file(str(source / name), self._at(name))
        return [str(self.inside(name)) for name in names]

    @contextmanager
    def create(self, name: str, num_bytes: int) -> Iterator[Writer]:
        with self._storage.open(self._at(name), "wb") as file:
            yield file

    def commit(self, begun: Folder) -> None:
        """Its manifest is there: it is a checkpoint."""

    def discard(self, mark: object = None) -> None:  # all have one mark: nothing is replaced there
        with suppress(FileNotFoundError):
            self._storage.rm_file(self._at(MANIFEST))
        with suppress(FileNotFoundError):
            self._storage.rm(self._path, recursive=True)


class _RemoteReader:
    """A file of remote storage. Owns what it has read: each part is asked for once, though it is checked and then used."""

    def __init__(self, storage: Any, path: str) -> None:
        self._storage, self._path = storage, path
        self._held: dict[int, memoryview] = {}
        self._starts: list[int] = []
        self.num_bytes = int(storage.size(path))

    def read_into(self, into: memoryview, at: int) -> None:
        while into:
            part = self._part(at, at + len(into))[: len(into)]
            into[: len(part)] = part
            into, at = into[len(part) :], at + len(part)

    def expect(self, at: int, length: int) -> None:
        """In one request, however small the parts."""
        while length:
            count = len(self._part(at, at + length)[:length])
            at, length = at + count, length - count

    def close(self) -> None:
        self._held, self._starts = {}, []

    def _part(self, at: int, end: int) -> memoryview:
        """Bytes from `at` on, at least one."""
        i = bisect_right(self._starts, at)
        if i and (held := self._held[self._starts[i - 1]][at - self._starts[i - 1] :]):
            return held
        end = min(end, self._starts[i]) if i < len(self._starts) else end
        data = memoryview(self._storage.cat_file(self._path, start=at, end=end))
        if len(data) != end - at:
            raise OSError(f"it ends at byte {at + len(data)}")
        self._held[at] = data
        insort(self._starts, at)
        return data


def _is_file(entry: dict[str, Any]) -> bool:
    return bool(entry["type"] == "file")


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is one, or cannot be looked at: then whoever reads it says so."""
    try:
        return entry.is_dir()
    except OSError as error:
        return error.errno != errno.ELOOP


def _sync(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        raise _with_path(error, folder) from None
    finally:
        os.close(handle)


def _with_path(error: OSError, path: Path) -> OSError:
    """A full disk does not say which one it is."""
    named = error.filename is not None or error.errno is None
    return error if named else OSError(error.errno, error.strerror, str(path))
