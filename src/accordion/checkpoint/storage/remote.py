"""Folders of remote storage, through fsspec."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import Any

from accordion.checkpoint.claims import RANK_FILE, SHOWN
from accordion.checkpoint.format import MANIFEST
from accordion.errors import CheckpointError, UsageError, not_installed, some_of

SAVING = "saving.json"  # in a folder of remote storage while a job saves there: names the job and the save
BLOCK_BYTES = 4 * 2**20  # fetched at once
STALE_S = 900.0  # age of `SAVING` at which a job on another machine is considered dead


class Remote:
    """A folder of remote storage, with the methods of `Local` except `replaced`. Files appear when complete; the manifest makes
    a checkpoint. A save writes into this folder itself; if it has a checkpoint, `begin` raises `CheckpointError`."""

    def __init__(self, storage: Any, path: str, protocol: str) -> None:
        self._storage, self._path, self._protocol = storage, path.rstrip("/"), protocol
        self._save = ""  # the argument of `begin`, which marks this job in `SAVING`

    @classmethod
    def at(cls, url: str) -> Remote:
        """Return the folder of `url`. Raises `UsageError` if fsspec or its package for this storage is not installed, or if
        fsspec does not know such a URL."""
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise not_installed(url, ["fsspec"], "remote") from None
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

    def open(self, name: str) -> RemoteReader:
        return RemoteReader(self._storage, self._at(name))

    def read(self, name: str) -> bytes:
        return bytes(self._storage.cat_file(self._at(name)))

    def written_at(self, name: str) -> int:
        return int(self._storage.modified(self._at(name)).timestamp() * 1e9)

    def mark(self) -> object:
        return 0  # checkpoints on remote storage are never replaced

    def foreign(self) -> list[str]:
        with suppress(FileNotFoundError):
            names = sorted([*self.sizes(), *self.folders()])
            return [name for name in names if name not in (MANIFEST, SAVING) and not RANK_FILE.fullmatch(name)]
        return []

    def begin(self, save: str) -> Remote:
        """Create this folder, mark it as being saved by this job, remove the files that a killed save left, and return it.
        `save`: unique name of the save. Raises `CheckpointError` if the folder has a checkpoint or files that no save writes,
        or if a job that may still run saves here."""
        try:
            sizes = self.sizes()
        except FileNotFoundError:
            sizes = {}
        if MANIFEST in sizes:
            raise CheckpointError(f"{self} is a checkpoint, and on remote storage none is replaced; pass another path.")
        if foreign := self.foreign():
            raise CheckpointError(
                f"{self} exists and is no checkpoint, it holds {some_of(foreign, SHOWN)}; pass another path or remove it."
            )
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
        self._save = save
        try:
            for name in sizes.keys() - {SAVING}:
                self._storage.rm_file(self._at(name))  # left by a save that was killed
        except BaseException:
            with suppress(Exception):
                self._storage.rm_file(self._at(SAVING))
            raise
        return self

    def _owner(self) -> dict[str, Any]:
        """Return the "save", "host" and "pid" of the job that saves here, from the file `SAVING`; {} without a sound one."""
        try:
            owner = json.loads(self.read(SAVING))
        except (FileNotFoundError, ValueError):
            return {}
        return owner if isinstance(owner, dict) else {}

    def begun(self, save: str) -> Remote:
        return self

    def create(self, name: str) -> Any:
        return self._storage.open(self._at(name), "wb")

    def commit(self, manifest: bytes) -> None:
        if self._owner().get("save") != self._save:
            raise CheckpointError(
                f"{self} was saved by another job at the same time; no other job may save under this name."
            )
        self._storage.pipe_file(self._at(MANIFEST), manifest)
        with suppress(Exception):  # the checkpoint is complete with the file too
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
    """An open file of remote storage. Blocks are fetched once and cached, since each is read for its checksum and for use."""

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


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # a process of another user
        return True
    return True
