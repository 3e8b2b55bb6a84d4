"""Programs written for unsharded models work on a sharded one, or raise an error that names the place."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

import accordion as acc
from accordion.tensor_checksum import checksum
from tests.compat.test_fsdp2_parallel import Levels, Packed
from tests.devices import device, here
from tests.inside import unit_in
from tests.support.checks import assert_at_rest, assert_close
from tests.support.meters import Wire
from tests.support.ranked import on_num_ranks, on_world, under_strategies


class Net(nn.Module):
    """Two layers in a row."""

    def __init__(self, layer: type[nn.Module] = nn.Linear, *sizes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = here(nn.ModuleList(layer(*(sizes or (8, 8))) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def inputs(rank: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)).to(device())


# -- a model that was compiled as a whole


@on_world(2)
def test_a_model_compiled_before_it_is_sharded(mesh) -> None:
    warnings.filterwarnings("ignore", ".*grad attribute of a Tensor")  # Dynamo asks all the same, and shows none
    plain = Net()
    model = acc.shard(torch.compile(Net(), backend="eager"), mesh=mesh, units={nn.Linear})
    assert list(model.state_dict()) == [f"_orig_mod.{name}" for name in plain.state_dict()]
    for _ in range(2):
        for m in (plain, model):
            m.zero_grad()
            m(inputs()).square().sum().backward()
        found = {name.removeprefix("_orig_mod."): p.grad.full_tensor() for name, p in model.named_parameters()}
        assert_close(found, {name: p.grad for name, p in plain.named_parameters()}, 1e-6)


# -- a forward that assigns `weight.data`


class Assigns(nn.Linear):
    """Its forward gives its weight other memory, with other numbers where `how` says so."""

    how = "clamped"

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "clamped":
            self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        elif self.how == "moved":
            self.weight.data = self.weight.data.t().contiguous().t()
        out = super().forward(x)
        if self.how == "packed":
            self.weight.data = self.weight.data.bfloat16()
        return out


@under_strategies("full_shard")
def test_data_assigned_in_a_forward_is_seen(mesh, strategy: acc.Strategy) -> None:
    model, plain = acc.shard(Net(Assigns), mesh=mesh, units={Assigns}, strategy=strategy), Net()
    layer, text = (
        model.layers[1],
        "unit 'layers.1' assigned other values to the data of parameter 'layers.1.weight' in its",
    )
    model.layers[0].how = layer.how = "left"
    for is_frozen in (False, True):
        model.requires_grad_(not is_frozen)
        for how, grad in itertools.product(("clamped", "packed"), (True, False)):
            layer.how = how
            with torch.set_grad_enabled(grad), pytest.raises(acc.UsageError, match=text):
                model(inputs())
            layer.how = "left"
            assert torch.equal(model(inputs()), plain(inputs())), "what was assigned is gone"
    layer.how = "moved"  # the same numbers elsewhere
    model.requires_grad_(True)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert torch.allclose(model(inputs()), plain(inputs()), rtol=1e-5, atol=1e-6)
    for m in (plain, model):
        for _ in range(6):  # then the forwards above count as given up
            m.zero_grad()
            m(inputs()).square().sum().backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert_close(found, {name: p.grad for name, p in plain.named_parameters()}, 1e-5)
    assert_at_rest(model)


# -- what is asked of DTensors


class Odd(nn.Module):
    """Rows that do not divide, a cut dim other than 0, one row for all ranks, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(7, 8))
        self.wide = nn.Parameter(torch.randn(1, 8))
        self.one = nn.Parameter(torch.tensor([2.0]))
        self.scale = nn.Parameter(torch.tensor(3.0))
        here(self)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).sum() * self.scale + (x * self.wide).sum() * self.one


# torch 2.11 cannot redistribute rows that are cut over two axes, which reading a part of them takes.
REDISTRIBUTES_NOT = ["hybrid_shard_optim"] if torch.__version__ < "2.12" else []


@under_strategies("full_shard", but=REDISTRIBUTES_NOT)
def test_a_number_in_a_sharded_tensor_is_that_of_all_ranks(mesh, strategy: acc.Strategy) -> None:
    plain, model = Odd(), acc.shard(Odd(), mesh=mesh, strategy=strategy)
    for m in (plain, model):
        m(inputs()).backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert isinstance(b.grad, DTensor)
        for ask in (Tensor.norm, Tensor.sum, *((Tensor.max, Tensor.min, Tensor.mean) if name == "weight" else ())):
            found = (ask(b.grad).item(), float(ask(b.detach())))
            wanted = (ask(a.grad).item(), float(ask(a.detach())))
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5), (name, ask)
        assert bool((b == b).all())
        assert not bool(torch.isnan(b.grad).any())
        with torch.no_grad(), acc.full_params(model, write=True):
            getattr(model, name).view(-1)[-1] = torch.nan  # in a row of the last rank
        assert not bool(torch.isfinite(b).all()), name
        assert bool(b.isnan().any()), name
    assert model.one.detach().isnan().item() is True
    assert model.scale.grad.item() == plain.scale.grad.item()
    with pytest.raises(RuntimeError, match="with 56 elements cannot be converted"):
        model.weight.item()


@pytest.mark.cpu("on accelerators torch gives each rank numbers of its own, once all ranks of the job have asked")
@under_strategies("full_shard")
def test_init_draws_the_numbers_of_one_device(mesh, strategy: acc.Strategy) -> None:
    """With one seed everywhere `torch.nn.init` gives what it gives on one device."""
    inits = {
        "normal": nn.init.normal_,
        "uniform": nn.init.uniform_,
        "xavier": nn.init.xavier_normal_,
        "kaiming": nn.init.kaiming_uniform_,
        "truncated": lambda p: nn.init.trunc_normal_(p, std=0.02),
        "bernoulli": lambda p: p.data.bernoulli_(0.5),
        "data": lambda p: p.data.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(3)),
        "noise": lambda p: p.data.add_(torch.randn_like(p)).add_(torch.rand_like(p.data)),
    }
    plain, model = Odd(), acc.shard(Odd(), mesh=mesh, strategy=strategy)
    for name, init in inits.items():
        for m in (plain, model):
            torch.manual_seed(1)
            for p in (m.weight, m.wide):
                with torch.no_grad():
                    init(p)
        for a, b in ((plain.weight, model.weight), (plain.wide, model.wide)):
            assert torch.equal(a, b.full_tensor()), name
    assert torch.equal(plain(inputs()), model(inputs())), "the model computes with it"


@under_strategies("full_shard", but=REDISTRIBUTES_NOT)
def test_a_part_of_a_sharded_tensor_is_written_or_refused(mesh, strategy: acc.Strategy) -> None:
    """A part of a sharded tensor is written, or refused in a sentence: never lost."""
    ways = {
        "row": lambda w: w.__setitem__(3, 0),
        "column": lambda w: w.__setitem__((slice(None), 2), 0),
        "rows": lambda w: w.__setitem__(torch.tensor([0, 5]), 0),
        "mask": lambda w: w.__setitem__(w > 0, 0),
        "slice": lambda w: w[1:3].zero_(),
        "fill": lambda w: w[0].fill_(7),
        "data": lambda w: w.data[6].mul_(2),
        "copy": lambda w: w[:2].copy_(w[2:4]),
        "draw": lambda w: nn.init.normal_(w[0]),
        "whole": lambda w: w.mul_(2).add_(1),
        "view": lambda w: w.t().mul_(2),
    }
    if device().type != "cpu":
        del ways["draw"]  # there torch has the first draw wait for all ranks of the job
    refused: dict[str, Exception] = {}
    for name, way in ways.items():
        plain, model = Odd(), acc.shard(Odd(), mesh=mesh, strategy=strategy)
        torch.manual_seed(1)
        with torch.no_grad():
            way(plain.weight)
        torch.manual_seed(1)
        try:
            with torch.no_grad():
                way(model.weight)
        except (acc.UsageError, RuntimeError) as error:  # torch refuses some indices itself
            plain = Odd()
            refused[name] = error
        assert torch.equal(model.weight.full_tensor(), plain.weight), name
    assert not refused.keys() & {"whole", "view"}
    texts = [str(error) for error in refused.values() if isinstance(error, acc.UsageError)]
    assert all(re.search(r"part of a sharded tensor of shape \(7, 8\).*full_params\(", text) for text in texts), texts


# -- what reads or changes a unit's layers from outside


class Modulated(nn.Module):
    """A block whose `shift` its model calls, as diffusers' DiT does with a layer of the first block."""

    def __init__(self, *_: int) -> None:
        super().__init__()
        self.shift = nn.Linear(8, 8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Reaches(Net):
    """The root calls or reads a layer inside of a block: `reach(forward of the blocks, x, layer)`."""

    def __init__(self, reach: Callable[[Callable[[Tensor], Tensor], Tensor, nn.Linear], Tensor]) -> None:
        super().__init__(Modulated)
        self.reach = reach

    def forward(self, x: Tensor) -> Tensor:
        return self.reach(super().forward, x, self.layers[0].shift)


@on_world(2)
def test_what_reaches_into_a_unit_is_named(mesh) -> None:
    names = r" \(layers.0.shift.weight, layers.0.shift.bias of unit 'layers.0'\)"
    for reach, named in (
        (lambda blocks, x, shift: blocks(x + shift(x)), names),
        (lambda blocks, x, shift: blocks(x @ shift.weight), ""),
        (lambda blocks, x, shift: blocks(x) + shift.bias, ""),
        (lambda blocks, x, shift: blocks(x) + shift.weight.square().sum(), ""),
    ):
        model = acc.shard(Reaches(reach), mesh=mesh, units={Modulated})
        text = f"read a parameter of a unit{named} outside of that unit's own forward"
        with pytest.raises(acc.UsageError, match=text):
            model(inputs())


# -- dtypes that gloo does not know

RARE = (
    *(
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.int16,
        torch.uint16,
        torch.uint32,
        torch.bool,
    ),
    *(torch.complex64, torch.complex128),
)


class Stored(nn.Module):
    """A frozen weight in a dtype of storage, a large one and a small one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        numbers = torch.arange(1, 5).repeat(64)
        self.small = nn.Parameter(numbers[:14].view(7, 2).to(dtype), requires_grad=False)
        self.large = nn.Parameter(numbers.repeat(40).view(80, 128).to(dtype), requires_grad=False)
        here(self)

    def forward(self, x: Tensor) -> Tensor:
        weights = [w.real if w.is_complex() else w for w in (self.small, self.large)]
        return x + sum(w.to(torch.float32).sum() for w in weights)


@pytest.mark.parametrize("num_ranks", [2, 3])
@on_num_ranks
def test_dtypes_that_gloo_does_not_know_travel_as_bytes(mesh) -> None:
    for dtype in RARE:
        plain, model = Stored(dtype), acc.shard(Stored(dtype), mesh=mesh)
        assert torch.equal(model(inputs()), plain(inputs())), dtype
        with acc.full_params(model):
            assert torch.equal(model.large.view(torch.uint8), plain.large.view(torch.uint8)), dtype


# -- tensor subclasses

HOST = acc.Offload(params="host", optimizer="host")


class Dropped(Tensor):
    """Says nothing of how it is gathered."""


def subclassed() -> nn.Sequential:
    torch.manual_seed(0)
    model = here(nn.Sequential(nn.Linear(8, 7), nn.GELU(), nn.Linear(7, 7), nn.GELU(), nn.Linear(7, 4)))
    model[0].weight = nn.Parameter(Packed(model[0].weight.detach()))
    model[4].weight = nn.Parameter(Levels(model[4].weight.detach()), requires_grad=False)
    return model


def kept(mesh, strategy: acc.Strategy) -> None:
    """Subclasses with FSDP's hooks compute as under `fully_shard`, bit for bit."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reference = subclassed()
    for i in (0, 4):
        fully_shard(reference[i], mesh=mesh, mp_policy=policy)
    fully_shard(reference, mesh=mesh, mp_policy=policy)
    precision = acc.Precision(params=torch.bfloat16, reduce=torch.float32)
    model = acc.shard(
        subclassed(), mesh=mesh, strategy=strategy, precision=precision, units=lambda name, _: name in ("0", "4")
    )
    assert [type(model[i].weight.to_local()) for i in (0, 4)] == [Packed, Levels]
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(mesh.get_rank())).to(device())
    pair, losses = (reference, model), []
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in pair]
    for step in range(3):
        for m, optimizer in zip(pair, optimizers, strict=True):
            losses.append(m(x[step].bfloat16()).float().square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(losses[-2], losses[-1]), step
    with Wire() as wire:
        unit_in(model[0]).unshard()
    assert wire.calls, "a gather of subclasses begins when its unit is unsharded, not when it is needed"
    unit_in(model[0]).reshard()


class Eighths(Levels):
    """Rows that travel in float8, of which gloo knows nothing."""

    def fsdp_pre_all_gather(self, mesh) -> Any:
        return (self.inner.to(torch.float8_e4m3fn),), None

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None) -> Any:
        (full,) = gathered
        if out is None:
            return super().fsdp_post_all_gather((full.to(torch.float32) * 64,), metadata, param_dtype)
        return super().fsdp_post_all_gather((full.to(torch.float32) * 64,), metadata, param_dtype, out=out)


def in_float8(mesh) -> None:
    plain, model = Net(), Net()
    for a, b in zip(plain.layers, model.layers, strict=True):
        b.weight = nn.Parameter(Eighths(b.weight.detach()), requires_grad=False)
        a.weight.data = a.weight.data.to(torch.float8_e4m3fn).to(torch.float32)
    acc.shard(model, mesh=mesh, units={nn.Linear})
    for _ in range(2):
        assert torch.equal(model(inputs()), plain(inputs()))


def not_kept(mesh) -> None:
    def refuses(match: str, model: nn.Module, **options: Any) -> None:
        before = [type(p.data) for p in model.parameters()]
        with pytest.raises(acc.UsageError, match=match):
            acc.shard(model, mesh=mesh, **options)
        assert [type(p.data) for p in model.parameters()] == before, "a refusal leaves the model as it was"

    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Dropped))
    refuses("parameter '0.weight' is a Dropped, a tensor subclass without fsdp_pre_all_gather", model)
    refuses("Packed, which defines its own all-gather, and such tensors are not offl", subclassed(), offload=HOST)
    refuses("Packed, which defines its own all-gather, and no_shard keeps", subclassed(), strategy=acc.NO_SHARD)
    refuses("is a Packed, and sync=True sends plain tensors only", subclassed(), sync=True)


def test_tensor_subclasses_are_kept_or_refused_by_name(world):
    world.run(2, kept, acc.FULL_SHARD)
    world.run(2, kept, acc.SHARD_GRAD_OP)
    world.run(2, in_float8)
    world.run(2, not_kept)


def test_swapped_inner_tensors_have_another_checksum() -> None:
    first, second = torch.arange(4.0), torch.ones(4)
    assert checksum(TwoTensor(first, second)) != checksum(TwoTensor(second, first))
