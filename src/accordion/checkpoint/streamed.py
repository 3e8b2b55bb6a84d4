"""Safetensors files for others, written one tensor at a time: host memory holds the tensor that is being written alone."""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from accordion.checkpoint.format import code_of, header
from accordion.checkpoint.untrusted_files import HF_INDEX, HF_SINGLE
from accordion.checkpoint.writing import bytes_of
from accordion.errors import UsageError

CAST_ELEMENTS = 2**20  # at once: a cast of the whole would be a second tensor in memory
PLAIN = {"format": "pt"}  # what transformers asks of a file


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor that is read when it is written. `dtype`: in which it is written; what `read` gives may be in another."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def cast(self, dtype: torch.dtype | None) -> TensorSource:
        """The same, written in `dtype` where it has floating-point numbers."""
        return replace(self, dtype=dtype) if dtype is not None and self.dtype.is_floating_point else self

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes, in parts; it is let go of with the last one."""
        tensor = self.read().detach()
        assert tuple(tensor.shape) == self.shape, (
            f"{self.name} is {tuple(tensor.shape)} and was said to be {self.shape}"
        )
        flat = tensor.contiguous().view(-1)
        del tensor
        if flat.dtype == self.dtype:
            yield bytes_of(flat)
            return
        for at in range(0, flat.numel(), CAST_ELEMENTS):
            yield bytes_of(flat[at : at + CAST_ELEMENTS].to(self.dtype))


def write_data(file: BinaryIO, source: TensorSource) -> None:
    """Write the bytes of one tensor, of which nothing is left in memory then."""
    for piece in source.pieces():
        file.write(piece)


def write_safetensors(path: Path, sources: Sequence[TensorSource], about: Mapping[str, str] = PLAIN) -> None:
    """One file. `about`: texts that go into its header."""
    ordered = sorted(sources, key=lambda source: -source.dtype.itemsize)  # each begins at a multiple of its element
    head = header([(s.name, code_of(s.name, s.dtype), s.shape) for s in ordered], about)
    with path.open("wb") as file:
        file.write(head)
        for source in ordered:
            write_data(file, source)


def write_shards(folder: Path, sources: Sequence[TensorSource], shard_bytes: int) -> list[str]:
    """A folder as transformers writes it: one file, or several of at most `shard_bytes` with an index. Their names."""
    shards: list[list[TensorSource]] = [[]]
    for source in sources:
        if shards[-1] and sum(s.num_bytes for s in shards[-1]) + source.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(source)
    if len(shards) == 1:
        write_safetensors(folder / HF_SINGLE, shards[0])
        return [HF_SINGLE]
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard)
    where = {source.name: name for name, shard in zip(names, shards, strict=True) for source in shard}
    total = sum(source.num_bytes for source in sources)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / HF_INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return [*names, HF_INDEX]


@contextmanager
def draft_of(at: Path) -> Iterator[Path]:
    """An empty folder beside `at`, which nobody takes for it; removed at the end, whatever came of it.

    Raises `UsageError` where `at` is taken, or nothing can be made beside it.
    """
    if at.exists():
        raise UsageError(f"{at} exists; pass another path or remove it.")
    begun = at.with_name(f".{at.name}.{secrets.token_hex(4)}.tmp")
    try:
        begun.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{at} cannot be made: {error.strerror or error}.") from None
    try:
        yield begun
    finally:
        shutil.rmtree(begun, ignore_errors=True)
