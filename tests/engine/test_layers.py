"""Embeddings and heads as units of their own: when they are gathered, and what reads them from outside of their forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import accordion as acc
from accordion import _torch
from accordion.engine.observer import Observer
from accordion.engine.unit import Unit
from accordion.units import choose_units
from tests.devices import device, here
from tests.inside import engine_in, units_of
from tests.safety.test_divergence import IN_STREAMS
from tests.support import models
from tests.support.checks import assert_at_rest, logged
from tests.support.compare import check_step, seeded
from tests.support.ranked import on_world
from tests.support.sample import sampled

WIDTH, VOCAB = 16, 96
WAYS = ("module", "weight", "both", "embedding", "recomputed", "given", "raises")


class Language(nn.Module):
    """An embedding, blocks, a head; `way`: how the weights of the last product are read."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(models.Block(WIDTH, 24) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        if way != "embedding":
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, calls: bool = True) -> Any:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if not calls:
            return x
        if self.way == "module":
            return self.head(x)
        if self.way == "both":
            return self.head(x) + 0.1 * F.linear(x, self.head.weight)
        if self.way == "recomputed":
            return checkpoint(lambda y: F.linear(y, self.head.weight).tanh(), x, use_reentrant=False)
        if self.way == "given":
            return F.linear(x, self.head.weight), self.head.weight
        if self.way == "raises" and tokens.min() == 0:
            raise RuntimeError(f"behind a read of {tuple(self.head.weight.shape)}")
        return F.linear(x, self.tokens.weight if self.way == "embedding" else self.head.weight)


def loss_of(model: nn.Module, tokens: Tensor, calls: bool = True) -> Tensor:
    out = model(tokens, calls)
    if not calls:
        return out.square().mean()
    logits, weight = out if isinstance(out, tuple) else (out, None)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    return loss if weight is None else loss + 0.01 * weight.square().mean()


def drawn(rank: int, step: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (2, 7), generator=torch.Generator().manual_seed(10 * step + rank)).to(device())


def both(mesh, way: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Sharded, and the same without sharding."""
    model, plain = (seeded(lambda: Language(way)) for _ in range(2))
    return acc.shard(model, mesh=mesh, **options), plain


def step_both(mesh, model: nn.Module, plain: nn.Module, step: int, calls: bool = True) -> None:
    def run(m: nn.Module, step: int) -> Tensor:
        loss = loss_of(m, drawn(mesh.get_rank(), step), calls)
        loss.backward()
        return loss.detach()

    check_step(mesh, model, plain, run, step, exact=False, tolerance=5e-7)


RUNS = [
    ("full_shard", ("streams",)), ("full_shard", ()), ("shard_grad_op", ("streams",)), ("shard_optim", ("streams",)),
]  # fmt: skip


@pytest.mark.parametrize("frozen", ["nothing", "the layer", "all but a bias"])
@pytest.mark.parametrize(
    ("strategy", "debug"), sampled(RUNS, lambda strategy, debug: strategy == "full_shard" and debug)
)
@on_world(2)
def test_weights_of_layers_are_read_from_outside(mesh, strategy: str, debug: tuple[str, ...], frozen: str) -> None:
    """`frozen`: as under LoRA, the layer whose weight is read trains nothing, and others behind it do."""
    for way in WAYS:
        model, plain = both(mesh, way, strategy=strategy, debug=debug)
        for m in (model, plain) if frozen != "nothing" else ():
            (m if frozen != "the layer" else m.tokens if way == "embedding" else m.head).requires_grad_(False)
            m.norm.bias.requires_grad_()
        layers = ["tokens"] if way == "embedding" else ["tokens", "head"]
        assert [u.name for u in units_of(model) if u.is_layer] == layers
        for step in range(3):
            if way == "raises" and step == 1:
                for m in (model, plain):
                    with pytest.raises(RuntimeError, match=r"behind a read of \(96, 16\)"):
                        m(torch.zeros(2, 7, dtype=torch.long, device=device()))
            step_both(mesh, model, plain, step)
            if way != "raises":  # there a forward waits for its backward, for some more of them
                assert_at_rest(model)
        tokens = drawn(mesh.get_rank(), 9)
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model, tokens), loss_of(plain, tokens), rtol=1e-6, atol=0)


class Scorer(nn.Module):
    """Frozen as a whole: its input alone gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = models.Block(WIDTH, 24), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.block(x), self.head.weight)


@on_world(2)
def test_a_model_that_is_frozen_as_a_whole_reads_its_weights_from_outside(mesh) -> None:
    model, plain = (seeded(Scorer).requires_grad_(False) for _ in range(2))
    acc.shard(model, mesh=mesh, units={models.Block, nn.Linear})

    def run(m: nn.Module, step: int) -> Tensor:
        x = torch.randn(2, WIDTH, device=device(), requires_grad=True)
        m(x).square().mean().backward()
        return x.grad

    for step in range(3):
        check_step(mesh, model, plain, run, step)
        assert_at_rest(model)


class Gathers(Observer):
    """Records the names of units that begin a gather, in forwards and in backwards."""

    def __init__(self) -> None:
        self.in_forward: list[str] = []
        self.in_backward: list[str] = []

    def unit_unshards(self, unit: Unit) -> None:
        (self.in_backward if _torch.is_in_backward() else self.in_forward).append(unit.name)


@on_world(2)
def test_an_embedding_is_not_gathered_for_its_backward(mesh) -> None:
    """An embedding is gathered for its forward alone, a head once, and neither makes the last block come twice."""
    blocks = [f"blocks.{i}" for i in range(3)]
    for strategy, backward in (("full_shard", blocks[1::-1]), ("shard_grad_op", [])):
        model, plain = both(mesh, "module", strategy=strategy)
        step_both(mesh, model, plain, 0)
        gathers = Gathers()
        engine_in(model).observers.attach(gathers)
        step_both(mesh, model, plain, 1)
        assert gathers.in_forward == ["", "tokens", *blocks, "head"]
        assert gathers.in_backward == backward


@on_world(2)
def test_a_hook_may_read_the_weight_of_an_embedding(mesh) -> None:
    """A hook that computes with an embedding's weight makes its backward need it after all."""
    model, plain = both(mesh, "module")
    for m in (model, plain):
        m.tokens.register_forward_hook(lambda module, args, out: out * module.weight.square().mean().add(1))
    for step in range(3):
        step_both(mesh, model, plain, step)


class Sum(nn.Module):
    """A unit of embeddings alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(8, WIDTH)
        here(self)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=device()))


@on_world(2)
def test_a_recomputed_embedding_is_gathered_for_its_backward(mesh) -> None:
    """What is recomputed in a unit reads its weights in the backward."""
    model, plain = (seeded(lambda: Language("module")) for _ in range(2))
    model.tokens, plain.tokens = seeded(Sum), seeded(Sum)
    acc.shard(model, mesh=mesh, units={Sum, models.Block}, checkpoint_activations="full")
    for step in range(2):
        step_both(mesh, model, plain, step)
    model, plain = both(mesh, "module")
    own = model.tokens.forward
    model.tokens.forward = lambda tokens: checkpoint(own, tokens, use_reentrant=False)
    for step in range(2):
        step_both(mesh, model, plain, step)


@IN_STREAMS
@on_world(2)
def test_ranks_may_differ_in_what_they_read(mesh) -> None:
    """One rank's forward reads the head, the other's does not."""
    model, plain = both(mesh, "weight")
    with logged() as messages:
        for step in range(4):
            step_both(mesh, model, plain, step, calls=step == 0 or mesh.get_rank() != step % 2)
    assert len([message for message in messages if "call different units" in message]) == 1


@on_world(2)
def test_recomputed_units_are_blocks(mesh) -> None:
    """Layers alone are not recomputed: there is nothing to save."""
    model, plain = both(mesh, "module", checkpoint_activations="every:2")
    wrapped = [name for name, m in model.named_modules() if "forward" in m.__dict__ and name]
    assert wrapped == ["blocks.0", "blocks.2"]
    for step in range(2):
        step_both(mesh, model, plain, step)


def test_which_layers_are_units() -> None:
    def names(model: nn.Module, units: Any = None) -> list[str]:
        return [name for name, _ in choose_units(model, units) if not name.startswith("blocks.")]

    assert names(Language("module")) == ["", "tokens", "head"]
    assert names(Language("module"), acc.only_blocks()) == [""]
    tied = Language("module")
    tied.head.weight = tied.tokens.weight
    assert names(tied) == [""]
    twice = Language("module")
    twice.also = twice.tokens
    assert names(twice) == ["", "head"]
    small = Language("module")
    small.head = nn.Linear(WIDTH, 8)
    assert names(small) == ["", "tokens"]
    assert names(nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB))) == [""]
