"""Operators: flops that torch's own counter does not count, and unknown workspaces, which may leave a verdict open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accordion import _torch
from accordion.plan.hardware import GIB, gpu_named
from accordion.plan.result import Plan
from accordion.plan.trace.operators import flops_of, row_of
from tests.plan.builders import ONE_CHOICE, planned, total

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


def flops_of_passes(product: Callable[..., Tensor], *inputs: Tensor) -> tuple[float, float]:
    """Return the flops of `product(*inputs)` and of its backward."""
    with Count() as forward:
        out = product(*inputs)
    with Count() as backward:
        out.backward(torch.ones_like(out))
    return forward.flops, backward.flops


def test_grouped_products_count_the_forward_and_two_gradients() -> None:
    x = torch.randn(ROWS, K, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(GROUPS, K, N, dtype=torch.bfloat16, requires_grad=True)
    offs = torch.tensor([3, 9, 20, ROWS], dtype=torch.int32)
    assert flops_of_passes(torch._grouped_mm, x, w, offs) == (ONE, 2 * ONE)


def test_grouped_products_of_transformers_count_the_same() -> None:
    pytest.importorskip("transformers.integrations.moe")
    x = torch.empty(ROWS, K, device="meta", requires_grad=True)
    w = torch.empty(GROUPS, K, N, device="meta", requires_grad=True)
    offs = torch.empty(GROUPS, dtype=torch.int32, device="meta")
    assert flops_of_passes(torch.ops.transformers.grouped_mm_fallback, x, w, offs) == (ONE, 2 * ONE)


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


# -- workspaces

MOST = "aten.convolution.default"


def planned_on(memory_gib: float) -> Plan:
    model = nn.Sequential(nn.Conv2d(8, 64, 7, padding=3), nn.Flatten(), nn.AdaptiveAvgPool1d(16))
    gpu = gpu_named("h100", memory_gib=memory_gib)
    return planned(model, total, torch.empty(8, 8, 128, 128), gpu=gpu, **{**ONE_CHOICE, "units": None})


def test_no_verdict_if_an_operator_could_take_more_than_is_left():
    wide = planned_on(80.0)
    memory = wide.chosen.memory
    assert wide.verdict == "fits"
    assert memory.peak.unsure_operator == MOST
    assert MOST in wide.log.unmodelled
    unfolded = 8 * (8 * 7 * 7) * 128 * 128 * 2
    assert memory.peak.unsure_bytes >= unfolded / 2
    assert memory.possible_bytes == int((memory.largest_reserved + memory.peak.unsure_bytes) * 1.05) + 2 * GIB

    unsettled = planned_on((memory.needed_bytes + memory.possible_bytes) / 2 / GIB)
    data = unsettled.as_dict()
    assert (unsettled.fits, data["fits"]) == (False, None)
    for part in ("no verdict", MOST, "max_memory_reserved"):
        assert part in data["verdict"]

    assert planned_on(memory.possible_bytes / GIB * 1.001).verdict == "fits"
    small = planned_on(memory.needed_bytes / GIB * 0.999)
    assert (small.verdict, small.as_dict()["fits"]) == ("does not fit", False)


def test_only_unknown_workspaces_have_a_bound():
    x, rows = torch.empty(64, 64), torch.empty(64, dtype=torch.long)
    asked = [
        (torch.ops.aten.mm.default, (x, x), x, 0),
        (torch.ops.aten.linalg_vector_norm.default, (x,), x, 0),
        (torch.ops.aten.sort.default, (x,), (x, x), 4 * 3 * x.nbytes),
        (torch.ops.aten.linalg_qr.default, (x,), (x, x), 4 * 3 * x.nbytes),
        (torch.ops.aten.embedding_dense_backward.default, (x, rows, 9, -1, False), x, 64 * (32 + 281.6)),
    ]  # fmt: skip
    for func, args, out, most in asked:
        assert row_of(func).bound(args, {}, out) == pytest.approx(most, abs=1)


def test_a_custom_operator_is_named():
    @torch.library.custom_op("accordion_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    twice.register_autograd(lambda ctx, grad: grad * 2)
    plan = planned(
        nn.Linear(64, 64), lambda m, b: total(m, twice(b)), torch.empty(4, 64), gpus=1, strategy="full_shard"
    )
    assert "custom operator" in plan.log.unmodelled["accordion_test.twice.default"]
