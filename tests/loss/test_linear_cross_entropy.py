"""`linear_cross_entropy` equals the plain loss, on sharded models and without one, also if no rank gathers the whole head."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import accordion as acc
from accordion.bench.meters import Wire
from accordion.engine.communicator import Communicator, reduced
from accordion.engine.hooks import hooks_of
from accordion.engine.layout import Cut, Slice
from accordion.losses import head_rows
from accordion.losses.chunks import _pass
from accordion.losses.token_loss import TokenLoss
from accordion.observe.allocations import Allocations
from accordion.plan.replay.peak import peak_of
from tests import devices
from tests.support.checks import mesh_of, step_all
from tests.support.ranked import on_mesh, on_world, under_strategies
from tests.support.reference import grads_of, params_of
from tests.support.sample import sampled

TOKENS, FEATURES, WORDS = 22, 6, 37
FORMS = {
    "plain": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "soft_cap": {"soft_cap": 1.5},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-2, "soft_cap": 2.0},
}


def plain(hidden: Tensor, head: nn.Linear, labels: Tensor, reduction: str = "mean", **form: float) -> Tensor:
    """Return the loss with all logits in memory, written out with torch's functions."""
    logits = head(hidden).float()
    if "soft_cap" in form:
        logits = form["soft_cap"] * torch.tanh(logits / form["soft_cap"])
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=form.get("label_smoothing", 0.0))
    losses = losses + form.get("z_loss", 0.0) * torch.logsumexp(logits, 1).square() * (labels != -100)
    if reduction == "none":
        return losses
    return losses.sum() / (1 if reduction == "sum" else (labels != -100).sum())


def batch(seed: int = 0, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Return hidden states (tokens, FEATURES) and labels (tokens,), some of which are ignored."""
    torch.manual_seed(seed)
    labels = torch.randint(WORDS, (tokens,))
    labels[:: 5 + seed] = -100
    return torch.randn(tokens, FEATURES), labels


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_it_equals_the_plain_loss_without_a_sharded_model(form: str, reduction: str, bias: bool) -> None:
    torch.manual_seed(1)
    head, (hidden, labels) = nn.Linear(FEATURES, WORDS, bias=bias), batch()
    results = []
    for loss in (plain, acc.linear_cross_entropy):
        hidden, head = hidden.detach().requires_grad_(), head.requires_grad_()
        head.zero_grad()
        options = {"chunk_tokens": 4} if loss is not plain else {}
        value = loss(hidden, head, labels, reduction=reduction, **FORMS[form], **options)
        (value * torch.linspace(1, 2, value.numel()).view_as(value)).sum().backward()
        results.append([value, hidden.grad, *(p.grad for p in head.parameters())])
    for expected, value in zip(*results, strict=True):
        torch.testing.assert_close(value, expected)


def test_own_chunks_equal_torchs_function() -> None:
    """The installed torch computes a plain loss; versions before 2.13 have no such function and take our chunks."""
    hidden, labels = batch()
    weight, loss = torch.randn(WORDS, FEATURES), TokenLoss(-100, 0.0, 0.0, None, 4)
    losses, grads = _pass((hidden, weight, None, labels), loss, torch.ones(TOKENS), (True, True, False))
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    F.cross_entropy(F.linear(*leaves), labels, reduction="sum").backward()
    torch.testing.assert_close(losses, F.cross_entropy(F.linear(hidden, weight), labels, reduction="none"))
    torch.testing.assert_close(grads[:2], [leaf.grad for leaf in leaves])


class Language(nn.Module):
    """Embedding, two layers and a head, tied to the embedding or not; returns hidden states, or the loss if given labels."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(WORDS, FEATURES)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU()) for _ in range(2)])
        self.head = nn.Linear(FEATURES, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None, **form: float) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden if labels is None else acc.linear_cross_entropy(hidden, self.head, labels, chunk_tokens=4, **form)


def tokens_of(rank: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of one rank, with another number of labels on each rank; rank 1 of more has none."""
    torch.manual_seed(10 + rank)
    tokens, labels = torch.randint(WORDS, (2, 9)), torch.randint(WORDS, (2, 9))
    labels[:, rank + 1 :: 3 + rank] = -100
    return tokens.to(devices.device()), labels.to(devices.device())


HEAD_UNIT = {nn.Sequential, nn.Linear}
UNITS = {"head is a unit": HEAD_UNIT, "head is in the root": {nn.Sequential}}


ROWS = list(itertools.product(("plain", "all"), UNITS, (False, True), (False, True)))
SHOWN = [ROWS[i] for i in (0, 3, 5, 9, 14)]  # each value of a parameter with each value of every other one


@pytest.mark.parametrize(("form", "units", "inside", "tied"), sampled(ROWS, lambda *row: row in SHOWN))
@under_strategies("full_shard", "hybrid_shard")
def test_it_trains_as_the_unsharded_model(
    mesh, strategy: acc.Strategy, form: str, units: str, inside: bool, tied: bool
) -> None:
    """The head is inside of the model's forward, or after it."""

    def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor, **options: Any) -> Tensor:
        if inside:
            return model(tokens, labels, **options)
        return acc.linear_cross_entropy(model(tokens), model.head, labels, chunk_tokens=4, **options)

    check_training(mesh, form, loss_of, 1, tied=tied, strategy=strategy, units=UNITS[units])


def check_training(mesh: Any, form: str, loss_of: Any, num_micros: int, *, tied: bool = False, **sharding: Any) -> None:
    """Train as the unsharded model on the tokens of all ranks. A step has `num_micros` backwards, all but the last in no_sync."""
    model, expected = (Language(tied).to(devices.device()) for _ in range(2))
    acc.shard(model, mesh, **sharding)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, expected)]
    group = [Communicator(mesh.get_group(i), devices.device()) for i in range(mesh.ndim)]
    for step in range(3):
        for micro in range(num_micros):
            batches = [tokens_of(8 * step + 4 * micro + rank) for rank in range(mesh.size())]
            with acc.no_sync(model) if micro < num_micros - 1 else nullcontext():
                loss = loss_of(model, *batches[mesh.get_rank()], over_ranks=True, **FORMS[form])
                loss.backward()
            tokens, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
            whole = plain(expected(tokens).flatten(0, 1), expected.head, labels.flatten(), **FORMS[form])
            whole.backward()
            torch.testing.assert_close(reduced(loss.detach().clone(), group) / mesh.size(), whole.detach())
        torch.testing.assert_close(grads_of(model), {name: p.grad for name, p in expected.named_parameters()})
        step_all(optimizers)
    torch.testing.assert_close(params_of(model), {name: p.detach() for name, p in expected.named_parameters()})


@on_world(2)
def test_a_rank_without_any_label_has_no_loss_and_does_not_hang_the_others(mesh) -> None:
    model = acc.shard(Language(False).to(devices.device()), mesh, units=UNITS["head is in the root"])
    tokens, labels = tokens_of(0)
    if mesh.get_rank() == 1:
        labels.fill_(-100)
    loss = model(tokens, labels)
    loss.backward()
    assert (float(loss.detach()) == 0.0) == (mesh.get_rank() == 1)
    assert all(bool(p.grad.full_tensor().isfinite().all()) for p in model.parameters())


def test_labels_are_shifted_on_request() -> None:
    head, (hidden, labels) = nn.Linear(FEATURES, WORDS), batch()
    hidden, labels = hidden.view(2, 11, FEATURES), labels.view(2, 11)
    expected = plain(hidden[:, :-1].flatten(0, 1), head, labels[:, 1:].flatten())
    torch.testing.assert_close(acc.linear_cross_entropy(hidden, head, labels, shift=True), expected)


def test_a_second_backward_is_refused_in_one_sentence() -> None:
    head, (hidden, labels) = nn.Linear(FEATURES, WORDS), batch()
    loss = acc.linear_cross_entropy(hidden, head, labels, z_loss=0.1)
    loss.backward(retain_graph=True)
    with pytest.raises(acc.UsageError, match="call the function again for each backward"):
        loss.backward()


HEAD = nn.Linear(FEATURES, WORDS)
REFUSED = {
    "takes a head that is an nn.Linear, not Embedding": {"head": nn.Embedding(WORDS, FEATURES)},
    "pass 'mean', 'sum' or 'none'": {"reduction": "avg"},
    "one int64 label for each of its rows": {"labels": torch.zeros(TOKENS - 1, dtype=torch.int64)},
    "int32 labels": {"labels": torch.zeros(TOKENS, dtype=torch.int32)},
    r"pass hidden \(..., 6\)": {"hidden": torch.randn(TOKENS, FEATURES + 1)},
    "label 37 is outside of the head's vocabulary of 37": {"labels": torch.full((TOKENS,), WORDS)},
    "label -1 is outside": {"labels": torch.full((TOKENS,), -1)},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_wrong_arguments_are_refused(sentence: str) -> None:
    hidden, labels = batch()
    arguments = {"hidden": hidden, "head": HEAD, "labels": labels, **REFUSED[sentence]}
    with pytest.raises(acc.UsageError, match=sentence):
        acc.linear_cross_entropy(**arguments)


# -- head_rows: no rank has the whole head or its gradient


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
def test_a_head_gathered_by_rows_trains_as_the_unsharded_model(mesh: Any, strategy: acc.Strategy, form: str) -> None:
    check_training(mesh, form, rows_loss, 2, units=HEAD_UNIT, strategy=strategy)


@on_world(3)
def test_a_head_gathered_by_rows_trains_on_ranks_with_fewer_rows(mesh: Any) -> None:
    check_training(mesh, "all", rows_loss, 2, units=HEAD_UNIT, debug="streams")


@on_world(2)
def test_gradients_arrive_as_those_of_the_whole_head(mesh: Any) -> None:
    """In bf16 with float32 masters: dtypes, hooks, `autograd.grad`, each reduction, shifted labels, and a frozen head."""
    precision = acc.Precision(params=torch.bfloat16)
    models = [
        acc.shard(Language(False).to(devices.device()), mesh, units=HEAD_UNIT, precision=precision) for _ in range(2)
    ]
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


HEADS_REFUSED = {
    "it shares a unit with other modules": {"units": UNITS["head is in the root"]},
    "tied head": {"tied": True},
    "its parameters are offloaded": {"offload": acc.Offload(params="host", optimizer="host")},
    "over both axes of the mesh": {"strategy": acc.HYBRID_SHARD_OPTIM},
}


@pytest.mark.parametrize("why", HEADS_REFUSED)
@on_mesh(lambda arguments: mesh_of(HEADS_REFUSED[arguments["why"]].get("strategy", acc.FULL_SHARD), 2))
def test_heads_that_cannot_be_gathered_by_rows_are_refused(mesh: Any, why: str) -> None:
    options = {"units": HEAD_UNIT, **HEADS_REFUSED[why]}
    model = acc.shard(Language(options.pop("tied", False)).to(devices.device()), mesh, **options)
    tokens, labels = tokens_of(mesh.get_rank())
    with pytest.raises(acc.UsageError, match=f"{why}.*leave out head_rows"):
        rows_loss(model, tokens, labels)


@on_world(2)
def test_a_step_between_forward_and_backward_is_refused(mesh: Any) -> None:
    model = acc.shard(Language(False).to(devices.device()), mesh, units=HEAD_UNIT)
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
