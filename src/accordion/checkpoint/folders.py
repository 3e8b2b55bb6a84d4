"""Where checkpoints lie: folders of this machine's file systems, and of remote storage through fsspec."""

from __future__ import annotations

import os
import re
import shutil
from bisect import bisect_right, insort
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from accordion.checkpoint.disk import LocalReader, created
from accordion.checkpoint.format import MANIFEST
from accordion.errors import CheckpointError, UsageError


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
        """Names of the folders in it, without hidden ones."""

    def inside(self, name: str) -> Folder:
        """A folder in it."""

    def open(self, name: str) -> Reader: ...

    def read(self, name: str) -> bytes: ...

    def written_at(self, name: str) -> int:
        """When a file was written last, in ns."""

    def begin(self, save: str) -> Folder:
        """An empty folder for a new checkpoint of this name; what a killed save left there is removed.

        `save`: a word that no other save has, so that two jobs that save under one name never write into one folder. Raises
        `CheckpointError` where this name belongs to something else.
        """

    def begun(self, save: str) -> Folder:
        """What `begin` gave on the rank that called it."""

    def create(self, name: str, num_bytes: int) -> AbstractContextManager[Writer]:
        """A context that gives a `Writer`, to which `num_bytes` are written; at its end the file is on the disk."""

    def commit(self, begun: Folder) -> None:
        """Make what `begin` gave, its manifest written, the checkpoint of this name."""

    def discard(self) -> None:
        """Remove it and all in it, so that no half of it is ever seen under its name."""


def folder_at(path: str | os.PathLike[str]) -> Folder:
    """The folder of a path, or of a URL such as `s3://bucket/run`, which needs the package fsspec."""
    text = os.fspath(path).removeprefix("file://")
    return Remote.at(text) if "://" in text else Local(Path(os.path.abspath(text)))


def checkpoint_at(path: str | os.PathLike[str]) -> Folder:
    """The folder to read a checkpoint from."""
    return readable(folder_at(path))


def readable(folder: Folder) -> Folder:
    """`folder`, or where a save was killed while it replaced an older checkpoint of this name, the older one."""
    if isinstance(folder, Local) and not folder.path.exists() and (folder.replaced().path / MANIFEST).is_file():
        return folder.replaced()
    return folder


class Local:
    """A folder of a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        with os.scandir(self.path) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    def folders(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if entry.is_dir() and entry.name[0] != "."]
        except FileNotFoundError:
            return []

    def inside(self, name: str) -> Local:
        return Local(self.path / name)

    def replaced_names(self) -> set[str]:
        """Names in it whose checkpoint was being replaced when the save was killed."""
        try:
            with os.scandir(self.path) as entries:
                old = {e.name[1:-4] for e in entries if e.name[0] == "." and e.name.endswith(".old") and e.is_dir()}
        except FileNotFoundError:
            return set()
        return {name for name in old if not (self.path / name).exists()}

    def open(self, name: str) -> Reader:
        return LocalReader(self.path / name)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def written_at(self, name: str) -> int:
        return (self.path / name).stat().st_mtime_ns

    def begin(self, save: str) -> Local:
        path = self.path
        if path.exists() and not (path / MANIFEST).is_file() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(f"{path} exists and is no checkpoint; pass another path or remove it.")
        begun, rest = self.begun(save), re.compile(rf"\.{re.escape(path.name)}\.([0-9a-f]+\.)?tmp")
        for left in path.parent.iterdir() if path.parent.is_dir() else ():
            if rest.fullmatch(left.name):
                shutil.rmtree(left)  # of a save that was killed
        made = [above for above in path.parents if not above.exists()]
        if made:
            path.parent.mkdir(parents=True, exist_ok=True)
        for above in made:
            _sync(above.parent)
        begun.path.mkdir()
        return begun

    def begun(self, save: str) -> Local:
        return Local(self.path.with_name(f".{self.path.name}.{save}.tmp"))

    def replaced(self) -> Local:
        """What had this name while another takes it: a kill between two renames leaves it there."""
        return Local(self.path.with_name(f".{self.path.name}.old"))

    @contextmanager
    def create(self, name: str, num_bytes: int) -> Iterator[Writer]:
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}, made by rank 0, is not seen here; checkpoints need storage that all ranks share, and no other "
                "job that saves under this name."
            )
        with created(self.path / name, num_bytes) as file:
            yield file

    def commit(self, begun: Folder) -> None:
        assert isinstance(begun, Local)
        _sync(begun.path)
        replaced = self.replaced().path
        if os.path.lexists(self.path):
            _remove(replaced)
            self.path.rename(replaced)
        try:
            begun.path.rename(self.path)
        except OSError:
            if os.path.lexists(replaced):
                replaced.rename(self.path)
            raise
        _sync(self.path.parent)
        _remove(replaced)

    def discard(self) -> None:
        doomed = self.path
        if doomed.name[0] != ".":
            doomed = doomed.with_name(f".{doomed.name}.gone")
            _remove(doomed)
            self.path.rename(doomed)
        _remove(doomed)


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
            raise UsageError(f"{url} needs the package fsspec; pip install 'accordion[remote]'.") from None
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

    def discard(self) -> None:
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


def _remove(path: Path) -> None:
    """A folder and all in it, or a link to one alone."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
