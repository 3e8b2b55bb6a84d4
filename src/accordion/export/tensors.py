"""Lists the tensors of a stored model by the names of transformers; each is read when it is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from accordion.checkpoint.convert import TensorSource, check_model, sources_of, ties_of
from accordion.checkpoint.reading import opened
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.checkpoint.untrusted_files import check_quantised
from accordion.errors import UsageError
from accordion.export.adapters import merged
from accordion.models.stored import StoredModel, meta_model
from accordion.weights.lazy_tensors import rows_of_folder
from accordion.weights.pretrained import equal_rows, match, names_of


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """The tensors of a stored model, not read yet: each once in `sources`, and further names of tied tensors in `ties`."""

    sources: list[TensorSource]
    ties: Mapping[str, str]  # each other name of a tied tensor -> its name in `sources`
    untied: bool = False  # True if tensors that config.json ties differ, because an adapter changed one of them


@contextmanager
def tensors_of(stored: StoredModel, dtype: torch.dtype | None) -> Iterator[NamedTensors]:
    """Context manager that yields the tensors of a stored model, which can be read until its body ends. An adapter is merged into
    them as they are read. `dtype`: cast floating-point tensors to this dtype; None keeps theirs. Raises `CheckpointError` if the
    source is damaged or of another model, and `UsageError` if it is quantised, its tied tensors differ, or its adapter cannot be
    merged."""
    with _as_stored(stored) as tensors:
        if stored.adapter is not None:
            sources, ties = merged(stored, tensors.sources, tensors.ties)
            tensors = NamedTensors(sources, ties, untied=len(ties) < len(tensors.ties))
        yield replace(tensors, sources=[source.cast(dtype) for source in tensors.sources])


@contextmanager
def _as_stored(stored: StoredModel) -> Iterator[NamedTensors]:
    if stored.kind == "checkpoint":
        with closing(opened(checkpoint_at(stored.path), stored.ema)) as files:
            check_model(files)
            yield NamedTensors(sources_of(files), ties_of(files))
        return
    folder = Path(stored.path)
    model = meta_model(replace(stored, adapter=None))
    tensors = rows_of_folder(folder)
    check_quantised({}, str(folder), tensors)
    matched = match(model, folder, tensors, [])
    for one, other in matched.ties:
        if not equal_rows(matched.stored[one].rows, matched.stored[other].rows):
            raise UsageError(
                f"{folder}: config.json ties {one} and {other}, and they differ in the file; set tie_word_embeddings to false "
                "there, or remove the one that is not meant."
            )
    wanted = names_of(model)
    sources = [
        TensorSource(name, matched.stored[name].rows.dtype, tuple(wanted[name].shape), matched.stored[name].rows.whole)
        for name in matched.first.values()
    ]
    ties = {name: first for name, t in wanted.items() if (first := matched.first.get(id(t), name)) != name}
    yield NamedTensors(sources, ties)


def folder_sources(folder: Path, dtype: torch.dtype | None) -> list[TensorSource]:
    """Return the tensors, not read yet, in the files of a folder of transformers. `dtype`: cast floating-point tensors to this
    dtype; None keeps theirs. Raises `UsageError` if the tensors are quantised."""
    tensors = rows_of_folder(folder)
    check_quantised({}, str(folder), tensors)
    return [TensorSource(name, r.dtype, tuple(r.shape), r.whole).cast(dtype) for name, r in tensors.items()]
