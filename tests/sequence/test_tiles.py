"""Modules that compute a few tokens at a time train as before, and keep their inputs alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import accordion as acc
from accordion.sequence.tiles import tile_mlps
from tests.sequence.subjects import BATCHES, WIDTH, all_ranks, check_equal, family
from tests.sequence.test_exchange import kept_bytes
from tests.support.ranked import on_mesh
from tests.support.sample import sampled

CASES = [("LlamaForCausalLM", how) for how in ("none", "full")] + [("GPT2LMHeadModel", "selective")]


def mlps(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".mlp")]


@pytest.mark.parametrize(("name", "recomputed"), sampled(CASES, lambda name, recomputed: recomputed == "full"))
@on_mesh((1, 2), ("dp", "sp"))
def test_tiles_train_as_the_unsharded_model(mesh: Any, name: str, recomputed: Any) -> None:
    plain, model = family(name), family(name)
    for mlp in mlps(model):
        acc.tile(mlp, 3)  # which does not divide the tokens
    acc.sequence_parallel(model, mesh["sp"])
    acc.shard(model, all_ranks(mesh), checkpoint_activations=recomputed)
    for kind, make in BATCHES.items():
        check_equal(mesh, plain, model, [make(0)], f"{name} {kind}")


def test_a_tiled_module_keeps_its_input_alone() -> None:
    plain, model = family("LlamaForCausalLM"), family("LlamaForCausalLM")
    for mlp in mlps(model):
        acc.tile(mlp, 4)
    batch = BATCHES["plain"](0)
    num_bytes = [kept_bytes(one, batch)[0] for one in (plain, model)]
    tokens, inner = batch["input_ids"].numel(), mlps(plain)[0].gate_proj.out_features
    # gate, its activation, up and their product; the input is kept in any case.
    assert num_bytes[0] - num_bytes[1] == pytest.approx(len(mlps(model)) * 4 * tokens * inner * 4, rel=0.01)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, *, p: float) -> Tensor:
        return F.dropout(x * self.scale, p)


def test_a_recomputation_draws_the_same_numbers_and_a_copy_has_its_own_weights() -> None:
    module = acc.tile(Dropping(), 3)
    x = torch.ones(2, 7, WIDTH, requires_grad=True)
    out = module(x, p=0.5)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.equal(out.detach())
    twin = copy.deepcopy(module)
    nn.init.zeros_(twin.scale)
    assert not twin(x, p=0.0).any()
    with torch.no_grad():
        assert module(x, p=0.0).equal(x)


def test_bad_input_is_refused() -> None:
    with pytest.raises(acc.UsageError, match=r"num_tiles=0; pass the number of parts"):
        acc.tile(nn.Linear(2, 2), 0)
    with pytest.raises(acc.UsageError, match="Linear has been replaced; call tile once"):
        acc.tile(acc.tile(nn.Linear(2, 2), 2), 2)
    with pytest.raises(acc.UsageError, match="MixtralForCausalLM has no modules called mlp without experts; leave it"):
        tile_mlps(family("MixtralForCausalLM"), 2)
