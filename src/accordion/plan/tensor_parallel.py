"""Layers that neighbouring ranks may share by tensor parallelism: which, how, and whether so many ranks can."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from accordion.errors import UsageError

COLWISE, GATHERED, ROWWISE, SPLIT = "colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"
VOCABULARY, SUMMED, WHOLE = "embedding_rowwise", "replicated_with_grad_allreduce", "replicate"
CUTS: Mapping[str, int | None] = {  # by transformers' name of a style, the dim of the weight that is cut
    COLWISE: 0, GATHERED: 0, ROWWISE: 1, SPLIT: 1, VOCABULARY: 0, SUMMED: None, WHOLE: None,
}  # fmt: skip
OLDER_NAMES = {"colwise_rep": GATHERED, "rowwise_rep": SPLIT}
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")  # of a configuration


def layers_in(model: nn.Module) -> Mapping[str, tuple[nn.Module, str]]:
    """By name, each layer that transformers' own plan for the model names, with its style; none where there is no plan."""
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    named = {name: (module, plan.get(_pattern(name), "")) for name, module in model.named_modules()}
    return {name: (module, OLDER_NAMES.get(style, style)) for name, (module, style) in named.items() if style}


def _pattern(name: str) -> str:
    """A name as plans have it: with a * for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def dim_cut(style: str, parameter: str) -> int | None:
    """The dim on which such a layer's weight or bias is cut; None where each rank has it whole."""
    dim = CUTS[style]
    return None if parameter == "bias" and dim == 1 else dim


def num_trained_here(model: nn.Module, ranks: int) -> int:
    """Elements that one of `ranks` ranks trains."""
    cut = {
        p
        for module, style in layers_in(model).values()
        for name, p in module.named_parameters(recurse=False)
        if ranks > 1 and dim_cut(style, name) is not None
    }
    return sum(p.numel() // (ranks if p in cut else 1) for p in model.parameters() if p.requires_grad)


def check_tensor_parallel(model: nn.Module, name: str, ranks: int) -> None:
    """Raises `UsageError` where so many ranks cannot share the layers of the model called `name`."""
    asked, found = f"tensor_parallel is {ranks}", layers_in(model)
    if not found:
        raise UsageError(
            f"{asked}, and {name} names no plan of its layers, as configurations of transformers do (base_model_tp_plan), which "
            "cannot be guessed; leave it out."
        )
    model_: Any = model
    config = model_.config.get_text_config()
    for key in DIVIDED:
        value = getattr(config, key, None)
        if isinstance(value, int) and value % ranks:
            raise UsageError(f"{asked}, which does not divide the {key} of {name}, {value}; take a divisor.")
    for where, (module, style) in found.items():
        if style not in CUTS or not list(module.parameters(recurse=False)):
            raise UsageError(
                f"{asked}, and {where} of {name} is shared in the style {style!r}, which is not planned; leave it out."
            )
        for of, p in module.named_parameters(recurse=False):
            dim = dim_cut(style, of)
            if dim is not None and p.shape[dim] % ranks:
                raise UsageError(
                    f"{asked}, which does not divide the {p.shape[dim]} {'columns' if dim else 'rows'} of {where}.{of} of "
                    f"{name}; take a divisor."
                )
