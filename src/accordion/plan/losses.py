"""Three ways to compute the loss of a language model, which differ in the memory that they take: plain, fused, chunked."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion.errors import UsageError

LOSSES = {
    "plain": "logits, and a copy of them in float32 from which the loss and its gradient are computed",
    "fused": "one kernel over logits in the compute dtype, and one for their gradient (FlashAttention's, Liger's)",
    "chunked": "head and loss together in chunks of rows, never the logits of all rows (Liger's fused linear cross entropy)",
}


def loss_of_logits(kind: str, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss summed over tokens, 0-d. `kind`: a key of `LOSSES`; only "plain" has the right value. `logits`:
    (micro_batch, seq, vocab), or with "chunked" the loss that `ChunkedHead` returned. `labels`: (micro_batch, seq)."""
    if kind == "chunked":
        return logits
    if kind == "fused":
        return _Fused.apply(logits, labels).float()  # type: ignore[no-any-return,no-untyped-call]
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


class _Fused(torch.autograd.Function):
    """Stand-in for a fused loss: forward reads the logits once, backward reads them and writes a gradient. Values are wrong."""

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
    """A language model's head that returns the loss in place of logits. Append labels to `labels` before a call: the call uses
    and removes the last ones."""

    labels: list[Tensor]  # each (batch, seq); a call takes the last one

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the loss, 0-d. `hidden`: (batch, seq, width)."""
        return _Chunked.apply(hidden, self.weight, self.labels.pop())  # type: ignore[no-any-return,no-untyped-call]


class _Chunked(torch.autograd.Function):
    """Stand-in for a chunked loss: forward computes loss and gradients, in chunks of rows whose logits take about as much
    memory as all hidden states. Memory and kernels are right, values are wrong."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)  # (batch * seq, width)
        grads = torch.empty_like(rows)
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        size = rows_at_a_time(rows.shape[0], *weight.shape)
        for start in range(0, rows.shape[0], size):
            chunk = rows[start : start + size]
            logits = chunk @ weight.t()
            total = total + torch.logsumexp(logits, -1).float().sum()
            logits.mul_(1.0)  # stands for the gradient, which is written over the logits
            torch.mm(logits, weight, out=grads[start : start + size])
            if weight_grad is not None:
                weight_grad.addmm_(logits.t(), chunk)
        ctx.save_for_backward(grads, *([] if weight_grad is None else [weight_grad]))
        ctx.shape = hidden.shape
        return total

    @staticmethod
    def backward(ctx: Any, *loss_grads: Tensor) -> Any:
        grads, *weight_grads = ctx.saved_tensors
        scale = loss_grads[0].to(grads.dtype)
        return (grads * scale).view(ctx.shape), *([weight_grads[0] * scale] if weight_grads else [None]), None


def rows_at_a_time(rows: int, vocab: int, width: int) -> int:
    """Return the number of rows in a chunk, of `rows` in total: a power of two, about rows * width / vocab (as Liger)."""
    parts = -(-vocab // width)
    return int(min(rows, 1 << (max(1, -(-rows // parts)) - 1).bit_length()))


def with_chunked_head(model: nn.Module, label: str) -> nn.Module:
    """Make the head of `model` a `ChunkedHead` in place, and return `model`. `label`: its name in errors. Raises `UsageError`
    if the head is not an `nn.Linear` without bias."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    is_plain = type(head) is nn.Linear and head.bias is None
    if not is_plain:
        raise UsageError(f"the head of {label} is no nn.Linear without bias; take --loss fused or plain.")
    head.__class__ = ChunkedHead
    head.labels = []
    return model


def expect_labels(model: Any, labels: Tensor) -> None:
    """Pass the labels of the next forward to `model`, whose head is a `ChunkedHead`."""
    model.get_output_embeddings().labels.append(labels)
