"""Adapters of a run: the model with them, and the folder of a base that a run draws itself."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from accordion.checkpoint.streamed import draft_of
from accordion.models.adapters import with_lora
from accordion.state import Only
from accordion.train.config import Config
from accordion.train.model import causal_model, configuration, fill

BASE = "base"  # folder in the run's, of a base that is no folder yet


def trained_model(config: Config) -> nn.Module:
    """The model on the meta device, with adapters and frozen where `config` says so. Raises `UsageError`."""
    model = causal_model(config.model, config.data)
    return model if config.adapter.kind == "none" else with_lora(model, asdict(config.adapter), config.model.path)


def fill_trained(model: nn.Module, config: Config, seed: int) -> None:
    """As `fill`; adapters begin as PEFT begins them. Ranks draw different random numbers afterwards where there is dropout."""
    fill(model, config.model, seed)
    if config.adapter.dropout:
        torch.manual_seed(seed + 1 + dist.get_rank())


def kept_of(config: Config) -> Only:
    """Which tensors a checkpoint holds: a base has a folder of its own."""
    return None if config.adapter.kind == "none" else "trained"


def with_base(config: Config, run_dir: Path) -> Config:
    """`config` whose base is a folder: a base that a run draws is kept in the run's, once, since checkpoints do not hold it.

    Host memory holds all of it for the time.
    """
    if config.adapter.kind == "none" or config.model.init == "pretrained":
        return config
    folder = run_dir / BASE
    if not folder.is_dir():
        from transformers import AutoModelForCausalLM

        torch.manual_seed(config.train.seed)
        made = AutoModelForCausalLM.from_config(configuration(config.model, config.data))
        with draft_of(folder) as draft:
            made.save_pretrained(draft)
            if not folder.is_dir():  # else another host was quicker, and drew the same
                draft.rename(folder)
    return replace(config, model=replace(config.model, path=str(folder), init="pretrained"))
