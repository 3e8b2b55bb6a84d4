"""Weights that several modules share: one parameter in training, in state dicts, in checkpoints and under any init."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accordion as acc
from tests.devices import device, here
from tests.support.checks import assert_equal
from tests.support.compare import (
    Case,
    Pair,
    check_step,
    compare,
    rest,
    seed_of,
    seeded,
)
from tests.support.ranked import on_worlds
from tests.support.reference import params_of
from tests.support.sample import sampled


class Stack(nn.Module):
    """Embedding, two blocks, head; which weights are one says `tie`."""

    def __init__(self, tie: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 7)
        self.blocks = nn.ModuleList(Pair() for _ in range(2))
        self.head = nn.Linear(7, 9, bias=False)
        one, two = self.blocks
        if tie == "within a unit":
            one.b.weight = one.a.weight
        elif tie == "across sibling units":
            two.a.weight = one.b.weight
            two.a.bias = one.b.bias
        elif tie == "between root and a unit":
            self.lift = nn.Linear(7, 7, bias=False)
            self.lift.weight = two.a.weight
        elif tie == "two parameters over one storage":
            self.head.weight = nn.Parameter(self.embed.weight.data)
        elif tie == "a whole module":
            two.b = one.b
        self.tie = tie

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.tie == "between root and a unit":
            x = x + self.lift(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MERGED = {  # the names of what is one parameter
    "within a unit": [{"blocks.0.a.weight", "blocks.0.b.weight"}],
    "across sibling units": [{"blocks.0.b.weight", "blocks.1.a.weight"}, {"blocks.0.b.bias", "blocks.1.a.bias"}],
    "between root and a unit": [{"lift.weight", "blocks.1.a.weight"}],
    "two parameters over one storage": [{"embed.weight", "head.weight"}],
}
IN_MODULES = [tie for tie in MERGED if tie != "two parameters over one storage"]


def stack_loss(model: nn.Module, step: int = 0) -> Tensor:
    tokens, targets = torch.randint(9, (2, 4), device=device()), torch.randint(9, (8,), device=device())
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets)
    loss.backward()
    return loss.detach()


def tied(tie: str) -> nn.Module:
    """Return the unsharded model: without sharding, two parameters over one storage are two, with a gradient each."""
    if tie != "two parameters over one storage":
        return Stack(tie)
    model = Stack()
    model.head.weight = model.embed.weight
    return model


@pytest.mark.parametrize("tie", MERGED)
@on_worlds
def test_tied_weights_train_as_one(mesh, tie: str) -> None:
    build, reference = functools.partial(Stack, tie), functools.partial(tied, tie)
    case = Case(
        build=build,
        run=stack_loss,
        reference=reference,
        units={Pair},
        exact=tie == "two parameters over one storage",
        tolerance=2e-6,
    )
    model = compare(mesh, case)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference().named_parameters()]


@pytest.mark.parametrize("tie", sampled(IN_MODULES, "across sibling units".__eq__))
@on_worlds
def test_tied_weights_of_a_model_on_meta_are_loaded_and_initialised(mesh, tie: str) -> None:
    for how in ("load_state_dict", "initialise"):
        with torch.device("meta"):
            model = Stack(tie)
        model = acc.shard(model, mesh=mesh, units={Pair})
        plain = here(Stack(tie))
        torch.manual_seed(5)
        with torch.no_grad():
            plain.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
        if how == "load_state_dict":
            assert not any(model.load_state_dict(plain.state_dict()))
        else:
            torch.manual_seed(5)
            acc.initialise(model)
        assert_equal(params_of(model), dict(plain.named_parameters()))
        check_step(mesh, model, plain, stack_loss, exact=False)
        rest(model)


@pytest.mark.parametrize(
    "tie", sampled(MERGED, {"across sibling units", "two parameters over one storage"}.__contains__)
)
@on_worlds
def test_tied_weights_in_full_state_dict_save_and_load(mesh, tie: str, tmp_path: Path) -> None:
    plain = seeded(functools.partial(Stack, tie), 1)
    torch.manual_seed(1)
    model = acc.shard(Stack(tie), mesh=mesh, units={Pair})  # not moved before: that parts what lies in one storage
    state = acc.full_state_dict(model, rank0_only=False)
    assert list(state) == list(plain.state_dict())
    assert_equal(state, plain.state_dict())
    for names in MERGED[tie]:
        assert len({state[n].data_ptr() for n in names}) == 1, "tied names are one tensor"
    optimizer = torch.optim.AdamW(model.parameters())
    stack_loss(model)
    optimizer.step()
    acc.save(tmp_path / "checkpoint", model, optimizer)
    other = acc.shard(Stack(tie), mesh=mesh, units={Pair})
    others_optimizer = torch.optim.AdamW(other.parameters())
    acc.load(tmp_path / "checkpoint", other, others_optimizer)
    assert_equal(params_of(other), params_of(model))
    losses = []
    for m, o in ((model, optimizer), (other, others_optimizer)):
        for step in (3, 4):
            o.zero_grad()
            torch.manual_seed(seed_of(step))
            losses.append(stack_loss(m).item())
            o.step()
    assert losses[:2] == losses[2:]
    untied = seeded(Stack, 3)  # an unsharded model without ties takes the full state dict as well
    untied.load_state_dict({n: t for n, t in state.items() if n != "lift.weight"})
