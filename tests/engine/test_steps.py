"""Unusual steps: modes, forwards without a backward, gradients by name, shared gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import accordion as acc
from tests.devices import here
from tests.support import models, reference
from tests.support.checks import assert_at_rest, assert_close, batch, go_on, mean_grads, one_loss
from tests.support.compare import Case, compare
from tests.support.ranked import under_strategies
from tests.support.reference import grads_of

# -- modes


def evaluated_then_trained(model: nn.Module, step: int) -> tuple[list[Tensor], Tensor]:
    """Before any training and after each step."""
    outputs = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs.append(model.eval()(batch(model)[0]))
    assert not model.blocks[0].training
    assert model.train() is model
    loss = one_loss(model, step)
    loss.backward()
    return outputs, loss.detach()


@under_strategies("full_shard", "shard_optim")
def test_training_goes_on_after_eval_no_grad_and_inference_mode(mesh, strategy: acc.Strategy) -> None:
    case = Case(
        build=models.plain,
        run=evaluated_then_trained,
        options={"strategy": strategy},
        optimizer=lambda named: reference.adamw([p for _, p in named]),
        is_wrapped=True,
        steps=4,
        exact=False,
        output_tolerance=0.0,
    )
    model = compare(mesh, case)
    one_loss(model).backward()
    assert_at_rest(model)


@under_strategies("full_shard", "hybrid_shard_optim")
def test_forwards_that_nothing_walks_back_leave_nothing_behind(mesh, strategy: acc.Strategy) -> None:
    """What they keep gathered for a backward ends with the first step after them."""
    model = acc.shard(models.plain(), mesh=mesh, strategy=strategy)
    optimizer = acc.wrap_optimizer(reference.adamw(model.parameters()))
    for step in range(3):
        model(batch(model)[0])
        with acc.no_sync(model):
            model(batch(model)[0])
        go_on(model, optimizer, [step])
    one_loss(model).backward()
    if strategy != acc.NO_SHARD:  # whose leases hold nothing: the shard is the full parameter
        assert_at_rest(model)


# -- gradients by name, and hooks


@under_strategies("full_shard", "no_shard")
def test_autograd_grad_of_parameters(mesh, strategy: acc.Strategy) -> None:
    plain, model = models.plain(), acc.shard(models.plain(), mesh=mesh, strategy=strategy)
    all_names = [name for name, _ in plain.named_parameters()]
    for names in (all_names, ["blocks.1.up.weight"]):
        for m in (plain, model):
            m.zero_grad()
            params = [m.get_parameter(name) for name in names]
            grads = torch.autograd.grad(one_loss(m), params)
            assert all(p.grad is None for p in m.parameters())
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
        assert all(isinstance(model.get_parameter(name).grad, DTensor) for name in names)
        assert_close(grads_of(model), mean_grads(mesh, plain))
        assert_at_rest(model)
    assert all_names == [name for name, _ in model.named_parameters()]


# -- gradients that autograd shares


class Shares(nn.Module):
    """Its parameters (beyond the packing limit) get gradients that other nodes of the graph, or a hook, have too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(300, 300))
        self.same = nn.ParameterList(torch.full((300, 300), 0.1 * i) for i in range(2))
        self.spread = nn.Parameter(torch.full((300, 300), 0.5))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:  # (300, 300)
        y = x + self.first  # one gradient for both, and x's node comes after the unit's
        y.register_hook(self.seen.append)
        z = y + self.same[0] + self.same[1]  # one for all three
        return z.square().sum() + self.spread.sum()  # a number spread over all elements


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.linspace(-1, 1, 90_000).view(300, 300))
        self.blocks = nn.ModuleList(Shares() for _ in range(2))

    def forward(self, scale: float) -> Tensor:
        x = self.before * scale
        return sum(block(x) for block in self.blocks)


@under_strategies("full_shard", "no_shard")
def test_gradients_that_autograd_shares_stay_what_they_are(mesh, strategy: acc.Strategy) -> None:
    plain, model = here(Shared()), acc.shard(Shared(), mesh=mesh, strategy=strategy)
    scale = 1.0 + dist.get_rank()
    for m in (plain, model):
        m(scale).backward()
    assert_close(grads_of(model), mean_grads(mesh, plain))
    for mine, theirs in zip(model.blocks, plain.blocks, strict=True):
        assert torch.equal(mine.seen[0], theirs.seen[0]), "a hook's gradient was written into"
