"""Selective recomputation: which results are kept, and that gradients stay those of a model that keeps everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import accordion as acc
from accordion.shard.activations import ATTENTION, PRODUCTS, _Choice
from tests.support import models, programs
from tests.support.chains import mean_square, numbers
from tests.support.checks import assert_at_rest, one_loss
from tests.support.compare import check_step, seeded
from tests.support.meters import Wire
from tests.support.programs import Node, Program
from tests.support.ranked import on_world
from tests.support.sample import sampled

WIDTH = 8


class Chunks(nn.Module):
    """Writes into its product through views with version counters of their own, as torch's native cells do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():  # autograd would forbid the write where it saves the result
            gate, value = self.lin(x).unsafe_chunk(2, -1)
            gate.sigmoid_()
        return x * (gate * value) + self.lin(x)[..., :WIDTH]


WRITES: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: nn.GRU(WIDTH, WIDTH, num_layers=2),
    "rnn_cell": lambda: nn.RNNCell(WIDTH, WIDTH),
    "relu_in_place": lambda: nn.Sequential(
        *(m for _ in range(2) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)))
    ),
    "chunks": Chunks,
}


class Writer(nn.Module):
    """A unit with products that are written into, between products that are not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(WIDTH, WIDTH), WRITES[kind](), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(torch.tanh(self.before(x)))
        return self.after(torch.tanh(y if isinstance(y, Tensor) else y[0]))


@pytest.mark.parametrize("kind", WRITES)
@on_world(2)
def test_products_that_are_written_into_are_computed_again(mesh, kind: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(Writer(kind), Writer(kind))

    model = acc.shard(seeded(build), mesh, units={Writer}, checkpoint_activations="selective")
    for step in range(2):
        check_step(mesh, model, seeded(build), lambda m, step: mean_square(m(numbers(5, WIDTH))), step)


NESTED = Node(
    kind="seq", unit="self", keeps=True, kids=(Node(kind="lookup", unit="self"), Node(kind="pair", unit="both"))
)


@pytest.mark.parametrize("packed_bytes", [programs.layout.PACK_LIMIT_BYTES, 100])
@pytest.mark.parametrize("strategy", sampled(["full_shard", "shard_grad_op", "shard_optim"], "full_shard".__eq__))
def test_units_inside_may_gather_more_or_less_often_than_in_the_forward(world, strategy, packed_bytes):
    """`packed_bytes=100`: the table inside travels by itself, so that its unit has two gathers of one kind."""
    program = Program(
        tree=NESTED, width=5, strategy=strategy, checkpoint="selective", set_to_none=False, packed_bytes=packed_bytes
    )
    programs.run(program, world)


@on_world(2)
def test_a_graph_may_be_walked_twice(mesh) -> None:
    """What is kept is given once; the second walk computes it."""
    plain, model = models.plain(), acc.shard(models.plain(), mesh, checkpoint_activations="selective")

    def run(m: nn.Module, step: int) -> Tensor:
        loss = one_loss(m, step)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    check_step(mesh, model, plain, run, exact=False, tolerance=2e-6)
    assert_at_rest(model)


@on_world(1)
def test_every_other_product_is_kept(mesh) -> None:
    """Count matrix products in a backward. Of a block's two the first is kept. The second is the last thing it does: nothing
    needs it again."""
    counts = {}
    for mode in ("none", "selective", "full"):
        model = acc.shard(models.plain(), mesh, checkpoint_activations=mode)
        loss = one_loss(model)
        with Wire() as wire:
            loss.backward()
        counts[mode] = sum(wire.seen[op._schema.name] for op in PRODUCTS)
    assert counts["none"] == counts["selective"] < counts["full"]


class Dropping(nn.Module):
    """A unit that is called by keyword alone, as transformers call their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x: Tensor) -> Tensor:  # (batch, seq, WIDTH)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if self.training else 0.0)
        return x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.5, self.training)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Dropping() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x=x)
        return x


@pytest.mark.parametrize(("how", "training"), [("selective", False), ("selective", True), ("full", True)])
@on_world(2)
def test_attention_and_what_drops(mesh, how: str, training: bool) -> None:
    plain, model = (seeded(Named).train(training) for _ in range(2))
    model = acc.shard(model, mesh, units={Dropping}, checkpoint_activations=how)
    check_step(mesh, model, plain, lambda m, step: mean_square(m(numbers(2, 4, WIDTH))))


def test_attention_is_kept_where_it_draws_no_random_numbers() -> None:
    """Kept results draw none in the recomputation, so that later dropout would be another: only devices fuse dropout."""
    q = torch.zeros(1)
    for op in ATTENTION:
        arguments = {a.name: a for a in op._schema.arguments}
        for rate in (0.0, 0.1):
            given: list[Any] = []
            for name, argument in arguments.items():
                if not argument.kwarg_only:
                    given.append(rate if name == "dropout_p" else argument.default_value or q)
            assert _Choice()(op, given, {}) is (rate == 0.0), op
            assert _Choice()(op, [q] * 3, {"dropout_p": rate, "scale": 0.125}) is (rate == 0.0), op


@pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf.*")
@on_world(1)
def test_compiled_units_and_parts_of_units(mesh) -> None:
    """Both ways around: a part of a unit is compiled, and a recomputed unit is."""
    plain = models.plain()
    model = acc.shard(models.plain(), mesh, checkpoint_activations="selective")
    model.blocks[0].up.compile(backend="aot_eager")
    model.blocks[1].compile(backend="aot_eager")
    check_step(mesh, model, plain, lambda m, step: one_loss(m).backward(), exact=False, tolerance=3e-6)


class Recomputed(nn.Module):
    """Its blocks are recomputed from outside of their hooks, as transformers' layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block(WIDTH, 12) for _ in range(3))
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return x


@on_world(2)
def test_what_trains_is_asked_again_where_a_unit_is_recomputed(mesh) -> None:
    """DPO with adapters: between the forward and its backward another one runs, in which nothing trains."""
    model, plain = acc.shard(seeded(Recomputed), mesh=mesh, units={models.Block}), seeded(Recomputed)

    def run(m: nn.Module, step: int) -> Tensor:
        x = numbers(4, WIDTH)
        out = m(x)
        m.blocks.requires_grad_(False)
        with torch.no_grad():
            reference = m(x)
        m.blocks.requires_grad_()
        return mean_square(out - 0.5 * reference)

    for step in range(2):
        check_step(mesh, model, plain, run, step)
        assert_at_rest(model)
