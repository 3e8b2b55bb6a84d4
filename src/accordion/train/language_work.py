"""Base class of training on text and on examples: the language model, and its description in checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import nn
from torch.optim import Optimizer

from accordion.checkpoint.streamed import draft_of
from accordion.models.stored import ends_of, generation_config, with_lora
from accordion.state import Only
from accordion.tasks.loaded import made_optimizer, optimizer_of
from accordion.train.config import Config, model_name
from accordion.train.evaluate import sample
from accordion.train.model import causal_model, configuration, fill
from accordion.train.screen import Screen
from accordion.train.token_tables import ExampleFiles, TokenFiles
from accordion.train.work import Validation

SAMPLE_TOKENS = 64
BASE = "base"  # folder in the run's, of a base that is no folder yet


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageWork:
    """Base class of the work on a language model. `generation`, `spec`: its generation_config.json and tokenizer.json.

    `unit`: what the data is counted in, for messages.
    """

    config: Config
    files: TokenFiles | ExampleFiles
    generation: Mapping[str, Any]
    spec: str
    unit: str
    counted: str = "tokens"

    @property
    def name(self) -> str:
        return model_name(self.config.model)

    @property
    def data(self) -> str:
        """The rows of the run, as its checkpoints name them."""
        return self.files.digest

    def agreed(self) -> dict[str, str]:
        files = self.files
        return {
            self.unit: f"{files.num_train:,} ({files.digest[:12]})",
            "a tokenizer": files.tokenizer_digest[:12],
        }

    def progress(self, model: nn.Module) -> dict[str, Any]:
        return {**self.described(model), "data": self.data, "tokenizer": self.files.tokenizer_digest}

    def has_data_of(self, extra: Mapping[str, Any]) -> bool:
        return bool(extra["data"] == self.data)

    def _show_sample(
        self, model: nn.Module, device: torch.device, prompt: list[int], seed: int, screen: Screen, **words: bool
    ) -> None:
        """Show how the model goes on after `prompt`. `words`: of the tokenizer's `decode`."""
        ends, longest = self.generation["eos_token_id"], self.config.data.seq_len
        written = sample(model, device, prompt, SAMPLE_TOKENS, longest, seed, ends)
        tokenizer = Tokenizer.from_str(self.spec)
        screen.sample(tokenizer.decode(prompt, **words), tokenizer.decode(written, **words))

    def model(self, seed: int) -> nn.Module:
        return trained_model(self.config)

    def units(self) -> None:
        return None

    def fill(self, model: nn.Module, seed: int, *, on_meta: bool) -> None:
        """Adapters begin as PEFT begins them. Ranks draw different random numbers afterwards if there is dropout."""
        fill(model, self.config.model, seed)
        if self.config.adapter.dropout:
            torch.manual_seed(seed + 1 + dist.get_rank())

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


def validated(loss: float, of_what: str, read: str) -> Validation:
    """Return a validation loss with its perplexity. `read`: how many rows it is of."""
    perplexity = math.exp(min(loss, 700.0))
    return Validation(loss=loss, words=f" (perplexity {perplexity:,.1f}{of_what}; {read})")


def generation_settings(config: Config, ends: list[int]) -> dict[str, Any]:
    """Return the generation_config.json of the base, or one of its config.json, with `ends` among its end tokens."""
    base = configuration(config.model, config.data)
    own = {key: getattr(base, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if config.model.path is not None:
        own |= generation_config(Path(config.model.path)) or {}
    held = {key: value for key, value in own.items() if value is not None}
    return {**held, "eos_token_id": ends_of(own["eos_token_id"], ends)}


def trained_model(config: Config) -> nn.Module:
    """The model on the meta device, with adapters and frozen where `config` says so. Raises `UsageError`."""
    model = causal_model(config.model, config.data)
    return model if config.adapter.kind == "none" else with_lora(model, asdict(config.adapter), config.model.path)


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
