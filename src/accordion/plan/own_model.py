"""Language models that a function of the user's makes: `file.py:build`, or `package.module:build`."""

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
    """Whether a model is named as code of the user's."""
    return NAMED.fullmatch(model) is not None


def own_model(model: str) -> nn.Module:
    """What the function makes, on the meta device. Raises `UsageError`, and `TaskError` where the function fails."""
    if ":" not in model or model.endswith(":"):
        raise UsageError(
            f"model {model!r} names no function; write {model.rstrip(':')}:build, of a function without arguments that gives the "
            "module, or plan a task: --task."
        )
    build = target_of("model", model)
    name = model.rpartition(":")[2]
    with of_the_task(f"{name}()"), torch.device("meta"):
        made = build()
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"model {model!r} gave a {type(made).__name__}; {name}() takes no arguments and gives a module."
        )
    return made.train()


def vocab_of(model: nn.Module, where: str) -> int:
    """How many tokens it knows. Raises `UsageError` where it reads none."""
    told = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(told, int):
        return told
    table = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if table is None:
        raise UsageError(
            f"{where} has no nn.Embedding, so it reads no tokens; plan it as a task, with a batch of its own: --task."
        )
    return table.num_embeddings


def own_loss(where: str, loss: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """0-d, of what the model makes of tokens, (micro_batch, seq) int64. Raises `UsageError` where these are no logits."""
    tokens, labels = batch
    if loss == "chunked":
        expect_labels(model, labels)
    with of_the_task("the model's forward(tokens)"):
        out: Any = model(tokens)
    logits = out[0] if isinstance(out, tuple) else getattr(out, "logits", out)
    wanted = (
        f"a tensor of {tuple(tokens.shape)} and the vocabulary, a tuple that begins with it, or an object with .logits"
    )
    if not isinstance(logits, Tensor) or (loss != "chunked" and logits.shape[:-1] != tokens.shape):
        found = f"of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise UsageError(f"{where} made of tokens {found}; a language model makes {wanted}. Or plan a task: --task.")
    return loss_of_logits(loss, logits, labels)
