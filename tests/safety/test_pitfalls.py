"""Complaints of users of other engines that no other test covers; the numbers are those of a collection of complaints."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import accordion as acc
from accordion.engine.engine import Engine
from accordion.engine.unit import Unit
from tests.devices import device, here
from tests.support import models
from tests.support.checks import assert_at_rest, assert_close, batch, one_loss
from tests.support.meters import Wire
from tests.support.ranked import on_world, under_strategies


@on_world(2)
def test_16_trace_invalidation_turns_prefetch_off(mesh) -> None:
    """A skipped unit, and one that is called again, is one wrong guess each; the rest of the forward is prefetched."""
    model = acc.shard(models.seeded(num_blocks=5), mesh=mesh)
    plain, late = Engine.acquire, set()

    def acquire(engine: Engine, unit: Unit) -> int:
        if unit.name and not unit.is_unsharded:
            late.add(unit.name)
        return plain(engine, unit)

    units = []  # of each forward, those that were not prefetched
    for skip in ((), (), (1,), (), ()):
        tokens, targets = batch(model)
        late.clear()
        with mock.patch.object(Engine, "acquire", acquire):
            out = model(tokens, skip=skip)
        units.append(set(late))
        models.loss_of(out, targets).backward()
    unknown = {f"blocks.{i}" for i in range(5)}  # nothing is known before the first forward
    assert units == [unknown, set(), {"blocks.2"}, {"blocks.1"}, set()]


@under_strategies("no_shard", "hybrid_shard", "hybrid_shard_optim", num_ranks=3)
def test_20_clip_grad_norm_gathers_or_is_wrong(mesh, strategy: acc.Strategy) -> None:
    """One number travels over each axis that rows are cut over; tests/shard/test_api.py compares the norm itself."""
    model = acc.shard(models.uneven(), mesh=mesh, strategy=strategy)
    one_loss(model).backward()
    with Wire() as wire:
        acc.clip_grad_norm_(model, 1e-3)
    assert all(call.kind == "all_reduce" and call.num_bytes <= 8 for call in wire.calls), "one number at a time"
    assert len(wire.calls) == {"no_shard": 0, "hybrid_shard_optim": 2}.get(strategy.name, 1)


@on_world(3)
def test_25_generate_is_slow_or_hangs(mesh) -> None:
    """Ranks generate sequences of different lengths from full weights without communication."""
    plain, model = models.plain(), acc.shard(models.plain(), mesh=mesh)
    found = []
    for m in (plain, model):
        tokens = torch.tensor([[1 + mesh.get_local_rank()]], device=device())
        with torch.no_grad(), acc.full_params(model), Wire() as wire:
            for _ in range(2 + 3 * mesh.get_local_rank()):
                tokens = torch.cat([tokens, m(tokens)[:, -1:].argmax(-1)], 1)
        assert not wire.calls
        found.append(tokens)
    assert torch.equal(*found)
    one_loss(model).backward()
    assert_at_rest(model)


@on_world(2)
def test_flattening_uneven_rows_raises_with_advice(mesh) -> None:
    model = acc.shard(here(nn.Linear(5, 3)), mesh=mesh)
    for change in (Tensor.flatten, lambda t: t.reshape(15), lambda t: parameters_to_vector(model.parameters())):
        with pytest.raises(
            acc.UsageError, match=r"sharded tensor of shape \(3, 5\).*do not divide.*full_params\(model\)"
        ):
            change(model.weight)
    with pytest.raises(RuntimeError, match="invalid for input of size 15"):
        model.weight.view(7)
    before = acc.full_state_dict(model, rank0_only=False)
    with acc.full_params(model, write=True):
        vector_to_parameters(parameters_to_vector(model.parameters()) / 2, model.parameters())
    assert_close(acc.full_state_dict(model, rank0_only=False), {name: value / 2 for name, value in before.items()})


@on_world(2)
def test_a_loss_on_weights_is_refused_or_has_the_right_gradients_if_written_as_errors_md_says(mesh) -> None:
    plain, model = models.plain(), acc.shard(models.plain(), mesh=mesh)
    tokens = torch.arange(6, device=device()).view(2, 3)
    with pytest.raises(acc.UsageError, match="an output of the sharded model is a DTensor"):
        (model(tokens).mean() + sum(p.pow(2).sum() for p in model.parameters())).backward()
    model.zero_grad()
    for m in (plain, model):
        term = m.head.weight.pow(2).sum()
        (m(tokens).mean() + (term.full_tensor() if m is model else term)).backward()
    assert plain.head.weight.grad is not None
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), plain.head.weight.grad)
