"""`accordion.compat.fsdp2`: explicit `unshard`, setters, meta devices and conversions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import accordion.compat.fsdp2 as ours
from tests.compat.test_fsdp2 import (
    SIDES,
    assert_backwards_agree,
    assert_gradients_are_means,
    assert_same_gradients,
    both,
    leases,
    sharded,
)
from tests.devices import device
from tests.support import models
from tests.support.checks import PlantedError, assert_close, assert_equal, batch, mean_grads, one_loss, step_all
from tests.support.ranked import on_world
from tests.support.reference import grads_of, params_of

# -- full parameters on demand


def shown(model: nn.Module) -> list[bool]:
    """Return, for each parameter of the model, if it is a plain leaf."""
    return [type(p) is nn.Parameter and p.is_leaf for p in model.parameters()]


@on_world(2)
def test_unshard_shows_plain_parameters(mesh) -> None:
    reference, model = both(mesh)
    wanted = dict(models.plain().named_parameters())
    for m in (reference, model):
        assert m.blocks[1].unshard() is None
        assert all(shown(m.blocks[1]))
        assert not any(shown(m.blocks[0]))
        for name, p in m.blocks[1].named_parameters():
            assert torch.equal(p, wanted[f"blocks.1.{name}"])
        m.blocks[1].reshard()
        assert not any(shown(m))
    held = list(model.parameters())
    handles = [block.unshard(async_op=True) for block in model.blocks]
    assert isinstance(handles[0], ours.UnshardHandle)
    handles[0].wait()
    handles[0].wait()
    assert all(shown(model.blocks[0]))
    assert_backwards_agree((reference, model), steps=1)
    assert not any(shown(model)), "a forward that reshards ends what unshard began, and so does a backward"
    assert leases(model) == [0, 0, 0, 0]
    model.blocks[2].unshard()
    state = model.state_dict()
    assert all(isinstance(t, DTensor) for t in state.values())
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))


@on_world(2)
def test_gradients_of_full_parameters_that_are_read_outside_of_a_forward(mesh) -> None:
    """The end of the backward reduces the gradient of a full parameter that a loss reads outside any forward."""
    plain, model = models.plain(), sharded(ours, mesh)
    for alone in (True, False):
        model.unshard()
        for m in (plain, model):
            loss = m.head.weight.square().sum() * (1 + dist.get_rank())
            if not alone:
                loss = loss + one_loss(m)
            loss.backward()
        model.reshard()
        assert_close(grads_of(model), mean_grads(mesh, plain), 1e-6)
        plain.zero_grad()
        model.zero_grad()
    assert leases(model) == [0, 0, 0, 0]
    model.blocks[0].unshard()
    loss = model.blocks[0].up.weight.square().sum()
    one_loss(model)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()  # the forward has let go what this graph saved


class Writer(models.Tiny):
    def generate(self, tokens: Tensor) -> Tensor:
        return self(tokens).argmax(-1) + self.head.weight.new_zeros(())


def writer() -> Writer:
    model = models.plain()
    model.__class__ = Writer
    return model


@on_world(2)
def test_registered_methods_gather_as_forward_does(mesh) -> None:
    plain, model = writer(), sharded(ours, mesh, writer)
    ours.register_fsdp_forward_method(model, "generate")
    ours.register_fsdp_forward_method(plain, "generate")
    tokens, _ = batch(plain)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model.generate(tokens), plain.generate(tokens))
    with pytest.raises(ValueError, match="has no method 'sample'"):
        ours.register_fsdp_forward_method(model, "sample")


@on_world(2)
def test_setters(mesh) -> None:
    reference, model = both(mesh)
    seen: list[Tensor] = []
    for m in (reference, model):
        for module in (m, *m.blocks):
            module.set_gradient_divide_factor(4.0)
            module.set_force_sum_reduction_for_comms(True)
        if hasattr(m, "set_reduce_scatter_unused_params"):  # not in torch 2.11
            m.set_reduce_scatter_unused_params(True)
        m.blocks[0].set_all_reduce_hook(lambda grad: grad.mul_(3.0))
        one_loss(m).backward()
    assert_same_gradients(reference, model)
    model.blocks[1].set_all_reduce_hook(lambda grad: seen.append(grad))
    one_loss(model).backward()
    assert seen
    model.set_unshard_in_backward(False)
    model.set_post_optim_event(None)
    with pytest.raises(ValueError, match="stream of the reduce"):
        model.set_all_reduce_hook(lambda grad: None, stream=object())
    with pytest.raises(ValueError, match="directly into their memory"):
        model.set_custom_all_gather(None)
    with pytest.raises(ValueError, match="all-to-all"):
        model.set_custom_reduce_scatter(None)
    model.zero_grad()
    model.set_gradient_divide_factor(2.0)
    for block in model.blocks:
        block.set_reduce_scatter_divide_factor(2.0)
        block.set_all_reduce_hook(lambda grad: None)
    assert_gradients_are_means(mesh, models.plain(), model)


@on_world(2)
def test_state_of_a_failed_iteration_is_dropped(mesh) -> None:
    model = sharded(ours, mesh)

    def fail(*_: Any) -> None:
        raise PlantedError

    handle = model.blocks[1].register_forward_pre_hook(fail)
    model.set_requires_gradient_sync(False)
    with pytest.raises(PlantedError):
        one_loss(model)
    handle.remove()
    one_loss(model).backward()
    with pytest.raises(RuntimeError, match="call it on the root"):
        model.blocks[0].reset_iter_state()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    assert_gradients_are_means(mesh, models.plain(), model, 3)


# -- meta devices and conversions


@on_world(2)
def test_models_on_the_meta_device(mesh) -> None:
    with torch.device("meta"):
        models_ = [sharded(api, mesh) for api in SIDES]
    for model in models_:
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device=device())
        for i, p in enumerate(model.parameters()):
            nn.init.constant_(p, 0.01 * i)
        one_loss(model).backward()
    assert_same_gradients(*models_)
    with torch.device("meta"):
        model = sharded(ours, mesh)
    with pytest.raises(ValueError, match="still on the meta device"):
        one_loss(model)
    state = {n: distribute_tensor(p, mesh, [Shard(0)]) for n, p in models.plain().state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert_equal(params_of(model), dict(models.plain().named_parameters()))
    plain = models.plain()
    assert_gradients_are_means(mesh, plain, model)
    model.load_state_dict({n: p * 2 for n, p in model.state_dict().items()}, assign=True)
    one_loss(model).backward()
    assert_equal(params_of(model), {n: p * 2 for n, p in plain.named_parameters()})


@on_world(2)
def test_a_sharded_model_is_converted(mesh) -> None:
    """Converting to another dtype after the first step works as without sharding; torch's own refuses it."""
    plain, model = models.plain(), sharded(ours, mesh)
    one_loss(model).backward()
    for m in (plain, model):
        m.zero_grad()
        m.to(torch.float64)
    held = list(model.parameters())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
    for step in range(2):
        for m in (plain, model):
            assert all(p.dtype == torch.float64 for p in m.parameters())
            m(batch(m, step)[0]).square().mean().backward()
        mean = mean_grads(mesh, plain)
        assert_close(grads_of(model), mean, 1e-7)  # cast to float32 there; the sums themselves are float64
        for name, p in plain.named_parameters():
            p.grad = mean[name]
        step_all(optimizers)
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    model.set_requires_gradient_sync(False)
    model(batch(model)[0]).sum().backward()
    with pytest.raises(ValueError, match="accumulated and not reduced"):
        model.to(torch.float32)
