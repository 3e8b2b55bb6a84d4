"""The tensors of a stored model, by the names of transformers' model, each read when it is written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from accordion.checkpoint.convert import check_model, sources_of, ties_of
from accordion.checkpoint.format import DTYPES
from accordion.checkpoint.reading import opened
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.checkpoint.streamed import TensorSource
from accordion.checkpoint.untrusted_files import (
    HF_INDEX,
    HF_SINGLE,
    StoredTensor,
    check_quantised,
    read_header,
    read_index,
)
from accordion.checkpoint.writing import bytes_of
from accordion.errors import CheckpointError, UsageError
from accordion.export.adapters import merged
from accordion.models.stored import StoredModel, meta_model
from accordion.weights.lazy_tensors import Rows
from accordion.weights.pretrained import equal_rows, match, names_of

STAGE_BYTES = 2**24  # read at once where rows do not lie in the file as they are asked for


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """`sources`: each tied tensor once. `ties`: other names of tied ones, and the name under which each is in `sources`.

    `untied`: tensors that config.json ties differ, since an adapter changed one of them.
    """

    sources: list[TensorSource]
    ties: Mapping[str, str]
    untied: bool = False

    def of(self, name: str) -> TensorSource | None:
        """By any of its names."""
        wanted = self.ties.get(name, name)
        return next((source for source in self.sources if source.name == wanted), None)


@contextmanager
def tensors_of(stored: StoredModel, dtype: torch.dtype | None = None) -> Iterator[NamedTensors]:
    """Inside, what is stored can be read: adapters merged, floating-point tensors in `dtype`.

    Raises `CheckpointError` for a source that is damaged or of another model.
    """
    with _as_stored(stored) as found:
        if stored.adapter is not None:
            sources, ties = merged(stored, found.sources, found.ties)
            found = NamedTensors(sources, ties, untied=len(ties) < len(found.ties))
        yield replace(found, sources=[source.cast(dtype) for source in found.sources])


@contextmanager
def _as_stored(stored: StoredModel) -> Iterator[NamedTensors]:
    if stored.kind == "checkpoint":
        with closing(opened(checkpoint_at(stored.path))) as files:
            check_model(files)
            yield NamedTensors(sources_of(files), ties_of(files))
        return
    folder = Path(stored.path)
    model = meta_model(replace(stored, adapter=None))
    matched = match(model, folder, folder_rows(folder), [])
    for one, other in matched.ties:
        if not equal_rows(matched.found[one].rows, matched.found[other].rows):
            raise UsageError(
                f"{folder}: config.json ties {one} and {other}, and they differ in the file; set tie_word_embeddings to false "
                "there, or remove the one that is not meant."
            )
    wanted = names_of(model)
    sources = [
        TensorSource(name, matched.found[name].rows.dtype, tuple(wanted[name].shape), matched.found[name].rows.whole)
        for name in matched.first.values()
    ]
    ties = {name: kept for name, t in wanted.items() if (kept := matched.first.get(id(t), name)) != name}
    yield NamedTensors(sources, ties)


def folder_sources(folder: Path, dtype: torch.dtype | None) -> list[TensorSource]:
    """The tensors of a folder of transformers by its own names."""
    rows = folder_rows(folder)
    return [TensorSource(name, r.dtype, tuple(r.shape), r.whole).cast(dtype) for name, r in rows.items()]


def folder_rows(folder: Path) -> dict[str, Rows]:
    """What `open_folder` gives, read in place of mapped: pages of a mapped file count as this process's memory."""
    if (folder / HF_SINGLE).is_file():
        places = {held.name: (folder / HF_SINGLE, held) for held in read_header(folder / HF_SINGLE)}
    elif (folder / HF_INDEX).is_file():
        index = read_index(folder)
        heads = {name: {held.name: held for held in read_header(folder / name)} for name in sorted(set(index.values()))}
        lost = [key for key, name in index.items() if key not in heads[name]]
        if lost:
            raise CheckpointError(
                f"{folder / HF_INDEX} names {len(lost)} tensors that are not there: {', '.join(lost)}."
            )
        places = {key: (folder / name, heads[name][key]) for key, name in index.items()}
    else:
        raise UsageError(f"{folder} has neither {HF_SINGLE} nor {HF_INDEX}.")
    check_quantised({}, str(folder), places)
    return {
        key: Rows(torch.Size(held.shape), DTYPES[held.dtype], partial(_read, path, held))
        for key, (path, held) in sorted(places.items())
    }


def _read(path: Path, held: StoredTensor, into: Tensor, at: tuple[int, ...]) -> None:
    """Fill `into` with the part of a stored tensor that begins at `at`."""
    dtype = DTYPES[held.dtype]
    row_bytes = math.prod(held.shape[1:]) * dtype.itemsize
    first, num_rows = (at[0], into.shape[0]) if held.shape else (0, 1)
    whole_rows = tuple(into.shape[1:]) == held.shape[1:]
    with path.open("rb", buffering=0) as file:
        if whole_rows and into.dtype == dtype and into.is_contiguous():
            _read_into(file.fileno(), bytes_of(into), held.at + first * row_bytes, path)
            return
        step = max(1, STAGE_BYTES // max(1, row_bytes))
        inner = tuple(slice(a, a + n) for a, n in zip(at[1:], into.shape[1:], strict=True))
        for start in range(0, num_rows, step):
            rows = min(step, num_rows - start)
            stage = torch.empty(rows, *held.shape[1:], dtype=dtype, device="cpu")
            _read_into(file.fileno(), bytes_of(stage), held.at + (first + start) * row_bytes, path)
            (into[start : start + rows] if held.shape else into).copy_(
                stage[(slice(None), *inner)] if held.shape else stage[0]
            )


def _read_into(handle: int, memory: memoryview, at: int, path: Path) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(handle, [memory[done:]], at + done)
        if not count:
            raise CheckpointError(f"{path} ends at byte {at + done}, where a tensor lies.")
        done += count
