"""The ways in which programs work out the loss of a language model, by what each holds: `plain`, `fused`, `chunked`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion.errors import UsageError

LOSSES = {
    "plain": "logits, and a copy of them in float32 of which the loss and its gradient are made",
    "fused": "one kernel over logits in the dtype of the computation, and one for their gradient (FlashAttention's, Liger's)",
    "chunked": "head and loss together, some rows at a time; no logits outlive their rows (Liger's fused linear cross entropy)",
}


def loss_of_logits(kind: str, logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over tokens (0-d); `logits`: (micro_batch, seq, vocab), or what `ChunkedHead` made of them."""
    if kind == "chunked":
        return logits
    if kind == "fused":
        return _Fused.apply(logits, labels).float()  # type: ignore[no-any-return,no-untyped-call]
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


class _Fused(torch.autograd.Function):
    """Reads logits once and keeps a float32 a row; its backward reads them again and writes their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        sums = torch.logsumexp(logits, -1)  # (micro_batch, seq)
        ctx.save_for_backward(logits)
        return sums.float().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        return logits * grads[0].to(logits.dtype), None


class ChunkedHead(nn.Linear):
    """A head that makes the loss of the hidden states it is given, and no logits. `labels`: of its next calls, (batch, seq)."""

    labels: list[Tensor]

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden`: (batch, seq, width). Gives the loss (0-d)."""
        return _Chunked.apply(hidden, self.weight, self.labels.pop())  # type: ignore[no-any-return,no-untyped-call]


class _Chunked(torch.autograd.Function):
    """Gradients are made in the forward, of as many rows at a time that their logits take about what hidden states do."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)  # (batch * seq, width)
        grads = torch.empty_like(rows)
        summed = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        size = rows_at_a_time(rows.shape[0], *weight.shape)
        for start in range(0, rows.shape[0], size):
            part = rows[start : start + size]
            logits = part @ weight.t()
            total = total + torch.logsumexp(logits, -1).float().sum()
            logits.mul_(1.0)  # the gradient, in their place
            torch.mm(logits, weight, out=grads[start : start + size])
            if summed is not None:
                summed.addmm_(logits.t(), part)
        ctx.save_for_backward(grads, *([] if summed is None else [summed]))
        ctx.shape = hidden.shape
        return total

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        grads, *summed = ctx.saved_tensors
        by = given[0].to(grads.dtype)
        return (grads * by).view(ctx.shape), *([summed[0] * by] if summed else [None]), None


def rows_at_a_time(rows: int, vocab: int, width: int) -> int:
    """As Liger's kernel cuts them."""
    parts = -(-vocab // width)
    return int(min(rows, 1 << (max(1, -(-rows // parts)) - 1).bit_length()))


def with_chunked_head(model: nn.Module, where: str) -> nn.Module:
    """`model`, whose head makes the loss, changed in place. Raises `UsageError` where it has no plain head."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    is_plain = type(head) is nn.Linear and head.bias is None
    if not is_plain:
        raise UsageError(f"{where} has no head that is one product without a bias; take --loss fused or plain.")
    head.__class__ = ChunkedHead
    head.labels = []
    return model


def expect_labels(model: Any, labels: Tensor) -> None:
    """Before a forward of a model with a chunked head."""
    model.get_output_embeddings().labels.append(labels)
