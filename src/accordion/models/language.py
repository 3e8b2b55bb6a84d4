"""Causal language models of transformers, built without memory: for the planner and for the main job alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accordion.errors import UsageError
from accordion.garbage import without_collections


def is_encoder(config: Any) -> bool:
    """Whether a configuration describes a model that fills in masked tokens, and does not say that it is a causal one."""
    with without_collections():
        from transformers import MODEL_FOR_MASKED_LM_MAPPING
    named = getattr(config, "architectures", None) or ()
    causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in named)
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not causal and not getattr(config, "is_decoder", False)


def masked_model(config: Any, where: str, attention: str | None = None) -> nn.Module:
    """The model of an encoder that fills in masked tokens, as `language_model` gives a causal one."""
    from transformers import AutoModelForMaskedLM

    return built(AutoModelForMaskedLM, config, where, attention, torch.float32)


def language_model(
    config: Any, where: str, attention: str | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The causal language model of a configuration on the meta device. `attention`: transformers' name of the
    implementation; None: its own choice. Raises `UsageError` where it is none.
    """
    with without_collections():
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(
            f"{where} is of type {config.model_type!r}, of which transformers has no causal language model; plan and "
            "train a module of any other kind from Python, with accordion.Workload(model, loss, batch) and accordion.shard."
        )
    return built(AutoModelForCausalLM, config, where, attention, dtype)


def built(auto: Any, config: Any, where: str, attention: str | None, dtype: torch.dtype) -> nn.Module:
    """What one of transformers' `Auto` classes makes of a configuration, on the meta device. Raises `UsageError`."""
    how = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            model: nn.Module = auto.from_config(config, dtype=dtype, **how)
    except Exception as error:  # what a wrong config.json breaks is anywhere in transformers
        raise UsageError(f"{where} is no model that transformers can build: {brief(error)}") from None
    return model.train()


def brief(error: Exception) -> str:
    """The first sentence: transformers lists every model it knows."""
    return " ".join(str(error).split()).split(". ")[0][:200].rstrip(".") + "."
