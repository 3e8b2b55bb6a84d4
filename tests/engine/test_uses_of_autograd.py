"""Any use of autograd: gradients asked for by name, hooks, losses that leave by an attribute, recomputation by the caller."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import accordion as acc
from tests.devices import device, here
from tests.engine.test_steps import assert_trains_alike, twice
from tests.support import models
from tests.support.checks import (
    assert_at_rest,
    assert_close,
    mean_grads,
    one_loss,
    run_all,
)
from tests.support.models import Block, Tiny
from tests.support.reference import grads_of


def grad_of(mesh, strategy: acc.Strategy) -> None:
    plain, model = models.plain(), acc.shard(models.plain(), mesh=mesh, strategy=strategy)
    names = [name for name, _ in plain.named_parameters()]
    for m in (plain, model):
        grads = torch.autograd.grad(one_loss(m), list(m.parameters()))
        assert all(p.grad is None for p in m.parameters())
        for p, grad in zip(m.parameters(), grads, strict=True):
            p.grad = grad
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    assert_close(grads_of(model), mean_grads(mesh, plain))
    assert_at_rest(model)
    for m in (plain, model):
        m.zero_grad()
    some = [torch.autograd.grad(one_loss(m), [m.blocks[1].up.weight])[0] for m in (plain, model)]
    plain.blocks[1].up.weight.grad, model.blocks[1].up.weight.grad = some
    assert_close(grads_of(model), mean_grads(mesh, plain))
    assert_at_rest(model)
    assert names == [name for name, _ in model.named_parameters()]


def test_autograd_grad_of_parameters(world):
    run_all(world, grad_of)


def input_grads(mesh, strategy: acc.Strategy) -> None:
    """Of the inputs of a unit, with parameters that need gradients and without."""
    for trainable in (True, False):
        plain = nn.Sequential(*models.plain().blocks).requires_grad_(trainable)
        model = acc.shard(nn.Sequential(*models.plain().blocks).requires_grad_(trainable), mesh=mesh, strategy=strategy)
        found = []
        for m in (plain, model):
            x = torch.linspace(-1, 1, 2 * 3 * 32, device=device()).view(2, 3, 32).requires_grad_()
            m(x).square().sum().backward()
            found.append(x.grad)
            (grad,) = torch.autograd.grad(m(x).square().sum(), [x])
            assert torch.equal(grad, x.grad)
        assert torch.equal(*found)
        if trainable:
            assert_close(grads_of(model), mean_grads(mesh, plain), 2e-6)
        assert_at_rest(model)


def test_gradients_of_inputs(world):
    run_all(world, input_grads)


def param_hooks(mesh, strategy: acc.Strategy) -> None:
    """Hooks of a parameter see what they see without sharding: each gradient once, then the finished sum."""
    model = acc.shard(twice(), mesh=mesh, strategy=strategy)
    single: list[Tensor] = []
    finished: list[Tensor] = []
    weight = model.blocks[0].up.weight
    weight.register_hook(lambda grad: single.append(grad))
    weight.register_post_accumulate_grad_hook(lambda p: finished.append(p.grad.to_local().clone()))
    for _ in range(2):
        one_loss(model).backward()
    assert len(single) == len(finished) == 2
    assert torch.equal(finished[1], weight.grad.to_local())
    with acc.no_sync(model):
        one_loss(model).backward()
    assert len(finished) == 2, "nothing is accumulated without communication"
    one_loss(model).backward()
    assert len(finished) == 3


def test_hooks_of_parameters_fire_once_a_backward(world):
    run_all(world, param_hooks)


class Side(Block):
    """A block whose router-like loss leaves through an attribute and not through its output."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.aux = self.down(self.up(x)).square().mean()
        return super().forward(x)


def side_model() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return here(nn.Sequential(*(Side(32, 64) for _ in range(3))))


def side_losses(mesh, strategy: acc.Strategy) -> None:
    plain, model = side_model(), acc.shard(side_model(), mesh=mesh, strategy=strategy)
    x = torch.linspace(-1, 1, 2 * 3 * 32, device=device()).view(2, 3, 32) + dist.get_rank()
    for only in ("both", "attribute"):
        for m in (plain, model):
            loss = m(x).square().mean()
            aux = sum(block.aux for block in m)
            (aux if only == "attribute" else aux + loss).backward()
            for block in m:
                del block.aux
        assert_close(grads_of(model), mean_grads(mesh, plain), 3e-6)
        assert_at_rest(model)
        plain.zero_grad()
        model.zero_grad()


def test_a_loss_that_leaves_a_unit_through_an_attribute(world):
    run_all(world, side_losses)


class Structured(nn.Module):
    """Nested inputs and outputs, keyword arguments, an integer output, an unused output."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])

    def forward(self, data: dict[str, Any], *, scale: Tensor) -> dict[str, Any]:
        x = data["x"][0]
        outs = []
        for layer in self.lin:
            x = layer(x)
            outs.append(x)
        return {"sum": (outs[0] + outs[-1]) * scale, "rest": (outs[1], 3), "arg": x.argmax()}


def structured(mesh) -> None:
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = here(Structured())
        if sharded:
            model = acc.shard(model, mesh=mesh, units={nn.Sequential})
        out = model(
            {"x": [torch.linspace(-1, 1, 16, device=device()).view(2, 8)]}, scale=torch.tensor(2.0, device=device())
        )
        assert out["rest"][1] == 3
        out["sum"].sum().backward()
        found.append(grads_of(model))
    assert_close(found[1], found[0])
    assert_at_rest(model)


def test_structured_inputs_and_outputs(world):
    world.run(2, structured)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 16)
        self.rnn = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 48)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


def recurrent(mesh, strategy: acc.Strategy) -> None:
    """An LSTM caches its parameters in a list."""
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = here(Recurrent())
        if sharded:
            model = acc.shard(model, mesh=mesh, strategy=strategy, units={nn.LSTM})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            one_loss(model).backward()
            grads = grads_of(model) if sharded else mean_grads(mesh, model)
            if not sharded:
                for name, p in model.named_parameters():
                    p.grad = grads[name]
            optimizer.step()
            optimizer.zero_grad()
        found.append(grads)
    assert_close(found[1], found[0], 1e-5)


def test_modules_that_cache_their_parameters(world):
    run_all(world, recurrent)


class Recomputed(Tiny):
    """Wraps its blocks in torch's own checkpoint."""

    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def recomputed(mesh, strategy: acc.Strategy) -> None:
    for reentrant in (False, True):
        plain, model = models.plain(), models.plain()
        model.__class__ = Recomputed
        model.reentrant = reentrant
        model = acc.shard(model, mesh=mesh, strategy=strategy)
        assert_trains_alike(mesh, plain, model, num_steps=2)


def test_checkpointing_by_the_caller(world):
    run_all(world, recomputed)
