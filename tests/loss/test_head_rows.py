"""`linear_cross_entropy(..., head_rows=True)` equals the loss with the whole head; no rank has the head or its gradient."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from accordion import head_rows
from accordion.engine.communicator import Communicator, reduced
from accordion.engine.hooks import hooks_of
from accordion.engine.layout import Cut, Slice
from tests import devices
from tests.loss.test_linear_cross_entropy import FEATURES, FORMS, WORDS, Language, plain, tokens_of
from tests.support.ranked import on_num_ranks, on_world, under_strategies

UNITS = {nn.Sequential, nn.Linear}


def rows_loss(model: nn.Module, tokens: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Return the loss with at most 12 rows of the head at a time. The size of slices is not changed back on the rank."""
    head_rows.SLICE_BYTES = 12 * FEATURES * 4
    loss = acc.linear_cross_entropy(model(tokens), model.head, labels, chunk_tokens=5, head_rows=True, **options)
    (hooks,) = hooks_of(model.head)
    assert hooks.engine.context.keeps_full or not hooks.unit.is_unsharded, "nobody gathers the whole head"
    return loss


def test_slices_have_each_row_once_also_if_ranks_have_few_or_none() -> None:
    for rows, num_ranks, height in ((37, 4, 3), (5, 4, 1), (5, 4, 2), (8, 2, 4), (7, 1, 3)):
        cut = Cut((rows, 2), 0, num_ranks)
        labels, seen = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
        for start in range(0, cut.chunk, height):
            part = Slice(cut, start, min(start + height, cut.chunk))
            targets = head_rows.targets_in(part, labels, -100)
            seen += targets.present
            assert sorted(targets.columns[targets.present].tolist()) == list(range(part.num_rows)), "padding comes last"
        assert seen.eq(1).all()


def check_training(mesh: Any, form: str, **sharding: Any) -> None:
    """Two steps of two micro-batches, the first under no_sync, as the unsharded model on the tokens of all ranks."""
    model, expected = (Language(False).to(devices.device()) for _ in range(2))
    acc.shard(model, mesh, units=UNITS, **sharding)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, expected)]
    group = [Communicator(mesh.get_group(i), devices.device()) for i in range(mesh.ndim)]
    for step in range(2):
        for micro in range(2):
            batches = [tokens_of(8 * step + 4 * micro + rank) for rank in range(mesh.size())]
            with acc.no_sync(model) if micro == 0 else nullcontext():
                loss = rows_loss(model, *batches[mesh.get_rank()], over_ranks=True, **FORMS[form])
                loss.backward()
            tokens, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
            whole = plain(expected(tokens).flatten(0, 1), expected.head, labels.flatten(), **FORMS[form])
            whole.backward()
            torch.testing.assert_close(reduced(loss.detach().clone(), group) / mesh.size(), whole.detach())
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("form", ["plain", "all"])
@under_strategies("full_shard", "hybrid_shard", but=("hybrid_shard_optim",))
def test_it_trains_as_the_unsharded_model(mesh: Any, strategy: acc.Strategy, form: str) -> None:
    check_training(mesh, form, strategy=strategy)


@pytest.mark.parametrize("num_ranks", [3, 4])
@on_num_ranks
def test_it_trains_on_ranks_with_fewer_rows(mesh: Any) -> None:
    check_training(mesh, "all", debug="streams")
