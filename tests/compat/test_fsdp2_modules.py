"""`accordion.compat.fsdp2`: lists of modules, the order of calls, tied parameters, and arguments of other types."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import accordion as acc
import accordion.compat.fsdp2 as ours
from tests.compat.test_fsdp2 import SIDES, assert_backwards_agree, assert_same_parameters, grads_of, leases, sharded
from tests.devices import device, here
from tests.inside import engine_in, units_of
from tests.support import models
from tests.support.checks import assert_close, mean_grads, one_loss, step_all
from tests.support.ranked import on_world


def trained(mesh, plain: nn.Module, model: nn.Module, steps: int = 2) -> None:
    """Check that gradients and steps equal those of the plain model over the batches of all ranks."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(steps):
        for m in (plain, model):
            one_loss(m, step).backward()
        wanted = mean_grads(mesh, plain)
        assert_close(grads_of(model), wanted, 1e-5)
        for name, p in plain.named_parameters():
            p.grad = wanted[name]
        step_all(optimizers)


@on_world(2)
def test_a_list_of_modules_is_gathered_together(mesh) -> None:
    pair: list[models.Tiny] = []
    for api in SIDES:
        model = models.plain()
        group = [model.norm, model.head]
        assert api.fully_shard(group, mesh=mesh) is group
        api.fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh)
        pair.append(api.fully_shard(model, mesh=mesh))
    assert type(pair[1].norm).__name__ == "FSDPLayerNorm"
    assert_backwards_agree(pair)
    model = pair[1]
    assert [unit.name for unit in units_of(model)] == ["", "blocks.0", "norm"]
    model.norm.unshard()
    assert type(model.head.weight) is nn.Parameter
    model.head.reshard()
    assert isinstance(model.norm.weight, DTensor)


@on_world(2)
def test_modules_without_a_root(mesh) -> None:
    """Without a module around them, each list and each block is a root."""
    plain, model = models.plain(), models.plain()
    ours.fully_shard([model.embed, *model.blocks], mesh=mesh)
    ours.fully_shard([model.norm, model.head], mesh=mesh)
    trained(mesh, plain, model)
    plain, model = models.plain(), models.plain()
    for one in (plain, model):
        for module in (one.embed, one.norm, one.head):
            module.requires_grad_(False)
    for block in model.blocks:
        ours.fully_shard(block, mesh=mesh)
    trained(mesh, plain, model)


@on_world(2)
def test_calls_in_another_order(mesh) -> None:
    """The root is sharded after a block was used, and a block is called before the root."""
    plain, model = models.plain(), models.plain()
    x = torch.randn(2, 3, 32, device=device())
    for block in model.blocks:
        ours.fully_shard(block, mesh=mesh)
    wanted = plain.blocks[1](x)
    assert torch.allclose(model.blocks[1](x), wanted)
    ours.fully_shard(model, mesh=mesh)
    assert torch.allclose(model.blocks[1](x), wanted)
    assert len(leases(model)) == 4
    trained(mesh, plain, model)


class Crossed(nn.Module):
    """Two branches that share a weight, inside one root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(19, 8)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 19))
        self.second[0].weight = self.first[0].weight
        self.second[2].weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(self.first(self.embed(tokens)))


@on_world(2)
def test_tied_parameters_are_one(mesh) -> None:
    plain, model = here(Crossed()), here(Crossed())
    for part in (model.first, model.second):
        ours.fully_shard(part, mesh=mesh)
    assert model.second[0].weight is model.first[0].weight
    ours.fully_shard(model, mesh=mesh)
    assert model.second[2].weight is model.embed.weight
    assert isinstance(model.embed.weight, DTensor)
    held = list(model.parameters())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    trained(mesh, plain, model)
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    state = model.state_dict()
    assert torch.equal(state["embed.weight"].to_local(), state["second.2.weight"].to_local())
    apart = Crossed()
    for part in (apart.first, apart.second):
        ours.fully_shard(part, mesh=mesh)
    x = torch.randn(2, 8, device=device())
    apart.first(x)
    with pytest.raises(ValueError, match="is tied to a parameter that was sharded with another module"):
        apart.second(x)
    late = models.tied()
    ours.fully_shard(late.embed, mesh=mesh)
    late.head.weight = late.embed.weight  # tied between the calls
    ours.fully_shard(late, mesh=mesh)
    trained(mesh, models.tied(), late)


@on_world(2)
def test_other_dims_and_ignored_parameters(mesh) -> None:
    pair = []
    for api in SIDES:
        model = models.plain()
        for block in model.blocks:
            api.fully_shard(block, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
        pair.append(api.fully_shard(model, mesh=mesh, ignored_params={model.head.weight}))
    assert_same_parameters(*pair)
    assert type(pair[1].head.weight) is nn.Parameter
    assert_backwards_agree(pair)
    uneven = ours.fully_shard(models.narrow(), mesh=mesh, shard_placement_fn=lambda p: Shard(-1))
    trained(mesh, models.narrow(), uneven)
    scalar = ours.fully_shard(models.uneven(), mesh=mesh)
    assert scalar.gain.placements == (Replicate(),)
    trained(mesh, models.uneven(), scalar)


@on_world(2)
def test_stages_share_communicators(mesh) -> None:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)]
    for stage in stages:
        ours.fully_shard(stage, mesh=mesh)
    ours.share_comm_ctx(stages)
    x = torch.randn(4, 8, device=device())
    stages[1](stages[0](x)).sum().backward()
    first, second = [engine_in(stage) for stage in stages]
    assert first is not second
    assert first.context is second.context
    assert all(p.grad is not None for stage in stages for p in stage.parameters())


@on_world(2)
def test_memory_is_freed_with_the_last_reference_to_the_model(mesh) -> None:
    model = sharded(ours, mesh)
    one_loss(model).backward()  # the first of a process imports, and imports keep frames
    del model
    gc.collect()
    gc.disable()
    try:
        model = sharded(ours, mesh)
        for one, other in zip(model.blocks, model.blocks[1:], strict=False):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
        one_loss(model).backward()
        held = [weakref.ref(g.shard_buffer) for unit in units_of(model) for g in unit.groups]
        assert held
        assert all(ref() is not None for ref in held)
        del model, one, other
        assert not [ref for ref in held if ref() is not None]
    finally:
        gc.enable()


@on_world(2)
def test_other_functions_of_the_library_take_the_model(mesh, tmp_path: Path) -> None:
    model = sharded(ours, mesh)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    plain = models.plain()
    for m in (plain, model):
        one_loss(m).backward()
    for p, grad in zip(plain.parameters(), mean_grads(mesh, plain).values(), strict=True):
        p.grad = grad
    norms = acc.clip_grad_norm_(model, 0.1), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert torch.allclose(*norms, rtol=1e-5)
    optimizer.step()
    acc.save(f"{tmp_path}/step-1", model, optimizer)
    with acc.full_params(model):
        full = {n: p.detach().clone() for n, p in model.named_parameters()}
    other = acc.shard(models.plain(), mesh=mesh)
    again = acc.wrap_optimizer(torch.optim.AdamW(other.parameters(), lr=1e-2))
    acc.load(f"{tmp_path}/step-1", other, again)
    assert_close(dict(acc.full_state_dict(other, rank0_only=False)), full, 0.0)
    with acc.no_sync(model):
        one_loss(model, 1).backward()
    one_loss(model, 2).backward()


@pytest.mark.parametrize("first", [pytest.param(True, marks=pytest.mark.slow), False])
@on_world(2)
def test_blocks_are_compiled_before_and_after(mesh, first: bool) -> None:
    import torch._dynamo.testing

    plain, model = models.plain(), models.plain()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager" if first else "eager")
    # dynamo looks at `.grad` of what it takes in, and a full parameter is no leaf
    warnings.filterwarnings("ignore", message=".*grad attribute of a Tensor that is not a leaf.*")
    for block in model.blocks:
        if first:
            block.compile(backend=counter, fullgraph=True)
        ours.fully_shard(block, mesh=mesh)
        if not first:
            block.compile(backend=counter, fullgraph=True)
    ours.fully_shard(model, mesh=mesh)
    for step in range(3):
        for m in (plain, model):
            one_loss(m, step).backward()
        assert_close(grads_of(model), mean_grads(mesh, plain), 3e-6)
        plain.zero_grad()
        model.zero_grad()
    assert counter.frame_count == 1, "one graph serves all blocks and steps"
