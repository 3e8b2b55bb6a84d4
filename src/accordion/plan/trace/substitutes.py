"""Replace CPU operators in a trace by those of CUDA, if the two save different tensors for the backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accordion import _torch

_aten = torch.ops.aten
FLASH_HEAD = 256  # FlashAttention-2 takes heads up to this size, in half precision
ALIGN = 8  # elements: what it pads heads to


class Substitutes:
    """Replaces CPU operators by those that CUDA would run, for all threads, inside the context manager that `installed()`
    returns. `substituted`: name of each operator that was called and replaced -> text on its replacement. `unmodelled`: name of
    each operator that was called and could not be replaced -> text on how it is traced."""

    # The replacements are registered in torch's dispatcher. So they apply under whatever name a module calls an operator, and
    # also while a backward recomputes, when a function mode would be off.

    def __init__(self) -> None:
        self.substituted: dict[str, str] = {}
        self.unmodelled: dict[str, str] = {}

    def installed(self) -> AbstractContextManager[None]:
        # All are composite operators, so autograd records the operators that the replacement calls.
        return _torch.in_place_on_cpu(
            {
                "scaled_dot_product_attention": self.attention,
                "rms_norm": self.rms_norm,
                "layer_norm": self.layer_norm,
                "dropout": self.dropout,
            }
        )

    def attention(
        self,
        query: Tensor,  # (batch, heads, seq, head)
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        name, half, head = "scaled_dot_product_attention", query.dtype.itemsize == 2, query.shape[-1]
        if attn_mask is None and half and query.dim() == 4 and head <= FLASH_HEAD:
            self.substituted[name] = "FlashAttention-2"
            pad = -head % ALIGN
            q, k, v = (F.pad(t, (0, pad)) if pad else t for t in (query, key, value))
            out: Tensor = _aten._scaled_dot_product_flash_attention(
                q, k, v, dropout_p, is_causal, scale=scale or head**-0.5
            )[0]
            return out[..., :head] if pad else out
        if query.dim() == 4 and (not enable_gqa or query.shape[1] == key.shape[1]):
            self.substituted[name] = "memory-efficient attention"
            bias = attn_mask
            if bias is not None:  # the kernel adds it to the scores of all heads
                if bias.dtype == torch.bool:
                    bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias, float("-inf"))
                bias = bias.expand(*query.shape[:3], key.shape[2])
            return _aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
                query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
            )[0]
        self.unmodelled[name] = "falls back to plain products, as traced on CPU"
        return _aten.scaled_dot_product_attention.default.decompose(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def rms_norm(self, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if weight is not None and weight.dtype != x.dtype:  # without a fused kernel, CUDA decomposes as the CPU does
            return _aten.rms_norm.default.decompose(x, shape, weight, eps)  # type: ignore[no-any-return]
        self.substituted["rms_norm"] = "the fused kernel"
        return _Norm.apply(x, weight, None, len(shape), 1)  # type: ignore[no-any-return,no-untyped-call]

    def layer_norm(
        self, x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, *rest: Any
    ) -> Tensor:
        self.substituted["layer_norm"] = "mean and deviation of a row in float32"
        return _Norm.apply(x, weight, bias, len(shape), 2)  # type: ignore[no-any-return,no-untyped-call]

    def dropout(self, x: Tensor, p: float, training: bool) -> Tensor:
        if not training or p == 0.0:
            return x  # as on any device; torch's decomposition copies it before 2.15
        if p == 1.0:  # without a fused kernel (as for dropout in place), CUDA decomposes as the CPU does
            return _aten.dropout.default.decompose(x, p, training)  # type: ignore[no-any-return]
        self.substituted["dropout"] = "the fused kernel, a mask of one byte an element"
        return _aten.native_dropout(x, p, True)[0]  # type: ignore[no-any-return]


class _Norm(torch.autograd.Function):
    """Stand-in for a fused norm over the last `num_dims` dims. For the backward it saves the input, `weight`, `bias`, and
    `num_stats` float32 numbers for each row. Its values are wrong."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, num_dims: int, num_stats: int
    ) -> Tensor:
        rows = x.shape[: x.dim() - num_dims]
        stats = [x.new_empty(rows, dtype=torch.float32) for _ in range(num_stats)]
        ctx.save_for_backward(x, weight, bias, *stats)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors[:3]
        return grads[0] * x, *(None if p is None else torch.empty_like(p) for p in parameters), None, None
