"""Kinds of modules and parameters: whatever a model is made of, it trains as without sharding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accordion as acc
from tests.devices import device
from tests.support.compare import (
    Case,
    Pair,
    check_step,
    compare_poisoned,
    on_its_ranks,
    open_full_buffers,
    rest,
    seed_of,
    seeded,
)
from tests.support.meters import Wire
from tests.support.ranked import on_worlds, under_strategies

BF16 = torch.bfloat16


# -- dtypes and requires_grad in one unit


class LowRank(nn.Module):
    """A frozen two-byte layer and an adapter beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).to(BF16).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(width, 2))
        self.up = nn.Parameter(torch.randn(2, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.to(BF16)).to(x.dtype) + x @ self.down @ self.up


def adapted() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(6), LowRank(6), nn.Tanh(), LowRank(6))


@under_strategies("full_shard", "no_shard")
def test_adapters_on_a_frozen_two_byte_base(mesh, strategy: acc.Strategy) -> None:
    """No gradient of a frozen weight is computed. Mixed dtypes need no flag: each parameter is gathered in its own."""
    plain, model = seeded(blocks_of(adapted)), seeded(blocks_of(adapted))
    acc.shard(model, mesh=mesh, units={nn.Sequential}, strategy=strategy)
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in plain.parameters()], "a frozen one keeps its own"

    def run(m: nn.Module, step: int) -> None:
        loss = m(torch.randn(3, 6, device=device())).square().sum()
        with Wire() as operators:
            loss.backward()
        products = sum(operators.seen[f"aten::{name}"] for name in ("mm", "addmm", "bmm"))
        assert products == 4 * (4 + 1), (
            "of a layer, gradients of two adapters and their inputs, and of the base's input"
        )

    for step in range(2):
        check_step(mesh, model, plain, run, step)
        assert all(p.grad is None for n, p in model.named_parameters() if "base" in n)
        rest(model)


class Normed(nn.Module):
    """A layer in two bytes after a norm in four."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(6), nn.Linear(6, 6).to(BF16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x).to(BF16)).float()


class Towers(nn.Module):
    """A frozen encoder, a trained one, and a head that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(Pair(), Pair()).requires_grad_(False)
        self.trained = nn.Sequential(Pair(), Pair())
        self.head = nn.Linear(14, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.frozen(x), self.trained(x)], -1))


def squared(*shape: int) -> Callable[[nn.Module, int], Tensor]:
    """A step on random inputs of a shape and the mean of squares of the output."""

    def run(model: nn.Module, step: int) -> Tensor:
        out = model(torch.randn(*shape, device=device()))
        (out[0] if isinstance(out, tuple) else out).float().square().mean().backward()
        return out

    return run


def blocks_of(kind: Callable[[], nn.Module], count: int = 2) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(kind() for _ in range(count)))


def blocks(kind: type[nn.Module], *shape: int, **more: Any) -> Case:
    """Return the `Case` of a model of two units of class `kind`, with inputs of `shape`. `more`: fields of the case."""
    return Case(build=blocks_of(kind), run=squared(*shape), units={kind}, **more)


def thawing(model: nn.Module, step: int) -> Tensor:
    """Other parts of the model are frozen in each step."""
    frozen = [("frozen",), (), ("trained.0", "head"), ("frozen.1", "trained.1.a"), ()][step]
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(frozen) if frozen else True)
    return squared(3, 7)(model, step)


DTYPE_CASES = {
    "norms in four bytes of a model in two": blocks(
        Normed, 3, 6, options={"precision": acc.Precision(master=BF16)}, tolerance=2**-7
    ),
    "a frozen tower": Case(build=Towers, run=squared(3, 7), units={Pair}),
    "requires_grad changed between steps": Case(build=Towers, run=thawing, units={Pair}, steps=5),
}


# -- shapes, strides and storages


class Uses(nn.Module):
    """A unit of given parameters and buffers, all of which its output depends on."""

    def __init__(self, *params: Tensor, **buffers: Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(p, requires_grad=p.is_floating_point()) for p in params)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:  # (n,)
        y = x
        for w in self.weights:
            y = y + torch.tanh(
                (w * (1.0 + torch.arange(w.numel(), device=device()).view(w.shape))).sum() * x + w.sum() * 0.5
            )
        for _, buffer in self.named_buffers():
            y = y + buffer.abs().sum() * x
        return torch.tanh(y)


def uses(make: Callable[[], tuple[Tensor, ...]], **buffers: Tensor) -> Case:
    def build() -> nn.Module:
        return nn.Sequential(
            *(Uses(*make(), **{k: b.clone() for k, b in buffers.items()}) for _ in range(2)), nn.Linear(4, 4)
        )

    return Case(build=build, run=squared(4), units={Uses})


def strided(make: Callable[[], tuple[Tensor, ...]]) -> Case:
    """Full parameters are contiguous, so that sums have the order in which they stand there."""
    return replace(uses(make), reference=uses(lambda: tuple(t.contiguous() for t in make())).build)


def convolutions(memory_format: torch.memory_format = torch.contiguous_format) -> nn.Module:
    blocks = [
        nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(), nn.Conv2d(o, o, 1))
        for i, o in ((3, 5), (5, 3))
    ]
    return nn.Sequential(*blocks).to(memory_format=memory_format)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, padding_idx=2)
        self.bag = nn.EmbeddingBag(5, 3, mode="mean")

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 3).long().clamp(max=4)
        return self.embed(tokens).sum(1) + self.bag(tokens)


SHAPE_CASES = {
    "rows that no number of ranks divides": uses(lambda: (torch.randn(7, 2), torch.randn(11), torch.randn(5, 3, 2))),
    "fewer rows than ranks": uses(lambda: (torch.randn(1, 3, 2), torch.randn(2, 2), torch.randn(3, 3, 2))),
    "no dims and no elements": uses(lambda: (torch.randn(()), torch.randn(0, 3), torch.randn(4), torch.randn(2, 0))),
    "transposed and strided storage": strided(
        lambda: (torch.randn(5, 3).t(), torch.randn(6, 4)[::2], torch.randn(3).expand(2, 3).clone().t()),
    ),
    "complex and integer buffers": uses(
        lambda: (torch.randn(3),),
        complex=torch.tensor([1.0 + 2.0j, 3.0]),
        integer=torch.arange(4),
        flag=torch.tensor(True).int(),
    ),
    "integer and boolean parameters": uses(
        lambda: (torch.randn(3), torch.arange(5), torch.tensor([[1, 2]], dtype=torch.int8), torch.ones(3).bool())
    ),
    "Conv2d and BatchNorm2d": Case(build=convolutions, run=squared(2, 3, 4, 4), units={nn.Sequential}),
    "Conv2d in channels_last": Case(
        build=functools.partial(convolutions, torch.channels_last),
        run=squared(2, 3, 4, 4),
        units={nn.Sequential},
        reference=convolutions,
    ),
    "embedding with padding_idx": Case(
        build=lambda: nn.Sequential(Padded(), nn.Linear(3, 3)), run=squared(3, 4), units={Padded}
    ),
}


@pytest.mark.parametrize("name", SHAPE_CASES)
@on_worlds
def test_any_shape_stride_and_storage(mesh, name: str) -> None:
    compare_poisoned(mesh, SHAPE_CASES[name])


@pytest.mark.cpu("the simulator has no sparse tensors")
@on_worlds
def test_sparse_gradients_are_refused_by_name(mesh) -> None:
    for module in (nn.Embedding(6, 2, sparse=True), nn.EmbeddingBag(6, 2, mode="sum", sparse=True)):
        with pytest.raises(acc.UsageError, match=r"'0'.*sparse=False"):
            acc.shard(nn.Sequential(module), mesh=mesh)

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 2))

        def forward(self, tokens: Tensor, sparse: bool) -> Tensor:
            return F.embedding(tokens, self.weight, sparse=sparse)

    model, tokens = acc.shard(Functional(), mesh=mesh), torch.tensor([1, 2], device=device())
    loss = model(tokens, sparse=True).sum()
    with pytest.raises(acc.UsageError, match="sparse gradient"):
        loss.backward()
    model(tokens, sparse=False).sum().backward()
    rest(model)


# -- modules of torch


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first = kind(4, 5, num_layers=2, bidirectional=True)
        self.second = kind(10, 3, num_layers=2, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)[0])[0]


class Attends(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(6, 2, batch_first=True, **options)
        self.second = nn.MultiheadAttention(6, 3, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x[..., :4] if self.first.kdim == 4 else x
        y, weights = self.first(x, wide, wide, need_weights=True)
        return self.second(y, x, x, need_weights=False)[0], weights


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 7, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Named(nn.Module):
    """Parameters in a dictionary and in a list, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name = nn.ParameterDict({"scale": torch.randn(4), "lists": nn.ParameterList([torch.randn(4, 4)])})
        self.by_index = nn.ParameterList([torch.randn(3, 4), nn.Parameter(torch.randn(3, 4), requires_grad=False)])

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.by_name["scale"] @ self.by_name["lists"][0]
        return torch.tanh(sum(y @ w.t() @ w for w in self.by_index))


class OtherWeights(nn.Module):
    """Uses the weights of its layers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 5)
        self.unused = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.lin.weight, self.lin.bias
        y = F.linear(x, weight, bias) @ weight + self.unused.weight.sum(1)
        return y / self.lin.weight.norm()


class Decayed(OtherWeights):
    """Adds a term over `parameters()`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(p.square().sum() for p in self.lin.parameters())


MODULE_CASES = {
    "LSTM": Case(build=blocks_of(lambda: Recurrent(nn.LSTM), 1), run=squared(3, 2, 4), units={Recurrent}),
    "an RNN that is a unit itself": Case(
        build=lambda: Recurrent(nn.GRU),
        run=squared(3, 2, 4),
        units={nn.GRU},
        options={"checkpoint_activations": "none"},
    ),
    "MultiheadAttention": Case(build=Attends, run=squared(2, 3, 6), units={nn.MultiheadAttention}),
    "MultiheadAttention with other keys": Case(
        build=lambda: Attends(kdim=4, vdim=4, add_bias_kv=True), run=squared(2, 3, 6), units={nn.MultiheadAttention}
    ),
    "TransformerEncoderLayer": Case(build=encoder, run=squared(2, 3, 6), units={nn.TransformerEncoderLayer}),
    "ParameterList and ParameterDict": blocks(Named, 3, 4),
    "weights of children used by their parent in one unit": blocks(OtherWeights, 3, 4),
    "parameters() in a forward": blocks(Decayed, 3, 4, exact=False),
}


@on_worlds
def test_the_fused_evaluation_of_an_encoder(mesh) -> None:
    """Evaluation has a fused kernel of its own, which reads the weights of its children."""
    plain, model = seeded(encoder), acc.shard(seeded(encoder), mesh=mesh, units={nn.TransformerEncoderLayer})
    torch.manual_seed(seed_of(0))
    x = torch.randn(2, 3, 6, device=device())
    for mode in (torch.no_grad, torch.inference_mode):
        for m in (plain.eval(), model.eval()):
            with mode():
                m.found = m(x)
        assert torch.allclose(model.found, plain.found, atol=1e-6)
        del model.found, plain.found
        assert set(open_full_buffers(model)) <= {"(root)"}
    rest(model)


# -- reparametrised modules


def wrapped(wrap: Callable[..., nn.Module], *, is_unit: bool = False) -> Case:
    """Return the `Case` of layers that `wrap` has changed. `is_unit`: each layer is a unit, and not each two of them."""

    def block() -> nn.Module:
        layer = wrap(nn.Linear(4, 4))
        return layer if is_unit else nn.Sequential(layer, nn.Tanh(), wrap(nn.Linear(4, 4)))

    return Case(build=blocks_of(block), run=squared(3, 4), units=lambda name, module: name in ("0", "1"))


class Cached(nn.Module):
    """Computes an orthogonal weight once for two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        with nn.utils.parametrize.cached():
            return torch.tanh(self.lin(self.lin(x)))


PARAMETRIZED_CASES = {
    "weight_norm by hooks": wrapped(nn.utils.weight_norm),
    "spectral_norm by hooks": wrapped(nn.utils.spectral_norm),
    "weight_norm": wrapped(nn.utils.parametrizations.weight_norm),
    "spectral_norm": wrapped(nn.utils.parametrizations.spectral_norm),
    "orthogonal, cached": blocks(Cached, 3, 4),
    "layers that are units themselves": wrapped(nn.utils.parametrizations.weight_norm, is_unit=True),
    "layers that are units themselves, by hooks": wrapped(nn.utils.weight_norm, is_unit=True),
}

CASES = {**DTYPE_CASES, **MODULE_CASES, **PARAMETRIZED_CASES}


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.* is deprecated:FutureWarning")  # still in use
@on_its_ranks(CASES)
def test_any_module_trains_whatever_its_dtypes_and_parametrizations(mesh, name: str) -> None:
    compare_poisoned(mesh, CASES[name])
