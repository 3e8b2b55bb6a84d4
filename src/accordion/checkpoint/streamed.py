"""Write safetensors files for other programs one tensor at a time, with only that tensor in host memory."""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from accordion.checkpoint.format import code_of, header
from accordion.checkpoint.untrusted_files import HF_INDEX, HF_SINGLE
from accordion.checkpoint.writing import bytes_of
from accordion.errors import UsageError

CAST_ELEMENTS = 2**20  # cast at once, because a cast of the whole tensor would be a second one in memory
PLAIN = {"format": "pt"}  # metadata that transformers requires


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to write in `dtype`. `read`: returns its values when they are needed, possibly in another dtype."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def cast(self, dtype: torch.dtype | None) -> TensorSource:
        """Return a source of this tensor in `dtype`; this source if `dtype` is None or the tensor is not floating-point."""
        return replace(self, dtype=dtype) if dtype is not None and self.dtype.is_floating_point else self

    def pieces(self) -> Iterator[memoryview]:
        """Read the tensor and iterate over its bytes, cast to `dtype`, in blocks. Its memory is freed after the last one."""
        tensor = self.read().detach()
        assert tuple(tensor.shape) == self.shape, (
            f"{self.name} has the shape {tuple(tensor.shape)} and was described with {self.shape}"
        )
        flat = tensor.contiguous().view(-1)
        del tensor
        if flat.dtype == self.dtype:
            yield bytes_of(flat)
            return
        for at in range(0, flat.numel(), CAST_ELEMENTS):
            yield bytes_of(flat[at : at + CAST_ELEMENTS].to(self.dtype))


def write_safetensors(path: Path, sources: Sequence[TensorSource], about: Mapping[str, str] = PLAIN) -> None:
    """Write `sources`, largest elements first, to a safetensors file at `path`. `about`: texts for the metadata in its header."""
    ordered = sorted(sources, key=lambda source: -source.dtype.itemsize)  # aligns each tensor to its elements' size
    head = header([(s.name, code_of(s.name, s.dtype), s.shape) for s in ordered], about)
    with path.open("wb") as file:
        file.write(head)
        for source in ordered:
            file.writelines(source.pieces())  # frees one tensor before the next one is read


def write_shards(folder: Path, sources: Sequence[TensorSource], shard_bytes: int) -> list[str]:
    """Write `sources` to `folder` as one safetensors file if they fit into `shard_bytes`, else as several and an index. A tensor
    larger than `shard_bytes` gets a file of its own. Return the file names."""
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
    file_of = {source.name: name for name, shard in zip(names, shards, strict=True) for source in shard}
    total = sum(source.num_bytes for source in sources)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
    (folder / HF_INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return [*names, HF_INDEX]


@contextmanager
def draft_of(at: Path) -> Iterator[Path]:
    """Context manager that yields a new hidden folder next to `at`. Its body renames the folder, or a file in it, to `at`; at the
    end, what is left is removed. Raises `UsageError` if `at` exists or the folder cannot be created."""
    if at.exists():
        raise UsageError(f"{at} exists; pass another path or remove it.")
    begun = at.with_name(f".{at.name}.{secrets.token_hex(4)}.tmp")
    try:
        begun.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{at} cannot be created: {error.strerror or error}.") from None
    try:
        yield begun
    finally:
        shutil.rmtree(begun, ignore_errors=True)
