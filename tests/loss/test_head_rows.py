"""`linear_cross_entropy(..., head_rows=True)` equals the loss with the whole head; no rank has the head or its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import accordion as acc
from accordion.bench.meters import Wire
from accordion.engine.hooks import hooks_of
from accordion.engine.layout import Cut, Slice
from accordion.losses import head_rows
from accordion.observe.allocations import Allocations
from accordion.plan.replay.peak import peak_of
from tests import devices
from tests.loss.test_linear_cross_entropy import FORMS, Language, check_training, tokens_of
from tests.support.checks import mesh_of
from tests.support.ranked import on_mesh, on_world, under_strategies

UNITS = {nn.Sequential, nn.Linear}


def rows_loss(model: nn.Module, tokens: Tensor, labels: Tensor, **options: Any) -> Tensor:
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


@pytest.mark.parametrize("form", ["plain", "all"])
@under_strategies("full_shard", "hybrid_shard", but=("hybrid_shard_optim",))
def test_it_trains_as_the_unsharded_model(mesh: Any, strategy: acc.Strategy, form: str) -> None:
    check_training(mesh, form, rows_loss, 2, units=UNITS, strategy=strategy)


@on_world(3)
def test_it_trains_on_ranks_with_fewer_rows(mesh: Any) -> None:
    check_training(mesh, "all", rows_loss, 2, units=UNITS, debug="streams")


@on_world(2)
def test_gradients_arrive_as_those_of_the_whole_head(mesh: Any) -> None:
    """In bf16 with float32 masters: dtypes, hooks, `autograd.grad`, each reduction, shifted labels, and a frozen head."""
    precision = acc.Precision(params=torch.bfloat16)
    models = [acc.shard(Language(False).to(devices.device()), mesh, units=UNITS, precision=precision) for _ in range(2)]
    tokens, labels = tokens_of(mesh.get_rank())
    called = []
    models[1].head.weight.register_post_accumulate_grad_hook(called.append)
    for reduction in ("mean", "sum", "none"):
        grads, losses = [], []
        for model, rows in zip(models, (False, True), strict=True):
            options = {"reduction": reduction, "shift": True, "chunk_tokens": 4, "head_rows": rows, **FORMS["all"]}
            losses.append(acc.linear_cross_entropy(model(tokens), model.head, labels, **options))
            losses[-1].sum().backward()
            again = acc.linear_cross_entropy(model(tokens), model.head, labels, **options).sum()
            grads.append([p.grad.full_tensor() for p in model.parameters()])
            grads[-1] += [g.full_tensor() for g in torch.autograd.grad(again, list(model.head.parameters()))]
            model.zero_grad()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grads[1], grads[0], rtol=2e-2, atol=2e-2 * float(grads[0][0].abs().max() + 0.1))
    assert len(called) == 3
    models[1].head.requires_grad_(False)
    rows_loss(models[1], tokens, labels).backward()
    assert models[1].head.weight.grad is None
    assert models[1].embed.weight.grad is not None


REFUSED = {
    "it shares a unit with other modules": {"units": {nn.Sequential}},
    "tied head": {"tied": True},
    "its parameters are offloaded": {"offload": acc.Offload(params="host", optimizer="host")},
    "over both axes of the mesh": {"strategy": acc.HYBRID_SHARD_OPTIM},
}


@pytest.mark.parametrize("why", REFUSED)
@on_mesh(lambda arguments: mesh_of(REFUSED[arguments["why"]].get("strategy", acc.FULL_SHARD), 2))
def test_heads_that_cannot_be_gathered_by_rows_are_refused(mesh: Any, why: str) -> None:
    options = {"units": UNITS, **REFUSED[why]}
    model = acc.shard(Language(options.pop("tied", False)).to(devices.device()), mesh, **options)
    tokens, labels = tokens_of(mesh.get_rank())
    with pytest.raises(acc.UsageError, match=f"{why}.*leave out head_rows"):
        rows_loss(model, tokens, labels)


@on_world(2)
def test_a_step_between_forward_and_backward_is_refused(mesh: Any) -> None:
    model = acc.shard(Language(False).to(devices.device()), mesh, units=UNITS)
    loss = rows_loss(model, *tokens_of(mesh.get_rank()))
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(acc.UsageError, match="changed between this forward and its backward"):
        loss.backward()
    rows_loss(model, *tokens_of(mesh.get_rank())).backward()


@on_world(2)
def test_bytes_sent_are_three_times_the_rows_and_no_rank_has_the_head(mesh: Any) -> None:
    """The rows are gathered in forward and backward, and their gradient is reduced: (n - 1) / n of the head each time."""
    words, width = 4096, 64
    torch.manual_seed(0)
    head, device = nn.Linear(width, words, bias=False, device=devices.device()), devices.device()
    model = acc.shard(nn.Sequential(nn.Linear(width, width, device=device), head), mesh, units={nn.Linear})
    x, labels = torch.randn(8, width, device=device), torch.randint(words, (8,), device=device)
    peaks, sent, whole = [], [], words * width * 4
    for rows in (False, True):
        model.zero_grad()
        with Allocations() as memory, Wire() as wire:
            hidden = model[0](x)
            memory.mark("begin")
            acc.linear_cross_entropy(hidden, head, labels, head_rows=rows).backward()
            memory.mark("end")
        peaks.append((memory.peak("begin", "end") - memory.live("begin")) / whole)
        sent.append((sum(wire.num_bytes.values()) - 3 * (width + 1) * width * 4 // 2) / whole)
    assert sent == pytest.approx([1.0, 1.5], rel=0.03)
    # Half a head is this rank's gradient, which stays. The rest are two slices of an eighth, and gradients on their way.
    assert peaks[0] > 1.9 > 1.6 > peaks[1], peaks


def test_the_peak_is_a_tenth_of_that_of_the_plain_loss() -> None:
    """At 8,192 tokens and 128,256 words on eight ranks, beside what is held between steps: planned, with fake tensors."""
    peaks = {}
    for name in ("plain", "head_rows"):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 128256, bias=False))
            batch = torch.empty(8192, 4096), torch.empty(8192, dtype=torch.int64)

        def loss(model: Any, batch: Any, name: str = name) -> Tensor:
            if name == "plain":
                return F.cross_entropy(model(batch[0]).float(), batch[1])
            return acc.linear_cross_entropy(model[0](batch[0]), model[1], batch[1], head_rows=True)

        sharding = acc.Sharding(units=[nn.Linear], precision=acc.Precision(params=torch.bfloat16))
        plan = acc.plan(acc.Workload(model, loss, batch), acc.Cluster(gpus=8), sharding)
        peak = peak_of(plan.log)
        peaks[name] = peak.num_bytes - peak.held_bytes
    assert peaks["head_rows"] < 0.1 * peaks["plain"]
