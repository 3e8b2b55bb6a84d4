"""Language models that are built by the user's function, named as `file.py:build` or `package.module:build`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from accordion.errors import UsageError
from accordion.plan.losses import expect_labels, loss_of_logits
from accordion.tasks.classes import target_of
from accordion.tasks.errors import of_the_task

NAMED = re.compile(r".*\.py(:\w*)?|[A-Za-z_][\w.]*:\w+")


def names_code(model: str) -> bool:
    """Return True if `model` names a Python function or file, rather than a preset or a configuration."""
    return NAMED.fullmatch(model) is not None


def own_model(model: str) -> nn.Module:
    """Build the user's model on the meta device. Raises `UsageError`, or `TaskError` if the function fails."""
    if ":" not in model or model.endswith(":"):
        raise UsageError(
            f"model {model!r} names no function; write {model.rstrip(':')}:build, if build() returns the module, or plan a task: "
            "--task."
        )
    build = target_of("model", model)
    name = model.rpartition(":")[2]
    with of_the_task(f"{name}()"), torch.device("meta"):
        module = build()
    if not isinstance(module, nn.Module):
        raise UsageError(f"model {model!r} returned a {type(module).__name__}; {name}() must return an nn.Module.")
    return module.train()


def vocab_of(model: nn.Module, label: str) -> int:
    """Return the size of the model's vocabulary. Raises `UsageError` if the model reads no tokens."""
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(vocab_size, int):
        return vocab_size
    table = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if table is None:
        raise UsageError(
            f"{label} has no nn.Embedding, so it reads no tokens; plan it as a task, with its own batch: --task."
        )
    return table.num_embeddings


def own_loss(label: str, loss: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss (0-d) of the user's model. Raises `UsageError` if the model does not return logits. `label`: the model's
    name in errors. `loss`: a key of `LOSSES`. `batch`: tokens and labels, each (micro_batch, seq) int64."""
    tokens, labels = batch
    if loss == "chunked":
        expect_labels(model, labels)
    with of_the_task("the model's forward(tokens)"):
        out: Any = model(tokens)
    logits = out[0] if isinstance(out, tuple) else getattr(out, "logits", out)
    wanted = f"a tensor of shape {tuple(tokens.shape)} plus the vocabulary, a tuple starting with it, or an object with .logits"
    if not isinstance(logits, Tensor) or (loss != "chunked" and logits.shape[:-1] != tokens.shape):
        kind = f"of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise UsageError(f"the output of {label} is {kind}; a language model returns {wanted}. Or plan a task: --task.")
    return loss_of_logits(loss, logits, labels)
