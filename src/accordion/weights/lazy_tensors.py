"""Lazy tensors of files: torch functions on them read nothing and return lazy tensors, which read what they need when used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accordion.checkpoint.format import DTYPES
from accordion.checkpoint.reading import fill_part
from accordion.checkpoint.storage.local import LocalReader
from accordion.checkpoint.untrusted_files import StoredTensor, read_folder
from accordion.errors import CheckpointError

Fill: TypeAlias = Callable[[Tensor, tuple[int, ...]], None]
"""(into, start) -> None: fills `into` with the part of a tensor that begins at index `start` and has the shape of `into`."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A lazy tensor: in a file, or the result of torch functions on lazy tensors. `whole` reads all its values, `fill` a part.

    Torch functions accept lazy tensors and return lazy ones without reading, so the conversions of transformers run unchanged.
    Results of stack, cat, split, chunk and transpose read only what is needed. Others are computed whole in each read.
    """

    shape: torch.Size
    dtype: torch.dtype
    fill: Fill

    def narrow(self, dim: int, start: int, length: int) -> Rows:
        dim %= len(self.shape)
        shape = torch.Size([*self.shape[:dim], length, *self.shape[dim + 1 :]])
        return Rows(shape, self.dtype, lambda into, at: self.fill(into, (*at[:dim], at[dim] + start, *at[dim + 1 :])))

    def unsqueeze(self, dim: int) -> Rows:
        dim %= len(self.shape) + 1
        shape = torch.Size([*self.shape[:dim], 1, *self.shape[dim:]])
        return Rows(shape, self.dtype, lambda into, at: self.fill(into.squeeze(dim), (*at[:dim], *at[dim + 1 :])))

    def in_blocks(self, size: int) -> Rows:
        """Return this (out, width) tensor as a lazy one of (out * width / size, size), whose `fill` takes whole rows only."""
        width = self.shape[1]

        def fill(into: Tensor, at: tuple[int, ...]) -> None:
            flat, begin = into.view(-1), at[0] * size
            done = 0
            while done < flat.numel():
                row, column = divmod(begin + done, width)
                left = flat[done:]
                num_rows = left.numel() // width if column == 0 else 0
                part = left[: num_rows * width] if num_rows else left[: width - column]
                self.fill(part.view(max(1, num_rows), -1), (row, column))
                done += part.numel()

        return Rows(torch.Size([self.shape.numel() // size, size]), self.dtype, fill)

    def whole(self) -> Tensor:
        into = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.fill(into, (0,) * into.dim())
        return into

    def contiguous(self) -> Rows:
        return self

    def transpose(self, dim0: int, dim1: int) -> Rows:
        def swapped(values: Iterable[int]) -> list[int]:
            new = list(values)
            new[dim0], new[dim1] = new[dim1], new[dim0]
            return new

        def fill(into: Tensor, at: tuple[int, ...]) -> None:
            self.fill(into.transpose(dim0, dim1), tuple(swapped(at)))

        return Rows(torch.Size(swapped(self.shape)), self.dtype, fill)

    def __getitem__(self, index: Any) -> Any:
        return _deferred(torch.Tensor.__getitem__, (self, index), {})

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name)
        if name.startswith("_") or not callable(method):
            raise AttributeError(f"a tensor that is not read yet has no {name!r}")
        return lambda *args, **kwargs: _deferred(method, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lazily = LAZY.get(func)
        return lazily(*args, **(kwargs or {})) if lazily else _deferred(func, args, kwargs or {})


def rows_of_folder(folder: Path) -> dict[str, Rows]:
    """Return name -> lazy tensor of a safetensors folder. Reads only headers and the index. Raises `CheckpointError` if one of
    them is missing or damaged."""
    tensors = read_folder(folder)
    return {
        key: Rows(torch.Size(stored.shape), DTYPES[stored.dtype], partial(_read, path, stored))
        for key, (path, stored) in sorted(tensors.items())
    }


def _read(path: Path, stored: StoredTensor, into: Tensor, at: tuple[int, ...]) -> None:
    """Fill `into` with the part of a stored tensor that begins at the index `at`. Raise `CheckpointError` if that fails."""
    # Files are read and not mapped, because pages of a mapped file count as memory of this process.
    index = tuple(slice(a, a + n) for a, n in zip(at, into.shape, strict=True))
    try:
        with closing(LocalReader(path)) as reader:
            fill_part(into, reader, stored.at, DTYPES[stored.dtype], stored.shape, index)
    except OSError as error:
        raise CheckpointError(f"{path}, which contains {stored.name}: {error}") from error


def as_rows(value: Any) -> Rows:
    """Return `value` as a lazy tensor: itself if it is one; a tensor in memory is wrapped in `Rows`."""
    if isinstance(value, Rows):
        return value

    def fill(into: Tensor, at: tuple[int, ...]) -> None:
        into.copy_(value[tuple(slice(a, a + n) for a, n in zip(at, into.shape, strict=True))])

    return Rows(value.shape, value.dtype, fill)


def _stack(tensors: Iterable[Any], dim: int = 0) -> Rows:
    parts = [as_rows(t) for t in tensors]
    dim %= len(parts[0].shape) + 1
    return _cat([part.unsqueeze(dim) for part in parts], dim)


def _cat(tensors: Iterable[Any], dim: int = 0) -> Rows:
    parts = [as_rows(t) for t in tensors]
    dim %= len(parts[0].shape)
    if len({(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}) > 1:
        raise ValueError(f"tensors of the shapes {[tuple(part.shape) for part in parts]} do not join on dim {dim}")

    def fill(into: Tensor, at: tuple[int, ...]) -> None:
        first, stop, begin = at[dim], at[dim] + into.shape[dim], 0
        for part in parts:
            end = begin + part.shape[dim]
            low, high = max(first, begin), min(stop, end)
            if low < high:
                part.fill(into.narrow(dim, low - first, high - low), (*at[:dim], low - begin, *at[dim + 1 :]))
            begin = end

    shape = parts[0].shape
    rows = sum(part.shape[dim] for part in parts)
    return Rows(torch.Size([*shape[:dim], rows, *shape[dim + 1 :]]), parts[0].dtype, fill)


def _split(tensor: Rows, sizes: int | list[int], dim: int = 0) -> tuple[Rows, ...]:
    rows = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, rows - start) for start in range(0, rows, sizes)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if sum(sizes) != rows:
        raise ValueError(f"{rows} rows do not split into {sizes}")
    return tuple(tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True))


LAZY: Mapping[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.split: _split,
    torch.chunk: lambda tensor, chunks, dim=0: _split(tensor, max(1, -(-tensor.shape[dim] // chunks)), dim),
    torch.transpose: Rows.transpose,
}


def _deferred(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of the torch function `func` as a lazy tensor or a tuple of them. `func` runs on meta tensors now, for
    their shapes, and on values at each read. Any other result is returned as computed from the meta tensors."""

    def run(tensor_of: Callable[[Rows], Tensor]) -> Any:
        def replaced(tree: Any) -> Any:
            if isinstance(tree, (list, tuple)):
                return type(tree)([replaced(item) for item in tree])
            return tensor_of(tree) if isinstance(tree, Rows) else tree

        return func(*replaced(args), **{key: replaced(value) for key, value in kwargs.items()})

    def rows(tensor: Tensor, index: int | None) -> Rows:
        def fill(into: Tensor, at: tuple[int, ...]) -> None:
            out = run(Rows.whole)
            as_rows(out if index is None else out[index]).fill(into, at)

        return Rows(tensor.shape, tensor.dtype, fill)

    shapes = run(lambda r: torch.empty(r.shape, dtype=r.dtype, device="meta"))
    if isinstance(shapes, Tensor):
        return rows(shapes, None)
    if isinstance(shapes, (list, tuple)) and all(isinstance(shape, Tensor) for shape in shapes):
        return tuple(rows(shape, i) for i, shape in enumerate(shapes))
    return shapes
