"""Refuse models that cannot be sharded, before ranks communicate."""

from __future__ import annotations

from torch import nn

from accordion.engine.hooks import engine_of
from accordion.errors import UsageError


def check_model(model: nn.Module) -> None:
    """Raise `UsageError` if `model` cannot be sharded with any settings: a model without parameters, already sharded, with sparse
    or renormalized embeddings, or with complex parameters that require gradients."""
    if engine_of(model) is not None:
        raise UsageError("this model, or a part of it, is sharded already; call shard() once, on the whole model.")
    if next(model.parameters(), None) is None:
        raise UsageError(f"{type(model).__name__} has no parameters, so there is nothing to shard.")
    for name, module in model.named_modules():
        attributes = vars(module)  # not getattr, which some libraries' modules override and which may then fail
        if attributes.get("sparse") is True:
            raise UsageError(
                f"module {name!r} asks for sparse gradients, which are not sharded; build it with sparse=False."
            )
        if attributes.get("max_norm") is not None:
            raise UsageError(
                f"module {name!r} renormalises its weight in its forward, which shards would not follow; do not use max_norm."
            )
    for name, param in model.named_parameters():
        if not param.dtype.is_floating_point and param.requires_grad:
            raise UsageError(
                f"parameter {name!r} is {param.dtype} and requires gradients; only floating ones are trained."
            )
