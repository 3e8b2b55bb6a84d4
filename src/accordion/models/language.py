"""Builds language models of transformers on the meta device, for the planner and for training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accordion.errors import UsageError
from accordion.garbage import without_collections


def is_encoder(config: Any) -> bool:
    """Return True if transformers has a masked language model for `config`, and `architectures` and `is_decoder` in `config`
    name no causal one."""
    with without_collections():
        from transformers import MODEL_FOR_MASKED_LM_MAPPING
    named = getattr(config, "architectures", None) or ()
    causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in named)
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not causal and not getattr(config, "is_decoder", False)


def masked_model(config: Any, where: str, attention: str | None = None) -> nn.Module:
    """Return the masked language model of `config` on meta, in float32 and train mode. `where`: name of `config` in errors.
    `attention`: `attn_implementation` of transformers; None: its default. Raises `UsageError` if transformers cannot build it."""
    from transformers import AutoModelForMaskedLM

    return built(AutoModelForMaskedLM, config, where, attention, torch.float32)


def language_model(
    config: Any, where: str, attention: str | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Return the causal language model of `config` on meta, in `dtype` and train mode. `where`: name of `config` in errors.
    `attention`: `attn_implementation` of transformers; None: its default. Raises `UsageError` if transformers cannot build it."""
    with without_collections():
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(
            f"{where} is of type {config.model_type!r}, of which transformers has no causal language model; plan and "
            "train a module of any other kind from Python, with accordion.Workload(model, loss, batch) and accordion.shard."
        )
    return built(AutoModelForCausalLM, config, where, attention, dtype)


def built(auto: Any, config: Any, where: str, attention: str | None, dtype: torch.dtype) -> nn.Module:
    """Return a model of `config`, built by `auto`, an `Auto` class of transformers, on meta and in train mode. `where`: name of
    `config` in errors. `attention`: `attn_implementation`; None: the default. Raises `UsageError` if `auto` fails."""
    how = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            model: nn.Module = auto.from_config(config, dtype=dtype, **how)
    except Exception as error:  # a wrong config.json can raise any error anywhere in transformers
        raise UsageError(f"{where} is no model that transformers can build: {brief(error)}") from None
    return model.train()


def brief(error: Exception) -> str:
    """Return the first sentence of an error's text, cut after 200 characters: errors of transformers can be long lists."""
    return " ".join(str(error).split()).split(". ")[0][:200].rstrip(".") + "."
