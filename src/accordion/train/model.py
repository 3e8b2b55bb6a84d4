"""The language model that a run trains: a preset, or a model folder, built by transformers without dropout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accordion.checkpoint.untrusted_files import check_quantised
from accordion.errors import UsageError
from accordion.files import read_text
from accordion.models.language import brief
from accordion.models.llama import TRAINED, llama_config
from accordion.train.config import DataConfig, ModelConfig
from accordion.units import UnitChoice, choose_units

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_folder(path: str) -> dict[str, Any]:
    """Return the content of config.json in the folder `path`, the value of `model.path`. Raises `UsageError` if the folder or
    the file cannot be read, if the file names no model_type, or if the file says that the weights are quantised."""
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"model.path {path!r} is no folder; give one with config.json, or take a model.preset.")
    try:
        described = json.loads(read_text(folder / "config.json"))
    except (OSError, ValueError) as error:
        raise UsageError(f"model.path {path!r} is no model: its config.json cannot be read: {error}") from None
    if not isinstance(described, dict) or not isinstance(described.get("model_type"), str):
        raise UsageError(f"model.path {path!r} is no model: its config.json names no model_type.")
    check_quantised(described, f"model.path {path!r}")
    return described


def configuration(model: ModelConfig, data: DataConfig) -> PretrainedConfig:
    """Return the transformers configuration of `model`, a preset or a folder, with all dropout rates set to 0. Raises
    `UsageError` if the folder cannot be used, or if its model has fewer positions than `data.seq_len`."""
    from transformers import AutoConfig

    if model.path is None:
        shape = TRAINED[model.preset]
        # The default of transformers, 0.02, suits a width of 2048; at 320 training is slower and has spikes.
        return llama_config(shape, max(4096, data.seq_len), initializer_range=shape.hidden**-0.5)
    check_folder(model.path)
    try:
        config = AutoConfig.from_pretrained(model.path, local_files_only=True)
    except Exception as error:  # transformers raises errors of many kinds
        raise UsageError(f"model.path {model.path!r} is no model: {brief(error)}") from None
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and data.seq_len > longest:
        raise UsageError(f"data.seq_len {data.seq_len} is longer than the {longest} positions of {model.path!r}.")
    for key, value in vars(config).items():
        if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def check_loss_of_head(model: nn.Module, loss: str, units: UnitChoice) -> None:
    """Raise `UsageError` if the head of `model`, on the meta device, cannot compute the loss. The head can if it is linear, and
    the logits are its unchanged output. If `loss` is "head_rows" and not "chunked", the head must also be one of the units that
    `units` chooses, and must not share its weight with another layer."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    outputs, logits = list[Any](), None
    if type(head) is nn.Linear:
        handle = head.register_forward_hook(lambda module, args, out: outputs.append(out))
        ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
        with handle, documents_in_rows(several=False):
            logits = model(input_ids=ids, use_cache=False).logits
    if not outputs or logits is not outputs[-1]:
        raise UsageError(
            f"model.loss is {loss!r}, but the logits of {type(model).__name__} are not the output of a linear head alone; take "
            "--model.loss plain."
        )
    is_tied = sum(p is head.weight for module in model.modules() for p in module._parameters.values()) > 1
    if loss == "head_rows" and (is_tied or all(module is not head for _, module in choose_units(model, units))):
        raise UsageError(
            f"model.loss is 'head_rows', but the head of {type(model).__name__} is {'tied' if is_tied else 'no unit'}, so it is "
            "gathered with other parameters; take --model.loss chunked."
        )


@contextmanager
def documents_in_rows(*, several: bool) -> Iterator[None]:
    """Context manager in which transformers finds the documents in a row without waiting for the device. Replaces a function of
    transformers meanwhile, if this version has that function. `several`: a row has several documents, and one starts wherever
    the position ids do not go up by one; if False, a row is one document."""
    # transformers' function reads the position ids in each forward, so the host waits for the device. No argument of a forward
    # avoids that alone: a mask is read too or disables flash attention, and a cache keeps all keys.
    from transformers import masking_utils

    def numbers(position_ids: Tensor) -> Tensor | None:  # (b, seq_len) -> number of each token's document, (b, seq_len)
        if not several:
            return None
        return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)

    name = "find_packed_sequence_indices"
    original = getattr(masking_utils, name, None)
    if original is None:
        yield
        return
    setattr(masking_utils, name, numbers)
    try:
        yield
    finally:
        setattr(masking_utils, name, original)
