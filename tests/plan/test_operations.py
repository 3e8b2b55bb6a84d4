"""Flops of operators that torch's own counter does not count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accordion import _torch
from accordion.plan.trace.operators import flops_of

ROWS, K, N, GROUPS = 24, 16, 32, 4
ONE = 2 * ROWS * K * N  # each row meets one group


class Count(_torch.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, out)
        return out


def test_grouped_products_count_the_forward_and_two_gradients() -> None:
    x = torch.randn(ROWS, K, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(GROUPS, K, N, dtype=torch.bfloat16, requires_grad=True)
    offs = torch.tensor([3, 9, 20, ROWS], dtype=torch.int32)
    with Count() as forward:
        out = torch._grouped_mm(x, w, offs=offs)
    with Count() as backward:
        out.backward(torch.ones_like(out))
    assert (forward.flops, backward.flops) == (ONE, 2 * ONE)


def test_grouped_products_of_transformers_count_the_same() -> None:
    pytest.importorskip("transformers.integrations.moe")
    x = torch.empty(ROWS, K, device="meta", requires_grad=True)
    w = torch.empty(GROUPS, K, N, device="meta", requires_grad=True)
    offs = torch.empty(GROUPS, dtype=torch.int32, device="meta")
    with Count() as forward:
        out = torch.ops.transformers.grouped_mm_fallback(x, w, offs)
    with Count() as backward:
        out.backward(torch.empty_like(out))
    assert (forward.flops, backward.flops) == (ONE, 2 * ONE)


def test_grouped_products_with_a_split_right_side_count_each_column_once() -> None:
    a, b = torch.randn(GROUPS, N, K, dtype=torch.bfloat16), torch.randn(K, ROWS, dtype=torch.bfloat16)
    offs = torch.tensor([8, 8, 16, ROWS], dtype=torch.int32)
    with Count() as count:
        torch._grouped_mm(a, b, offs=offs)
    assert count.flops == ONE


@pytest.mark.parametrize("num_kv_heads", [8, 2, 1])
def test_attention_has_the_same_flops_with_fewer_key_heads(num_kv_heads: int) -> None:
    """Forward: two products, scores and weighted sums. Backward: five, the scores again. A causal mask halves both."""
    q = torch.empty(2, 8, 16, 4, device="meta", dtype=torch.bfloat16)
    k = torch.empty(2, num_kv_heads, 16, 4, device="meta", dtype=torch.bfloat16)
    one = 2 * 2 * 8 * 16 * 16 * 4
    with Count() as forward:
        out, sums, *rest = torch.ops.aten._scaled_dot_product_flash_attention(q, k, k, 0.0, True)
    assert forward.flops == 2 * one / 2
    with Count() as backward:
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            out, q, k, k, out, sums, *rest[:2], 16, 16, 0.0, True, *rest[4:6]
        )
    assert backward.flops == 5 * one / 2
