"""In which dtype each thing is kept, a gradient scaler that all ranks follow, and `param.grad_dtype`."""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import accordion as acc
import accordion.compat.fsdp2 as ours
from accordion.config import STRATEGIES
from tests.compat.test_fsdp2 import SIDES
from tests.devices import device
from tests.inside import units_of
from tests.support import models, reference
from tests.support.checks import assert_close, assert_equal, batch, one_loss
from tests.support.compare import seeded
from tests.support.models import Block
from tests.support.ranked import on_strategy, on_world, under_strategies
from tests.support.reference import grads_of, local_of, params_of
from tests.support.sample import sampled

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Noting(nn.Linear):
    """Notes the dtypes of its weight, input and output."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.met = self.weight.dtype, x.dtype, out.dtype
        return out


class Seen(nn.Module):
    """Notes the dtypes that its forward meets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(Noting(8, 8), nn.Tanh())
        self.second = nn.Sequential(Noting(8, 8), nn.Tanh())
        self.register_buffer("table", torch.ones(8))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        self.met = x.dtype, mask.dtype, self.table.dtype, self.count.dtype
        return {"out": self.second(self.first(x)), "mask": mask}


def call(model: nn.Module) -> dict[str, Any]:
    return model(torch.linspace(-1, 1, 16, device=device()).view(2, 8), torch.tensor([True, False], device=device()))


@on_world(2)
def test_each_thing_is_in_the_dtype_that_was_asked_for(mesh) -> None:
    model = acc.shard(seeded(Seen), mesh=mesh, precision=acc.Precision(params=BF16))
    assert {p.dtype for p in model.parameters()} == {FP32}, "masters"
    out = call(model)
    assert model.first[0].met == model.second[0].met == (BF16, BF16, BF16)
    assert model.met == (BF16, torch.bool, FP32, torch.int64), "buffers stay as they are"
    assert (out["out"].dtype, out["mask"].dtype) == (BF16, torch.bool)
    out["out"].sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {FP32}

    model = acc.shard(seeded(Seen), mesh=mesh, precision=acc.Precision(params=BF16, output=FP32, buffers=BF16))
    out = call(model)
    assert (out["out"].dtype, out["mask"].dtype) == (FP32, torch.bool)
    assert model.met == (BF16, torch.bool, BF16, torch.int64)
    with torch.no_grad():
        assert call(model)["out"].dtype == FP32

    model = acc.shard(seeded(Seen), mesh=mesh, precision=acc.Precision(params=BF16, master=BF16))
    assert {p.dtype for p in model.parameters()} == {FP32}, "a wider parameter keeps its own"
    model = acc.shard(seeded(Seen).to(BF16), mesh=mesh, precision=acc.Precision(params=BF16, master=BF16))
    assert {p.dtype for p in model.parameters()} == {BF16}
    call(model)["out"].sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {BF16}
    model = seeded(Seen).to(BF16)
    model.first.requires_grad_(False)
    acc.shard(model, mesh=mesh, precision=acc.Precision(params=BF16))
    assert {p.dtype for p in model.second.parameters()} == {FP32}, "masters of a model that came in two bytes"
    assert {p.dtype for p in model.first.parameters()} == {BF16}, "what is not trained needs no master"

    with pytest.raises(RuntimeError):
        call(acc.shard(seeded(Seen), mesh=mesh, precision=acc.Precision(params=BF16, cast_inputs=False)))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Sequential(nn.BatchNorm2d(6), nn.ReLU()), nn.Conv2d(6, 2, 1))


@on_world(2)
def test_batch_norms_keep_the_dtype_of_their_statistics(mesh) -> None:
    """Images and convolutions in two bytes, the norm's weight and statistics in four, as torch's kernels want them."""
    plain, x = (
        seeded(convolution),
        torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1)).to(device()).to(BF16),
    )
    plain[0].to(BF16)
    plain[2].to(BF16)
    model = acc.shard(seeded(convolution), mesh, units={nn.Sequential}, precision=acc.Precision(params=BF16))
    for m in (model, plain):
        m(x).float().pow(2).mean().backward()
    assert_equal(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert_close(grads_of(model), {name: p.grad for name, p in plain.named_parameters()}, 1e-2)
    model = acc.shard(seeded(convolution), mesh, precision=acc.Precision(params=BF16, buffers=BF16))
    assert model(x).dtype == model[1][0].running_mean.dtype == BF16


@on_world(2)
def test_a_unit_may_have_a_precision_of_its_own(mesh) -> None:
    kept = acc.Precision(params=FP32)
    for overrides in ({"second": kept}, {"sec*": kept}):
        model = seeded(Seen)
        precision = acc.Precision(params=BF16, overrides=overrides)
        model = acc.shard(model, mesh=mesh, precision=precision, units={nn.Sequential})
        call(model)["out"].sum().backward()
        assert model.first[0].met == (BF16, BF16, BF16)
        assert model.second[0].met == (FP32, FP32, FP32), "and its inputs are cast"
    model = models.plain()
    precision = acc.Precision(params=BF16, overrides={nn.LayerNorm: kept})
    model = acc.shard(model, mesh=mesh, precision=precision, units={Block, nn.LayerNorm, nn.Linear})
    found: list[torch.dtype] = []
    model.blocks[0].norm.register_forward_hook(lambda m, a, out: found.extend((m.weight.dtype, a[0].dtype, out.dtype)))
    one_loss(model).backward()
    assert found == [FP32] * 3
    precision = acc.Precision(params=BF16, overrides={nn.LayerNorm: acc.Precision(params=FP32, output=BF16)})
    model = acc.shard(models.plain(), mesh=mesh, precision=precision, units={Block, nn.LayerNorm})
    found = []
    model.blocks[0].norm.register_forward_hook(lambda m, a, out: found.extend((m.weight.dtype, a[0].dtype)))
    model.blocks[0].up.register_forward_pre_hook(lambda m, a: found.extend((m.weight.dtype, a[0].dtype)))
    one_loss(model).backward()
    assert found == [FP32, FP32, BF16, BF16], "an override may name the dtype of its output"
    with pytest.raises(acc.UsageError, match=r"third.*no unit"):
        acc.shard(seeded(Seen), mesh=mesh, precision=acc.Precision(overrides={"third": kept}))


@pytest.mark.parametrize(("dtype", "how"), [(FP32, "exchange"), (FP32, "reduce_scatter"), (BF16, "exchange")])
@on_world(4)
def test_the_sum_over_ranks_is_in_the_dtype_of_the_reduce(mesh, dtype: torch.dtype, how: str) -> None:
    """`Precision.reduce` is the dtype of the sum: four numbers whose sum bfloat16 cannot hold."""
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 300, bias=False), nn.Identity()))
    nn.init.ones_(model[0][0].weight)
    strategy = acc.Strategy(name="x", params=acc.Place.SHARD, grads=acc.Place.SHARD, optim=acc.Place.SHARD, reduce=how)
    precision = acc.Precision(params=BF16, reduce=dtype)
    model = acc.shard(model, mesh=mesh, strategy=strategy, precision=precision, units={nn.Sequential}, reduce_op="sum")
    value = [256.0, 1.0, 1.0, 1.0][dist.get_rank()]
    model(torch.full((1, 1), value, device=device())).sum().backward()
    found = model[0][0].weight.grad.full_tensor()
    assert found.dtype == FP32
    (total,) = found.unique().tolist()
    assert total == 259.0 if dtype == FP32 else total in (256.0, 260.0)  # added one by one, or rounded at the end


# -- gradient scaling


def inf_in_backward(module: nn.Module, args: Any, out: Tensor) -> None:
    """Forward hook: the gradient that enters the module overflows."""
    out.register_hook(lambda grad: grad * float("inf"))


OVERFLOWS = list(itertools.product(STRATEGIES, ("everywhere", "first_block"), (False, True)))
OVERFLOWS_SHOWN = [
    ("full_shard", "first_block", True), ("full_shard", "everywhere", False), ("hybrid_shard_optim", "everywhere", True),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "where", "wrapped"), sampled(OVERFLOWS, lambda *row: row in OVERFLOWS_SHOWN))
@on_strategy
def test_an_overflow_on_one_rank_skips_the_step_on_all(mesh, strategy: str, where: str, wrapped: bool) -> None:
    """One rank's gradients overflow, in one place; every rank must skip that step, and only that."""
    plain = models.seeded(scalar=True)  # a 0-d parameter, which each rank has whole, before all others
    model = acc.shard(plain, mesh=mesh, strategy=strategy, precision=acc.Precision(params=FP16))
    optimizer: torch.optim.Optimizer = reference.adamw(model.parameters())
    if wrapped:
        optimizer = acc.wrap_optimizer(optimizer)
    scaler = torch.amp.GradScaler(device().type, init_scale=64.0, growth_interval=1000)
    for step in range(4):
        before = params_of(model)
        planted = step == 1 and dist.get_rank() == mesh.size() - 1
        handle = model.blocks[0].register_forward_hook(inf_in_backward)
        if not (planted and where == "first_block"):
            handle.remove()
        out = model(batch(model, step)[0]).float()
        if planted and where == "everywhere":
            out = out * 1e30  # inf in the gradient of the 0-d parameter and of all blocks
        scaler.scale(out.square().mean()).backward()
        handle.remove()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = params_of(model)
        same = all(torch.equal(after[name], before[name]) for name in before)
        assert same == (step == 1), f"step {step}: {'skipped' if same else 'taken'}"
        assert scaler.get_scale() == (64.0 if step < 1 else 32.0)
        assert all(bool(p.isfinite().all()) for p in after.values())


# -- autocast


@pytest.mark.parametrize("precision", [acc.Precision(params=BF16), None], ids=["precision", "no precision"])
@on_world(2)
def test_autocast_copies_no_weight_if_precision_is_set_and_warns_once_if_not(mesh, precision: Any) -> None:
    """Count saved tensors with the size of a full weight that are no memory of a unit's own."""
    model = acc.shard(models.seeded(width=64, hidden=192), mesh=mesh, precision=precision)
    sizes = {p.numel() for p in model.parameters() if p.dim() == 2}
    copies: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        is_own = any(unit.holds(tensor) for unit in units_of(model))
        if tensor.numel() in sizes and tensor.is_floating_point() and not is_own:
            copies.append(tensor)
        return tensor

    tokens, targets = models.batch(0, 0, 0, vocab=48, shape=(1, 3))
    with warnings.catch_warnings(record=True) as messages, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        warnings.simplefilter("always")
        for _ in range(2):
            with torch.autocast(device().type, dtype=BF16):
                loss = models.loss_of(model(tokens), targets)
            loss.backward()
    about = [str(w.message) for w in messages if "autocast" in str(w.message)]
    assert bool(copies) == (precision is None)
    assert len(about) <= (precision is None)
    assert all(re.search(r"\d", text) for text in about), "names the bytes"


@on_world(2)
def test_inputs_are_cast_and_their_gradients_come_back(mesh) -> None:
    """Floating inputs are cast to the dtype of the weights, and their gradients come back in their own."""
    plain, model = (seeded(lambda: nn.Sequential(Block(32, 64), Block(32, 64))) for _ in range(2))
    acc.shard(model, mesh=mesh, precision=acc.Precision(params=BF16))
    x = torch.linspace(-1, 1, 192, device=device()).view(2, 3, 32)
    xs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = {n: p.detach().to(BF16).requires_grad_() for n, p in plain.named_parameters()}
    outs = functional_call(plain, weights, (xs[0].to(BF16),)), model(xs[1])
    assert outs[1].dtype == BF16
    assert torch.equal(*outs)
    for out in outs:
        out.float().square().sum().backward()
    assert xs[1].grad.dtype == FP32
    assert torch.equal(xs[0].grad, xs[1].grad)
    assert_close(grads_of(model), {n: w.grad.float() for n, w in weights.items()})


@under_strategies("full_shard", "no_shard", "hybrid_shard_optim")
def test_masters_are_what_leaves_the_engine(mesh, strategy: acc.Strategy) -> None:
    """Full parameters and state dicts have the values and dtype of the masters."""
    plain = models.plain()
    model = acc.shard(models.plain(), mesh=mesh, strategy=strategy, precision=acc.Precision(params=BF16))
    one_loss(model).backward()
    with acc.full_params(model):
        assert_equal(dict(model.named_parameters()), dict(plain.named_parameters()))
    assert_equal(acc.full_state_dict(model, rank0_only=False), plain.state_dict())
    assert all(isinstance(p, DTensor) and local_of(p).dtype == FP32 for p in model.parameters())


# -- `param.grad_dtype`: the dtype of a sharded gradient where the caller names one

SINCE_2_15 = pytest.mark.skipif(
    not hasattr(theirs.FSDPModule, "finalize_backward"), reason="torch follows grad_dtype from 2.15 on"
)


def asking(dtype: torch.dtype | None = FP32) -> nn.Module:
    """A model in bf16 whose matrices take gradients of another dtype."""
    model = models.plain().to(BF16)
    for p in model.parameters():
        if p.dim() > 1:
            p.grad_dtype = dtype
    return model


@pytest.mark.parametrize(("dtype", "accumulates"), [(FP32, False), (FP32, True), (None, False)])
@on_world(2)
def test_a_gradient_has_the_dtype_that_was_asked_for(mesh: Any, dtype: torch.dtype | None, accumulates: bool) -> None:
    """The sum in float32 is not rounded if float32 or None was asked for; what nobody asked for is as ever."""
    precision = acc.Precision(master=None)
    plain = acc.shard(models.plain().to(BF16), mesh, precision=precision)
    model = acc.shard(asking(dtype), mesh, precision=precision)
    for m in (plain, model):
        if accumulates:
            with acc.no_sync(m):
                one_loss(m, 0).backward()
        one_loss(m, 1).backward()
    grads, rounded = grads_of(model), grads_of(plain)
    for name, p in model.named_parameters():
        asked = FP32 if p.dim() > 1 else BF16
        assert (grads[name].dtype, p.grad.dtype, p.grad.to_local().dtype) == (asked, asked, asked), name
        assert torch.equal(grads[name].to(BF16), rounded[name]), name
    assert any(not torch.equal(g, g.to(BF16).to(FP32)) for g in grads.values()), "more than bf16 holds"
    kept = {unit.name: unit.gradient_bytes for unit in acc.describe(model).units}
    assert sum(kept.values()) == sum(p.grad.to_local().nbytes for p in model.parameters())
    one_loss(model, 2).backward()  # adds to the gradients
    assert acc.clip_grad_norm_(model, 0.5) > 0.5
    optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))
    before = acc.full_state_dict(model, rank0_only=False)
    optimizer.step()
    assert not torch.equal(acc.full_state_dict(model, rank0_only=False)["head.weight"], before["head.weight"])


@SINCE_2_15
@pytest.mark.parametrize("reduce", [None, BF16, FP32])
@pytest.mark.parametrize("asked", [FP32, None])
@on_world(2)
def test_fsdp2_follows_it_as_torchs(mesh: Any, asked: torch.dtype | None, reduce: torch.dtype | None) -> None:
    """Beside torch's FSDP2: the same dtypes and numbers, without a `reduce_dtype` and with one."""
    pair = []
    for api in SIDES:
        model = asking(asked)
        policy = theirs.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce)
        for block in model.blocks:
            api.fully_shard(block, mesh=mesh, mp_policy=policy)
        pair.append(api.fully_shard(model, mesh=mesh, mp_policy=policy))
    for step in range(2):
        for model in pair:
            one_loss(model, step).backward()
    wanted, grads = (grads_of(model) for model in pair)
    assert {n: g.dtype for n, g in grads.items()} == {n: g.dtype for n, g in wanted.items()}
    for name, grad in grads.items():
        assert torch.allclose(grad, wanted[name], rtol=2e-2, atol=1e-3), name


@on_world(2)
def test_it_may_be_set_until_the_first_use(mesh: Any) -> None:
    """Values that are set between `fully_shard` and the first forward count too."""
    model = ours.fully_shard(models.plain().to(BF16), mesh=mesh)
    model.head.weight.grad_dtype = FP32
    one_loss(model, 0).backward()
    assert (model.head.weight.grad.dtype, model.blocks[0].up.weight.grad.dtype) == (FP32, BF16)


@on_world(2)
def test_offload_and_it_are_refused_together(mesh: Any) -> None:
    with pytest.raises(acc.UsageError, match=r"has grad_dtype torch.float32, and an offloaded gradient is stored"):
        acc.shard(asking(), mesh, precision=acc.Precision(master=None), offload=acc.Offload(params="host"))
