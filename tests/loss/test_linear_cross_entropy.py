"""`linear_cross_entropy` equals the plain loss, on sharded models and without one."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import accordion as acc
from accordion.engine.communicator import Communicator, reduced
from accordion.losses.chunks import _pass
from accordion.losses.token_loss import TokenLoss
from tests import devices
from tests.support.checks import step_all
from tests.support.ranked import on_world, under_strategies
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


UNITS = {"head is a unit": [nn.Sequential, nn.Linear], "head is in the root": [nn.Sequential]}


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

    check_training(mesh, form, loss_of, 1, tied=tied, strategy=strategy, units=set(UNITS[units]))


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
    model = acc.shard(Language(False).to(devices.device()), mesh, units={nn.Sequential})
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
