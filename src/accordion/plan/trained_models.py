"""The models that a plan is made for: presets, transformers configurations, and what repeats in any module."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion import _torch
from accordion.config import nearest
from accordion.errors import AccordionError, UsageError
from accordion.garbage import without_collections
from accordion.models.language import brief, language_model
from accordion.models.llama import PUBLISHED, llama_config
from accordion.plan.trace.setup import Subject
from accordion.units import UnitChoice, choose_units, min_params


def configuration(model: str, seq: int) -> Any:
    """What transformers builds a model from: a preset, a folder with a config.json, or that file. Raises `UsageError`."""
    if find_spec("transformers") is None:
        raise UsageError("a model by name or configuration needs transformers; pip install 'accordion[plan]'.")
    if model in PUBLISHED:
        with without_collections():
            return llama_config(PUBLISHED[model], max(8192, seq))
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        missing = (
            f"the folder {model!r} has no config.json"
            if path.is_dir()
            else f"model {model!r} is no file, folder or preset"
        )
        raise UsageError(f"{missing}; {nearest(model, PUBLISHED)}")
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"model {model!r}: {file} cannot be read as JSON: {error}") from None
    if not isinstance(described, dict) or not isinstance(described.get("model_type"), str):
        raise UsageError(f"model {model!r}: {file} names no model_type, so it is no transformers configuration.")
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**described)
    except Exception as error:  # transformers checks its configurations with errors of many kinds
        raise UsageError(f"model {model!r}: {brief(error)}") from None
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and seq > longest:
        raise UsageError(
            f"seq is {seq}, longer than the {longest} positions of {model!r}; take --seq {longest} or less."
        )
    return config


class Built:
    """Gives a model that is there already, once, since who has it may cut it; then makes others, in another process at once."""

    def __init__(self, model: nn.Module | None, make: Callable[[], nn.Module]) -> None:
        self._model, self._make = model, make

    def __call__(self) -> nn.Module:
        model, self._model = self._model, None
        return self._make() if model is None else model

    def __reduce__(self) -> tuple[Any, ...]:
        return Built, (None, self._make)


def language_subject(
    config: Any, where: str, micro_batch: int, seq: int, make: Callable[[], nn.Module] | None = None
) -> Subject:
    """Training on text as `accordion train` does it: logits in float32 in the loss, no cache of keys."""
    vocab = int(config.get_text_config().vocab_size)
    return Subject(
        make=make or partial(language_model, config, where),
        batch=partial(_tokens, micro_batch, seq, vocab),
        loss=partial(_token_loss, where),
    )


def _tokens(micro_batch: int, seq: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, each (micro_batch, seq)."""
    both = torch.randint(vocab, (2, micro_batch, seq))
    return both[0], both[1]


def _token_loss(where: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, labels = batch
    try:
        logits = model(input_ids=tokens, use_cache=False).logits  # (micro_batch, seq, vocab)
    except Exception as error:  # of sizes that do not go together torch and transformers say so in many ways
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        ours = raised_in.is_relative_to(Path(__file__).parents[1])
        if ours or isinstance(error, AccordionError) or _torch.asks_for_values(error):
            raise
        raise UsageError(f"{where} can be built, but not run: {brief(error)}") from error
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


# -- what repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualBlocks:
    """Equal blocks in one container. `container`: its name. `first_unit`: index of the first block's unit. `each`: units of one
    block, itself and those inside it.
    """

    container: str
    count: int
    first_unit: int
    each: int = 1


def longest_run(model: nn.Module, units: UnitChoice) -> EqualBlocks | None:
    """The most equal units that follow each other in one list; None where no two do."""
    chosen = choose_units(model, units)
    tops: list[tuple[int, int]] = []  # units that are in no other but the root, and how many each of them holds
    for i, (name, _) in enumerate(chosen[1:], 1):
        if tops and name.startswith(chosen[tops[-1][0]][0] + "."):
            tops[-1] = (tops[-1][0], tops[-1][1] + 1)
        else:
            tops.append((i, 1))
    runs: list[tuple[int, int]] = []  # first unit, count
    last: object = None
    for i, each in tops:
        name, module = chosen[i]
        container = name.rpartition(".")[0]
        holder = model.get_submodule(container)
        parameters = tuple((n, p.shape, p.requires_grad) for n, p in module.named_parameters())
        kind = (container, type(module), each, parameters)
        listed = isinstance(holder, (nn.ModuleList, nn.Sequential)) and name == f"{container}.{_place(holder, module)}"
        if listed and kind == last:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        elif listed:
            runs.append((i, 1))
        last = kind if listed else None
    first, count = max(runs, key=lambda run: run[1], default=(0, 0))
    if count < 2:
        return None
    container = chosen[first][0].rpartition(".")[0]
    holder = model.get_submodule(container)
    if len(list(holder.children())) != count:
        return None
    return EqualBlocks(container=container, count=count, first_unit=first, each=dict(tops)[first])


def unit_rules(model: nn.Module) -> list[str]:
    """Other units to try than the default's: all layers of a block's size apart too, and the largest parts of a block too."""
    run = longest_run(model, None)
    if run is None:
        return []
    names = {name for name, _ in choose_units(model, None)}
    block = next(iter(model.get_submodule(run.container).children()))
    whole = sum(p.numel() for p in block.parameters())
    part = max((sum(p.numel() for p in child.parameters()) for child in block.children()), default=0)
    found: dict[frozenset[str], str] = {}
    for size in (whole, min(part, whole - part)):  # of which the rest of a block stays a unit
        if size > 0:
            units = frozenset(name for name, _ in choose_units(model, min_params(size)))
            if units > names:
                found.setdefault(units, f"min_params:{size}")
    return list(found.values())


def _place(holder: nn.Module, module: nn.Module) -> int:
    return next(i for i, child in enumerate(holder.children()) if child is module)


def shortened(model: nn.Module, run: EqualBlocks, count: int) -> nn.Module:
    """`model` with the first `count` blocks of a run alone, changed in place."""
    holder: Any = model.get_submodule(run.container)
    del holder[count:]
    return model
