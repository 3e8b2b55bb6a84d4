"""What may happen in and around a step: modes, the uses of autograd, recomputation, ties, exceptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import accordion as acc
from tests.devices import device, here
from tests.support import models, reference
from tests.support.checks import (
    PlantedError,
    assert_at_rest,
    assert_close,
    assert_equal,
    batch,
    logged,
    mean_grads,
    one_loss,
    run_all,
)
from tests.support.models import Block, Tiny
from tests.support.reference import grads_of


def assert_trains_alike(mesh, plain: nn.Module, model: nn.Module, num_steps: int) -> None:
    """Forwards and backwards give the gradients of the unsharded model, and memory is back at rest."""
    for _ in range(num_steps):
        one_loss(plain).backward()
        one_loss(model).backward()
        assert_close(grads_of(model), mean_grads(mesh, plain), 2e-6)
        assert_at_rest(model)
        plain.zero_grad()
        model.zero_grad()


# -- modes


def modes(mesh, strategy: acc.Strategy) -> None:
    plain, model = models.plain(), acc.shard(models.plain(), mesh=mesh, strategy=strategy)
    tokens, _ = batch(plain)
    wanted = plain(tokens)
    with torch.inference_mode():
        assert torch.equal(model(tokens), wanted), "inference before any training"
    optimizers = reference.adamw(plain.parameters()), acc.wrap_optimizer(reference.adamw(model.parameters()))
    for step in range(3):
        assert model.train() is model
        losses = [one_loss(m, step) for m in (plain, model)]
        for loss in losses:
            loss.backward()
        for p, grad in zip(plain.parameters(), mean_grads(mesh, plain).values(), strict=True):
            p.grad = grad
        assert_close(grads_of(model), {name: p.grad for name, p in plain.named_parameters()}, 1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        assert not model.blocks[0].training
        with torch.no_grad():
            assert torch.allclose(model(tokens), plain(tokens), atol=1e-5)
        with torch.inference_mode():
            assert torch.allclose(model(tokens), plain(tokens), atol=1e-5)
    one_loss(model).backward()
    assert_at_rest(model)


def abandoned(mesh, strategy: acc.Strategy) -> None:
    model = acc.shard(models.plain(), mesh=mesh, strategy=strategy)
    optimizer = acc.wrap_optimizer(reference.adamw(model.parameters()))
    for step in range(3):
        model(batch(model)[0])
        with acc.no_sync(model):
            model(batch(model)[0])
        one_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    one_loss(model).backward()
    if strategy != acc.NO_SHARD:  # whose leases hold nothing: the shard is the full parameter
        assert_at_rest(model)


def test_forwards_that_nothing_walks_back_leave_nothing_behind(world):
    """What they keep gathered for a backward ends with the first step after them."""
    run_all(world, abandoned)


def test_training_goes_on_after_eval_no_grad_and_inference_mode(world):
    run_all(world, modes)


def two_forwards(mesh, strategy: acc.Strategy) -> None:
    plain, model = models.tied(), acc.shard(models.tied(), mesh=mesh, strategy=strategy)
    for order in ("sum", "first", "second", "retain"):
        for m in (plain, model):
            a = one_loss(m, 0)
            if order == "retain":
                a.backward(retain_graph=True)
                a.backward()
                continue
            b = one_loss(m, 1)
            if order == "sum":
                (a + b).backward()
            else:
                for loss in (a, b) if order == "first" else (b, a):
                    loss.backward()
        assert_close(grads_of(model), mean_grads(mesh, plain), 2e-6)
        plain.zero_grad()
        model.zero_grad()
        assert_at_rest(model)


def test_two_forwards_before_a_backward_and_two_backwards_of_a_forward(world):
    run_all(world, two_forwards, 3)


class Twice(Tiny):
    """Calls its first block twice in a forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.blocks[1](self.blocks[0](self.embed(tokens))))
        return self.head(self.norm(x))


def twice() -> Twice:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return here(Twice(num_blocks=2))


def repeated(mesh, strategy: acc.Strategy) -> None:
    plain, model = twice(), acc.shard(twice(), mesh=mesh, strategy=strategy)
    assert_trains_alike(mesh, plain, model, num_steps=3)


def test_a_unit_may_be_called_twice(world):
    run_all(world, repeated)


def changing_order(mesh) -> None:
    """Prefetch guesses wrong; nothing else does."""
    plain, model = models.plain(), acc.shard(models.plain(), mesh=mesh)
    for skip in ((), (1,), (0, 2), (), (0, 1, 2), ()):
        for m in (plain, model):
            tokens, targets = batch(m)
            models.loss_of(m(tokens, skip=skip), targets).backward()
        assert_close(grads_of(model), mean_grads(mesh, plain), 2e-6)
        assert_at_rest(model)
        plain.zero_grad()
        model.zero_grad()


def test_the_order_of_units_may_change_from_step_to_step(world):
    world.run(2, changing_order)


def frozen_later(mesh, strategy: acc.Strategy) -> None:
    plain, model = models.plain(), acc.shard(models.plain(), mesh=mesh, strategy=strategy)
    for frozen in ((), ("blocks.1", "embed"), ("head", "norm"), ()):
        for m in (plain, model):
            for name, p in m.named_parameters():
                p.requires_grad_(not name.startswith(frozen) if frozen else True)
            one_loss(m).backward()
        assert_close(grads_of(model), mean_grads(mesh, plain), 2e-6)
        assert_at_rest(model)
        plain.zero_grad()
        model.zero_grad()


def test_parameters_may_be_frozen_between_steps(world):
    run_all(world, frozen_later)


# -- autograd


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


# -- ties


def ties(mesh, strategy: acc.Strategy) -> None:
    with logged() as messages:
        model = acc.shard(models.tied(), mesh=mesh, strategy=strategy, units={Block, nn.Linear})
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == len(list(models.tied().parameters()))
    if dist.get_rank() == 0:
        assert any("embed.weight" in m and "head.weight" in m and "tied" in m for m in messages), messages
    plain = models.tied()
    for _ in range(2):
        one_loss(plain).backward()
        one_loss(model).backward()
    assert_close(grads_of(model), mean_grads(mesh, plain), 2e-6)


def test_tied_weights_stay_one_parameter_and_the_log_says_so(world):
    run_all(world, ties, 3)


def tied_over_blocks(mesh) -> None:
    """One weight in two units belongs to the smallest unit around both; two Parameters over one storage are one."""

    def build() -> Tiny:
        model = models.plain()
        model.blocks[2].up.weight = model.blocks[0].up.weight
        model.blocks[2].down.weight = nn.Parameter(model.blocks[0].down.weight.data)
        return model

    plain, model = models.plain(), acc.shard(build(), mesh=mesh)
    plain.blocks[2].up.weight = plain.blocks[0].up.weight
    plain.blocks[2].down.weight = plain.blocks[0].down.weight
    assert model.blocks[2].up.weight is model.blocks[0].up.weight
    assert model.blocks[2].down.weight is model.blocks[0].down.weight
    for _ in range(2):
        one_loss(plain).backward()
        one_loss(model).backward()
    assert_close(grads_of(model), mean_grads(mesh, plain), 2e-6)
    assert_at_rest(model)


def test_a_weight_tied_over_units_belongs_to_the_unit_around_them(world):
    world.run(2, tied_over_blocks)


# -- exceptions


def raise_in_forward(*_: Any) -> None:
    raise PlantedError


def raise_in_backward(grad: Tensor) -> None:
    raise PlantedError


def exceptions(mesh, strategy: acc.Strategy) -> None:
    plain, model = models.plain(), acc.shard(models.plain(), mesh=mesh, strategy=strategy)
    one_loss(plain).backward()
    for _ in range(2):
        handle = model.blocks[1].down.register_forward_hook(raise_in_forward)
        with pytest.raises(PlantedError):
            one_loss(model)
        handle.remove()
        handle = model.blocks[1].register_forward_hook(lambda m, a, out: out.register_hook(raise_in_backward) and None)
        with pytest.raises(PlantedError):
            one_loss(model).backward()
        handle.remove()
        model.zero_grad()
        one_loss(model).backward()
        assert_close(grads_of(model), mean_grads(mesh, plain))
        assert_at_rest(model)
        model.zero_grad()
        with acc.full_params(model):
            assert_equal(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_a_step_after_one_that_raised_is_a_good_one(world):
    run_all(world, exceptions)


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


def shared_gradients(mesh, strategy: acc.Strategy) -> None:
    plain, model = here(Shared()), acc.shard(Shared(), mesh=mesh, strategy=strategy)
    scale = 1.0 + dist.get_rank()
    for m in (plain, model):
        m(scale).backward()
    assert_close(grads_of(model), mean_grads(mesh, plain))
    for mine, theirs in zip(model.blocks, plain.blocks, strict=True):
        assert torch.equal(mine.seen[0], theirs.seen[0]), "a hook's gradient was written into"


def test_gradients_that_autograd_shares_stay_what_they_are(world):
    run_all(world, shared_gradients)
    world.run(1, shared_gradients, acc.FULL_SHARD)
