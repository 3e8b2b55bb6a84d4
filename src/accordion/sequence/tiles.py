"""`tile`: run a module on some tokens of a sequence at a time, and keep none of its activations."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accordion.errors import UsageError


def tile(module: nn.Module, num_tiles: int, *, dim: int = 1) -> nn.Module:
    """Let `module` compute its input in `num_tiles` parts along `dim`, one after another; change it in place and return it.

    The backward computes each part again just before its gradients, so the activations of one part exist at a time. Call `tile`
    before `shard`, for a module that computes each token by itself, such as the MLP of a transformer block.

    Args:
        module: takes one tensor, with other arguments by keyword, and returns one tensor of the same size in `dim`.
        num_tiles: number of parts. If it does not divide the tokens, the last part is smaller, and there may be fewer parts.
        dim: the dim of tokens.

    Raises `UsageError` if `num_tiles` is below 1, or if the forward of `module` has been replaced already.
    """
    if num_tiles < 1:
        raise UsageError(f"tile got num_tiles={num_tiles}; pass the number of parts, 1 or more.")
    if "forward" in vars(module):
        raise UsageError(
            f"the forward of this {type(module).__name__} has been replaced; call tile once, before shard()."
        )

    def forward(self: nn.Module, x: Tensor, **kwargs: Any) -> Tensor:
        def one(part: Tensor) -> Tensor:
            # Contiguous as the whole input is. The checkpoint keeps the slice, which needs no memory of its own.
            out: Tensor = type(self).forward(self, part.contiguous(), **kwargs)
            return out

        run = partial(checkpoint, one, use_reentrant=False) if torch.is_grad_enabled() else one
        return torch.cat([run(part) for part in x.chunk(num_tiles, dim)], dim)

    module.forward = MethodType(forward, module)  # a method, so that a copy of the module calls the copy
    return module


def tile_mlps(model: nn.Module, num_tiles: int) -> None:
    """Tile every module of `model` whose last name is "mlp", in place. Raises `UsageError` without one, or if one has experts."""
    mlps = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "mlp"]
    if not mlps or any(hasattr(module, "experts") for module in mlps):
        raise UsageError(
            f"mlp_tiles is {num_tiles}, and {type(model).__name__} has no modules called mlp without experts; leave it at 1, "
            "or call accordion.tile on modules of your own."
        )
    for module in mlps:
        tile(module, num_tiles)
