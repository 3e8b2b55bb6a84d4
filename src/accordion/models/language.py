"""Causal language models of transformers, built without memory: for the planner and for the main job alike."""

from __future__ import annotations

import atexit
import gc
from typing import Any

import torch
from torch import nn

from accordion.errors import UsageError
from accordion.garbage import without_collections


def language_model(config: Any, where: str) -> nn.Module:
    """The causal language model of a configuration on the meta device, in float32. Raises `UsageError` where it is none."""
    with without_collections():
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(
            f"{where} is of type {config.model_type!r}, of which transformers has no causal language model; plan and "
            "train a module of any other kind from Python, with accordion.plan(model, loss, batch) and accordion.shard."
        )
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # what a wrong config.json breaks is anywhere in transformers
        raise UsageError(f"{where} is no causal language model that transformers can build: {brief(error)}") from None
    return model.train()


def end_at_once() -> None:
    """No last garbage collection as this process ends: over all of torch and transformers it takes a second."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def brief(error: Exception) -> str:
    """The first sentence: transformers lists every model it knows."""
    return " ".join(str(error).split()).split(". ")[0][:200].rstrip(".") + "."
