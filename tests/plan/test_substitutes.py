"""Bytes that operators save for the backward: computed by hand for CUDA, and compared with traces for CUDA and CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout, layer_norm

import accordion as acc
from accordion.plan.events import Alloc, Category, Enter, Free, Op, StepPhase
from accordion.plan.replay.peak import peak_of
from accordion.plan.trace.setup import Subject, TrainingSetup
from accordion.plan.trace.substitutes import Substitutes
from accordion.plan.trace.trace import trace

HALF, FULL = torch.bfloat16, torch.float32
BATCH, HEADS, SEQ, HEAD = 2, 4, 100, 64
ROWS = BATCH * HEADS * SEQ
X = ROWS * HEAD  # elements of the input
RNG = 2 * 8 + 8  # FlashAttention-2: seed and offset, and one number that it does not use
VOCAB = 640


class Scaled(nn.Module):
    """Adds a parameter to the input of an operator, so that the operator has a backward, and returns its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift, self.weight = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.shift, self.weight


@dataclass(frozen=True, kw_only=True)
class Case:
    """An operator and the bytes that it saves on CUDA."""

    of: Callable[[Tensor, Tensor], Tensor]  # (input, weight) -> output of the operator
    by_hand: int  # bytes
    dtype: torch.dtype = HALF
    shape: tuple[int, ...] = (BATCH, HEADS, SEQ, HEAD)
    as_on_cpu: bool = False  # the CPU saves as many bytes


def attends(**options: object) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, weight: F.scaled_dot_product_attention(x, x, x, **options)


def masked(x: Tensor, weight: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(SEQ, SEQ, dtype=torch.bool))


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    """Attention with half as many key heads as query heads."""
    return F.scaled_dot_product_attention(x, x[:, ::2], x[:, ::2], is_causal=True, enable_gqa=True)


def classified(x: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), torch.zeros(ROWS, dtype=torch.long))


ROUNDED = -(-SEQ // 32) * 32  # memory-efficient attention keeps one sum for each of so many rows
CASES = {
    # the input, the output, and the logarithm of a sum in float32 for each row
    "attention": Case(of=attends(is_causal=True), by_hand=2 * X + 2 * X + 4 * ROWS + RNG),
    "attention, fewer heads of keys": Case(of=grouped, by_hand=2 * X + 2 * X + 4 * ROWS + RNG),
    "attention, dropout": Case(of=attends(dropout_p=0.1), by_hand=2 * X + 2 * X + 4 * ROWS + RNG),
    # heads of 60 are padded to 64, each of query, key and value on its own
    "attention, heads of 60": Case(
        of=attends(), by_hand=4 * 2 * X + 4 * ROWS + RNG, shape=(BATCH, HEADS, SEQ, 60)
    ),
    "attention, float32": Case(
        of=attends(), dtype=FULL, by_hand=4 * X + 4 * X + 4 * BATCH * HEADS * ROUNDED + 2 * 8
    ),
    # and the mask as numbers to add, which all batches and heads share
    "attention, mask": Case(
        of=masked, by_hand=2 * X + 2 * X + 2 * SEQ * SEQ + 4 * BATCH * HEADS * ROUNDED + 2 * 8
    ),
    # the input and a number in float32 for each row; and the weight, cast
    "rms_norm": Case(of=lambda x, weight: F.rms_norm(x, (HEAD,), weight), by_hand=2 * X + 4 * ROWS + 2 * HEAD),
    "rms_norm, float32": Case(of=lambda x, weight: F.rms_norm(x, (HEAD,), weight), dtype=FULL, by_hand=4 * X + 4 * ROWS),
    # no fused kernel takes a weight of another dtype: the input in float32, before and after the norm
    "rms_norm, weight in float32": Case(
        of=lambda x, weight: F.rms_norm(x, (HEAD,), weight.float()),
        by_hand=4 * X + 4 * X + 4 * ROWS + 4 * HEAD,
        as_on_cpu=True,
    ),
    "layer_norm": Case(
        of=lambda x, weight: F.layer_norm(x, (HEAD,), weight, weight), by_hand=2 * X + 2 * 4 * ROWS + 2 * HEAD
    ),
    "layer_norm, float32": Case(
        of=lambda x, weight: F.layer_norm(x, (HEAD,), weight), dtype=FULL, by_hand=4 * X + 2 * 4 * ROWS, as_on_cpu=True
    ),
    "dropout": Case(of=lambda x, weight: F.dropout(x, 0.1), by_hand=X),  # one byte an element
    # no fused kernel either: factors in the dtype of the input
    "dropout in place": Case(
        of=lambda x, weight: F.dropout(x * 1, 0.1, inplace=True), by_hand=2 * X, as_on_cpu=True
    ),
    "dropout of nothing": Case(of=lambda x, weight: F.dropout(x, 0.0) * x, by_hand=2 * X, as_on_cpu=True),
    # probabilities in float32, labels, and the number of them; not the logits
    "cross entropy": Case(
        of=classified, by_hand=4 * ROWS * VOCAB + 8 * ROWS + 4, shape=(ROWS, VOCAB), as_on_cpu=True
    ),
}  # fmt: skip


def kept_bytes(case: Case, device: Literal["cuda", "cpu"]) -> int:
    """Return the bytes of activations that a forward allocates and does not free, without the batch and the loss."""

    def make() -> nn.Module:
        with torch.device("meta"):
            return Scaled(HEAD)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return case.of(*model(batch)).sum()

    given = torch.empty(case.shape, dtype=case.dtype)
    precision = acc.Precision(params=case.dtype)
    run = TrainingSetup(ranks=1, device=device, sharding=acc.Sharding(precision=precision, units=acc.only_blocks()))
    log = trace(Subject(make=make, batch=lambda: given, loss=loss), run)
    last = FULL if case.of is classified else case.dtype
    live: dict[int, Alloc] = {}
    for event in log.events:
        if isinstance(event, Enter) and event.place.phase is StepPhase.BACKWARD:
            break
        if isinstance(event, Alloc):
            live[event.number] = event
        elif isinstance(event, Free):
            live.pop(event.number, None)
    return sum(a.num_bytes for a in live.values() if a.category is Category.ACTIVATIONS) - last.itemsize


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own word for that
@pytest.mark.parametrize("name", CASES)
def test_saved_bytes_match_those_of_cudas_operators(name):
    case = CASES[name]
    assert kept_bytes(case, "cuda") == case.by_hand
    assert (kept_bytes(case, "cpu") == case.by_hand) is case.as_on_cpu


def test_operators_are_replaced_in_recomputation_too():
    """Operators that were imported by name are replaced in the forward and when a backward recomputes it."""

    def peak(checkpointing: str) -> int:
        sharding = {"precision": acc.Precision(params=HALF), "checkpoint_activations": checkpointing}
        subject = Subject(make=deep, batch=lambda: given, loss=lambda model, batch: model(batch).sum())
        log = trace(subject, TrainingSetup(ranks=2, sharding=acc.Sharding(**sharding)))
        assert set(log.substituted) == {"dropout", "layer_norm"}
        recomputed = [e.name for e in log.events if isinstance(e, Op) and e.again]
        assert ("aten.native_dropout.default" in recomputed) is (checkpointing == "full")
        assert all("bernoulli" not in name for name in recomputed)
        return peak_of(log).highest["activations"]

    given = torch.empty(BATCH * SEQ, HEAD, dtype=HALF)
    assert peak("full") < peak("none")


class Named(nn.Linear):
    """A block that calls operators imported by name."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(layer_norm(super().forward(x), (HEAD,)), 0.1)


def deep() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(Named(HEAD, HEAD, device="meta")) for _ in range(4)])


def test_operators_are_not_replaced_after_the_trace():
    x = torch.randn(2, 8, requires_grad=True)
    before = dropout(x, 0.5).grad_fn.name()
    with Substitutes().installed():
        assert dropout(x, 0.5).grad_fn.name() != before
    assert dropout(x, 0.5).grad_fn.name() == before
