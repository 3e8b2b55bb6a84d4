"""Lists the tensors of a stored model by the names of transformers; each is read when it is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accordion.checkpoint.convert import TensorSource, check_model, sources_of, ties_of
from accordion.checkpoint.reading import opened
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.checkpoint.untrusted_files import check_quantised
from accordion.errors import CheckpointError, UsageError
from accordion.models.language import brief
from accordion.models.stored import StoredModel, adapter_weights, computing, meta_model
from accordion.weights.adapters import added_by, copied_inside, is_adapter
from accordion.weights.four_bits import FourBitLinear
from accordion.weights.lazy_tensors import rows_of_folder
from accordion.weights.pretrained import copies_of_layers, equal_rows, four_bit_layers, match, names_of

WRAPPED = re.compile(r"(^|\.)(base_layer|original_module|token_adapter)\.")


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """The tensors of a stored model, which `tensors_of` yields: each once in `sources`, read by a call of its `read`, and
    further names of tied tensors in `ties`."""

    sources: list[TensorSource]
    ties: Mapping[str, str]  # each other name of a tied tensor -> its name in `sources`
    untied: bool = False  # True if tensors that config.json ties differ, because an adapter changed one of them


@contextmanager
def tensors_of(stored: StoredModel, dtype: torch.dtype | None) -> Iterator[NamedTensors]:
    """Context manager that yields the tensors of a stored model, which can be read in its body. An adapter is merged into them
    as they are read. `dtype`: dtype of floating-point tensors; None keeps theirs. Raises `CheckpointError` if the source is
    damaged or of another model, `UsageError` if it is quantised, its tied tensors differ, or its adapter cannot be merged."""
    with _as_stored(stored) as tensors:
        if stored.adapter is not None:
            tensors = merged(stored, tensors)
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


# -- adapters, merged into their base layers by PEFT's own code, with one layer in memory at a time


def merged(stored: StoredModel, base: NamedTensors) -> NamedTensors:
    """Return the tensors `base` of `stored`, each merged with the adapter when it is read. Reads the adapter now.

    If the base was quantised in training, its weights are quantised and dequantised again before the adapter is added. Tied
    tensors of which the adapter changes one become separate. Trained copies replace PEFT's `modules_to_save`. Needs host memory
    for the adapter and three tensors of one layer. Raises `UsageError` if it cannot be merged, `CheckpointError` if damaged.
    """
    whole: Any = meta_model(stored)
    config = next(iter(whole.peft_config.values()))
    if config.is_prompt_learning:
        raise UsageError(
            f"SOURCE {stored.adapter!r} is an adapter of prompts, which belongs to no weight; export its base."
        )
    if getattr(config, "bias", "none") != "none":
        raise UsageError(
            f"SOURCE {stored.adapter!r} trained biases of its base too (bias={config.bias!r}); merge it with PEFT."
        )
    _load(whole, stored)
    model = computing(whole)
    layers = {f"{name}.weight": module for name, module in model.named_modules() if is_adapter(module)}
    layers = {WRAPPED.sub(r"\1", name): module for name, module in layers.items()}
    real = {name: t.detach() for name, t in names_of(model).items() if not t.is_meta}
    copies = {original: real[copy] for copy, original in copies_of_layers(model).items() if copy in real}
    changed = {*layers, *copies, *real}
    left = {name: first for name, first in base.ties.items() if name not in changed and first not in changed}
    if left != dict(base.ties) and not getattr(model.config, "tie_word_embeddings", False):
        raise UsageError(
            f"SOURCE {stored.adapter!r} changes one of the tied tensors {', '.join(base.ties)}, and config.json has no "
            "tie_word_embeddings to untie them with; merge it with PEFT."
        )
    # The adapter was trained next to the rounded weights of its base.
    rounded = four_bit_layers(model)
    sources = [
        replace(s, read=partial(_rounded, rounded[s.name], s.read)) if s.name in rounded else s for s in base.sources
    ]
    by_name = {source.name: source for source in sources}
    lost = sorted({*layers, *copies} - set(by_name) - set(base.ties))
    if lost:
        raise UsageError(
            f"SOURCE {stored.adapter!r} changes {', '.join(lost[:3])}, which its base does not have; merge it with PEFT."
        )
    untied = [replace(by_name[first], name=name) for name, first in base.ties.items() if name not in left]
    result = []
    for source in (*sources, *untied):
        trained = copies.get(source.name, real.get(source.name))  # a copy of a layer that was trained with the adapter
        if trained is not None:
            source = replace(source, read=trained.clone)
        elif source.name in layers:
            source = replace(source, read=partial(_merge, layers[source.name], source.read))
        result.append(source)
    return NamedTensors(result, left, untied=len(left) < len(base.ties))


def _merge(layer: Any, read: Callable[[], Tensor]) -> Tensor:
    """Return the merged weight of the PEFT layer `layer`: the base weight that `read` returns, plus its adapter. Afterwards the
    layer is unmerged as before, with its base weight on meta. Raises `UsageError` if PEFT cannot merge it."""
    below = layer.get_base_layer()
    meta, below.weight = below.weight, nn.Parameter(read(), requires_grad=False)
    try:
        with torch.no_grad():
            layer.merge(safe_merge=False)
        weight: Tensor = below.weight.data
    except Exception as error:  # PEFT raises errors of many kinds for layers that it cannot merge
        raise UsageError(f"the adapter of {type(below).__name__} cannot be merged: {brief(error)}") from None
    finally:
        below.weight = meta
        layer.merged_adapters.clear()
    return weight


def _rounded(layer: FourBitLinear, read: Callable[[], Tensor]) -> Tensor:
    return layer.rounded(read())


def _load(whole: Any, stored: StoredModel) -> None:
    """Load the adapter of `stored` into the PEFT model `whole`: its tensors move from meta to the CPU, the base stays on meta.
    Raises `UsageError` if the weights cannot be read or some are missing, and `CheckpointError` if their file is damaged."""
    from peft import set_peft_model_state_dict

    assert stored.adapter is not None
    try:
        weights = adapter_weights(stored)
    except CheckpointError:
        raise
    except Exception as error:  # safetensors, torch and PEFT raise errors of many kinds
        raise UsageError(f"SOURCE {stored.adapter!r} has no weights that can be read: {brief(error)}") from None
    for module in whole.modules():
        for child in added_by(module) if is_adapter(module) else (copy for _, copy in copied_inside(module)):
            child.to_empty(device="cpu")
    real = {name for name, tensor in whole.state_dict(keep_vars=True).items() if not tensor.is_meta}
    lost = sorted(real & set(set_peft_model_state_dict(whole, weights).missing_keys))
    if lost:
        raise UsageError(f"SOURCE {stored.adapter!r} lacks {len(lost)} tensors of its adapter: {', '.join(lost[:3])}.")
