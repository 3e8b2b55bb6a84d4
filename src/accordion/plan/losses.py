"""Ways to compute the loss of a language model, which differ in the memory that they take."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accordion.losses.chunks import head_returns_loss

LOSSES = {
    "plain": "logits, and a copy of them in float32 from which the loss and its gradient are computed",
    "fused": "one kernel over logits in the compute dtype, and one for their gradient (FlashAttention's, Liger's)",
    "chunked": "`accordion.linear_cross_entropy`: head and loss together in chunks of tokens, never the logits of all",
    "head_rows": "the same with a few rows of the head at a time, never the whole head",
}
OF_HEAD = ("chunked", "head_rows")  # computed together with the head, an `nn.Linear`


def token_loss(kind: str, model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of a language model, summed over tokens, 0-d. `kind`: a key of `LOSSES`; with "fused" the value is wrong,
    but memory and kernels are right. `tokens`, `labels`: (micro_batch, seq)."""
    if kind in OF_HEAD:
        head = model.get_output_embeddings()
        with head_returns_loss(head, labels, reduction="sum", head_rows=kind == "head_rows"):
            loss: Tensor = model(input_ids=tokens, use_cache=False).logits
        return loss
    logits = model(input_ids=tokens, use_cache=False).logits  # (micro_batch, seq, vocab)
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
