"""Operators with an unknown workspace: no verdict if one could take more than is left, otherwise a verdict."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from accordion.plan.hardware import GIB, gpu_named
from accordion.plan.trace.operators import unknown_workspace_of
from tests.plan import builders

MOST = "aten.convolution.default"


def total(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().sum()


def planned(memory_gib: float, **options: object) -> object:
    model = nn.Sequential(nn.Conv2d(8, 64, 7, padding=3), nn.Flatten(), nn.AdaptiveAvgPool1d(16))
    fixed = {"gpus": 2, "strategy": "full_shard", "checkpoint_activations": "none", "offload": "none"}
    gpu = gpu_named("h100", memory_gib=memory_gib)
    return builders.planned(model, total, torch.empty(8, 8, 128, 128), gpu=gpu, **{**fixed, **options})


def test_no_verdict_if_an_operator_could_take_more_than_is_left():
    wide = planned(80.0)
    memory = wide.chosen.memory
    assert wide.verdict == "fits"
    assert memory.peak.unsure_operator == MOST
    assert MOST in wide.log.unmodelled
    unfolded = 8 * (8 * 7 * 7) * 128 * 128 * 2
    assert memory.peak.unsure_bytes >= unfolded / 2
    assert memory.possible_bytes == int((memory.largest_reserved + memory.peak.unsure_bytes) * 1.05) + 2 * GIB

    open_ = planned((memory.needed_bytes + memory.possible_bytes) / 2 / GIB)
    told = open_.as_dict()
    assert (open_.fits, told["fits"]) == (False, None)
    for part in ("no verdict", MOST, "max_memory_reserved"):
        assert part in told["verdict"]

    assert planned(memory.possible_bytes / GIB * 1.001).verdict == "fits"
    small = planned(memory.needed_bytes / GIB * 0.999)
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
        assert unknown_workspace_of(func, args, {}, out)[0] == pytest.approx(most, abs=1)


def test_a_custom_operator_is_named():
    @torch.library.custom_op("accordion_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    twice.register_autograd(lambda ctx, grad: grad * 2)
    made = builders.planned(
        nn.Linear(64, 64), lambda m, b: total(m, twice(b)), torch.empty(4, 64), gpus=1, strategy="full_shard"
    )
    assert "custom operator" in made.log.unmodelled["accordion_test.twice.default"]
