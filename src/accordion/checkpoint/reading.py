"""Read a checkpoint's manifest, and parts of its chunks, which are compared with their checksums before they are used."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TypeVar

import torch
from torch import Tensor

from accordion.checkpoint.boxes import Box
from accordion.checkpoint.checksums import SUMMED_BYTES, pieces, running
from accordion.checkpoint.claims import RANK_FILE
from accordion.checkpoint.contents import OF_STATE
from accordion.checkpoint.format import DTYPES, MANIFEST, Manifest, TensorChunk, TensorEntry, parse
from accordion.checkpoint.storage.folders import Folder, Reader, checkpoint_at
from accordion.checkpoint.storage.local import Local
from accordion.checkpoint.writing import bytes_of
from accordion.errors import CheckpointError, UsageError

T = TypeVar("T")
DCP_METADATA = ".metadata"
TURNS = 5  # largest number of reads of a checkpoint that is replaced meanwhile
REPLACED = "replaced again and again while it was read, another job saves under this name; read it when that has ended."
SHOWN = 3  # tensors of a file that a message names
_CONVERT = "`accordion checkpoint convert` makes a checkpoint"
FROM_DCP = "read it into the sharded model with torch's `dcp.load` and `set_state_dict`, and save that"
STAGE_BYTES = 2**24  # read at once if a tensor cannot be read in place


def opened(folder: Folder, ema: str | None = None) -> Files:
    """Read the manifest in `folder`; return the checkpoint's `Files`, with no file of tensors open yet.

    `ema`: decay, as text ("0.999"), of an `acc.EMA` that was saved by `state={"ema": ...}`: its averages replace the model's
    tensors of their names; None replaces none. Raises `UsageError` if no average of that decay was saved, `CheckpointError` if
    the manifest is missing, damaged, or cannot be read.
    """
    try:
        files = look_into(folder)
        files.manifest = files.manifest if ema is None else _with_averages(files.manifest, ema)
        return files
    except (FileNotFoundError, NotADirectoryError):
        why = "there is no such folder."
        if isinstance(folder, Local) and folder.path.is_file():
            why = f"it is a file, and a checkpoint is a folder; {_CONVERT} of a file of torch.save."
        raise CheckpointError(f"{folder} is no checkpoint: {why}") from None
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}.") from error


def _with_averages(manifest: Manifest, decay: str) -> Manifest:
    averages = [name.split("/", 3) for name in manifest.tensors if name.startswith(f"{OF_STATE}ema/")]
    of_model = {f"model/{name}": "/".join([*place, name]) for *place, name in averages if place[-1] == decay}
    if not of_model:
        decays = ", ".join(dict.fromkeys(place[-1] for *place, _ in averages))
        raise UsageError(f"the checkpoint has no average of decay {decay}; it has {decays or 'none'}.")
    return replace(manifest, tensors={**manifest.tensors, **{a: manifest.tensors[b] for a, b in of_model.items()}})


def look_into(folder: Folder) -> Files:
    """Read the manifest in `folder`; return the checkpoint's `Files`, with no file of tensors open yet. Raises
    `CheckpointError` if the manifest is missing or damaged, or if a package for its checksums is not installed; `OSError` if
    the folder is missing or cannot be read."""
    mark, sizes = folder.mark(), folder.sizes()
    if MANIFEST not in sizes:
        instead = ""
        if DCP_METADATA in sizes:
            instead = f", but the {DCP_METADATA} of torch.distributed.checkpoint; {FROM_DCP}"
        elif any(name.endswith(".safetensors") and not RANK_FILE.fullmatch(name) for name in sizes):
            instead = f", but safetensors files; {_CONVERT} of them, and `load_pretrained` reads them as they are"
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}{instead}.")
    text = folder.read(MANIFEST)
    try:
        manifest = parse(text)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}/{MANIFEST} cannot be used: {error}") from error
    digest = int.from_bytes(sha256(text).digest()[:8], "little", signed=True)
    try:
        return Files(folder, manifest, mark=mark, digest=digest)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} cannot be checked: {error}") from error


def steady(
    find: Callable[[], Folder], act: Callable[[Folder], T], is_bad: Callable[[T], bool] = lambda result: False
) -> T:
    """Return `act(find())`; `find` returns a checkpoint's folder. If a save replaced the checkpoint meanwhile, and `act` raised
    `CheckpointError` or `OSError`, or `is_bad(result)` is True, call `find` and `act` again. Without a replacement, raise that
    error or return that result. Raises `CheckpointError` if the checkpoint is replaced during each of `TURNS` calls."""
    for _ in range(TURNS):
        before = place_of(find)
        try:
            result = act(find())
            if not is_bad(result) or place_of(find) == before:
                return result
        except (CheckpointError, OSError):
            if place_of(find) == before:
                raise
    raise CheckpointError(f"{find()} was {REPLACED}")


def place_of(find: Callable[[], Folder]) -> object:
    """Return a value that changes if `find()` returns another path or a save replaces the checkpoint there. None if there is no
    checkpoint, which is not detected on remote storage."""
    try:
        folder = find()
        mark = folder.mark()
    except OSError:
        return None
    return None if mark is None else (str(folder), mark)


@dataclass(frozen=True, slots=True)
class Read:
    """A planned read of the part `box` of the tensor `name` from `chunk`, which contains the box.

    Pass reads first to `Files.faults`, which compares checksums, then to `Files.fill_all`. `into`: view of a local tensor to
    fill; None only compares checksums. `fresh`: the local tensor is new, so it may be filled before all checksums are compared.
    """

    name: str
    entry: TensorEntry
    chunk: TensorChunk
    box: Box
    into: Tensor | None
    fresh: bool = False

    def span(self) -> tuple[int, int]:
        """Return (start, end), in bytes from the beginning of the chunk, of all rows (along dim 0) in which `box` has elements;
        of the whole chunk if the tensor is 0-d."""
        rows, shape = self.box.within(self.chunk.box), self.chunk.box.shape
        if not rows:
            return 0, self.entry.num_bytes(self.chunk.box)
        row_bytes = math.prod(shape[1:]) * DTYPES[self.entry.dtype].itemsize
        return rows[0].start * row_bytes, rows[0].stop * row_bytes

    def at_once(self) -> memoryview | None:
        """Return the memory of `into` if the whole chunk may be read into it before checksums are compared: if `fresh` is True,
        and `into` is contiguous, on the CPU, and has the saved dtype and the chunk's shape. Otherwise return None."""
        into = self.into
        if into is None or not self.fresh or self.box.shape != self.chunk.box.shape:
            return None
        return bytes_of(into) if _takes_bytes(into, DTYPES[self.entry.dtype]) else None


def _takes_bytes(into: Tensor, dtype: torch.dtype) -> bool:
    return into.device.type == "cpu" and into.dtype == dtype and into.is_contiguous()


def fill_part(
    into: Tensor, reader: Reader, at: int, dtype: torch.dtype, shape: tuple[int, ...], index: tuple[slice, ...]
) -> None:
    """Fill `into` with the slices `index`, one for each dim, of a tensor of `shape` and `dtype`, which begins at byte `at` of
    `reader`. Elements are cast to the dtype of `into`."""
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    rows = index[0] if index else slice(0, 1)
    if tuple(into.shape[1:]) == shape[1:] and _takes_bytes(into, dtype):
        reader.read_into(bytes_of(into), at + rows.start * row_bytes)
        return
    step = max(1, STAGE_BYTES // max(1, row_bytes))
    for first in range(rows.start, rows.stop, step):
        stage = torch.empty(min(step, rows.stop - first), *shape[1:], dtype=dtype, device="cpu")
        reader.read_into(bytes_of(stage), at + first * row_bytes)
        start = first - rows.start
        (into[start : start + len(stage)] if index else into).copy_(
            stage[(slice(None), *index[1:])] if index else stage[0]
        )


class Files:
    """Reads the files of one checkpoint. The function `opened` makes one; call `check_sizes`, then `faults`, which compares
    checksums, then `fill_all`, which fills tensors. Each file is opened when it is first read; `close` closes all."""

    def __init__(self, folder: Folder, manifest: Manifest, *, mark: object, digest: int) -> None:
        """Open no file yet. `mark`: `folder.mark()` before the manifest was read; `digest`: 8 bytes of the manifest's sha256,
        as an int64. Raises `CheckpointError` if the package for the checksums is not installed."""
        self.folder, self.manifest, self.mark, self.digest = folder, manifest, mark, digest
        self._begin_sum = running(manifest.checksum)
        self._open: dict[str, Reader] = {}
        self._buffer = memoryview(bytearray(SUMMED_BYTES))

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def check_sizes(self) -> None:
        """Raise `CheckpointError` if a file is missing or has another size than in the manifest."""
        sizes = self.folder.sizes()
        wrong = [
            f"{file} has {sizes[file]} bytes and {about.num_bytes} in the manifest"
            if file in sizes
            else f"{file}: No such file"
            for file, about in self.manifest.files.items()
            if sizes.get(file) != about.num_bytes
        ]
        if wrong:
            raise CheckpointError(f"{self.folder} is damaged: {'; '.join(wrong)}.")

    def opened(self, file: str) -> Reader:
        """Return the reader of `file`, opened once. Raises `CheckpointError` if the file cannot be read, or, in the first call
        alone, if its header is damaged."""
        if file not in self._open:
            about = self.manifest.files[file]
            try:
                self._open[file] = reader = self.folder.open(file)
                if self._sum(reader, 0, about.header_bytes) != about.header_sum:
                    raise CheckpointError(f"the header of {file} is damaged")
            except OSError as error:
                raise CheckpointError(f"{file}: {error}") from error
        return self._open[file]

    def damage(self, wanted: Callable[[str], bool] = lambda name: True) -> list[str]:
        """Read each tensor whose `wanted(name)` is True, compare checksums, and return the faults as texts that name file and
        tensor; [] if there are none."""
        return self.faults(
            Read(name, entry, chunk, chunk.box, None) for name, entry, chunk in self.manifest.chunks() if wanted(name)
        )

    def whole(self, name: str) -> Tensor:
        """Read the tensor `name` whole into new host memory, without comparing its checksums."""
        entry = self.manifest.tensors[name]
        into = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu")
        all_of_it = Box((0,) * len(entry.shape), entry.shape)
        self.fill_all(Read(name, entry, c, c.box, into[c.box.within(all_of_it)]) for c in entry.chunks)
        return into

    def faults(self, reads: Iterable[Read]) -> list[str]:
        """Compare the checksums of all bytes that `reads` need; return the faults as texts, or []. Call this before `fill_all`:
        it fills the tensors of reads for which `Read.at_once` returns memory, before it is known if their checksums match."""
        wanted: dict[tuple[str, int], tuple[str, str, int, memoryview | None]] = {}
        size = self.manifest.piece_bytes
        for read in reads:
            chunk, (start, end), into = read.chunk, read.span(), read.at_once()
            length = read.entry.num_bytes(chunk.box)
            for i in range(start // size, -(-end // size)):
                a, b = i * size, min((i + 1) * size, length)
                key, step = (chunk.file, chunk.at + a), None if into is None else into[a:b]
                if key not in wanted or step is not None:
                    wanted[key] = read.name, chunk.sums[i], b - a, step
        faults: dict[str, None] = {}
        for (file, at), (name, text, num_bytes, into) in sorted(wanted.items()):
            try:
                if self._sum(self.opened(file), at, num_bytes, into) != text:
                    faults[f"{name} is damaged in bytes {at} to {at + num_bytes - 1} of {file}"] = None
            except CheckpointError as error:
                faults[str(error)] = None
            except OSError as error:
                faults[f"{name} in {file}: {error}"] = None
        return list(faults)

    def _sum(self, reader: Reader, at: int, num_bytes: int, into: memoryview | None = None) -> str:
        """Read `num_bytes` from byte `at`, into `into` if given; return their checksum. Raises `OSError` if the file ends."""
        if at + num_bytes > reader.num_bytes:
            raise OSError(f"it ends at byte {reader.num_bytes}")
        total = self._begin_sum()
        for a, b in pieces(0, num_bytes, SUMMED_BYTES):
            step = self._buffer[: b - a] if into is None else into[a:b]
            reader.read_into(step, at + a)
            total.update(step)
        return str(total.hexdigest())

    @torch.no_grad()
    def fill_all(self, reads: Iterable[Read]) -> None:
        """Fill the tensors of `reads`, without comparing checksums. Those for which `Read.at_once` returns memory are skipped,
        because `faults`, which is called first, has filled them."""
        for read in reads:
            if read.at_once() is None:
                assert read.into is not None
                reader, chunk, dtype = self.opened(read.chunk.file), read.chunk, DTYPES[read.entry.dtype]
                fill_part(read.into, reader, chunk.at, dtype, chunk.box.shape, read.box.within(chunk.box))


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Read every byte of the checkpoint at `path`; return its faults as texts, [] if there are none. Damaged data are named by
    file and tensor. If the checkpoint cannot be opened or files have wrong sizes, that is one fault, and no data are read.
    Raises `CheckpointError` if saves replace the checkpoint again and again."""

    def faults_in(folder: Folder) -> list[str]:
        try:
            with closing(opened(folder)) as files:
                files.check_sizes()
                return files.damage()
        except (CheckpointError, OSError) as error:
            return [str(error)]

    return steady(lambda: checkpoint_at(path), faults_in, bool)
