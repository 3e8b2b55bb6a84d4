"""Base class of training on text and on examples: the language model, and its description in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from accordion.models.stored import ends_of, generation_config
from accordion.state import Only
from accordion.tasks.loaded import made_optimizer, optimizer_of
from accordion.train.adapters import fill_trained, kept_of, trained_model
from accordion.train.config import Config, model_name
from accordion.train.model import configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageWork:
    """Base class of the work on a language model of `config`. `generation`: its generation_config.json."""

    config: Config
    generation: Mapping[str, Any]
    counted: str = "tokens"

    @property
    def name(self) -> str:
        return model_name(self.config.model)

    def model(self, seed: int) -> nn.Module:
        return trained_model(self.config)

    def units(self) -> None:
        return None

    def fill(self, model: nn.Module, seed: int, *, on_meta: bool) -> None:
        fill_trained(model, self.config, seed)

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        make = optimizer_of(self.config.parts)
        return None if make is None else made_optimizer(make, model)

    def scheduler(self, optimizer: Optimizer) -> None:
        return None

    def kept(self) -> Only:
        return kept_of(self.config)

    def state(self) -> dict[str, Any]:
        return {}

    def described(self, model: nn.Module) -> dict[str, Any]:
        """Return what a checkpoint says of its model, its end tokens and its adapters, for `accordion export` and `generate`."""
        config = json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[operator, union-attr]
        config["eos_token_id"] = ends_of(config.get("eos_token_id"), self.generation["eos_token_id"])
        extra = {"model_config": config, "generation_config": dict(self.generation)}
        if self.config.adapter.kind == "none":
            return extra
        assert self.config.model.path is not None, "with_base gave it one"
        base = str(Path(self.config.model.path).absolute())
        return {**extra, "adapter": {**asdict(self.config.adapter), "base": base}}


def generation_settings(config: Config, ends: list[int]) -> dict[str, Any]:
    """Return the generation_config.json of the base, or one of its config.json, with `ends` among its end tokens."""
    base = configuration(config.model, config.data)
    own = {key: getattr(base, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if config.model.path is not None:
        own |= generation_config(Path(config.model.path)) or {}
    held = {key: value for key, value in own.items() if value is not None}
    return {**held, "eos_token_id": ends_of(own["eos_token_id"], ends)}
