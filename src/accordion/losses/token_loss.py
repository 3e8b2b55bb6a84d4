"""`TokenLoss`: the loss of one token as a function of its logits, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from accordion import _torch

CHUNK_BYTES = 128 * 2**20  # float32 logits of one chunk; a matrix product of this size keeps any accelerator busy


class Targets(NamedTuple):
    """The labels of tokens as columns of a matrix of logits, which has a column for each word, or for some words alone. For a
    label without a logit, `columns` is 0 and `present` False."""

    columns: Tensor  # (tokens,), int64: the column of the label's logit
    present: Tensor  # (tokens,), bool: the label has a column
    counts: Tensor  # (tokens,), bool: the token has a loss

    def of(self, chunk: slice) -> Targets:
        return Targets(*(tensor[chunk] for tensor in self))


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of one token as a function of its logits. `ignore_index`: label of tokens without a loss. `label_smoothing`: as
    in `torch.nn.functional.cross_entropy`. `z_loss`: factor of the squared logarithm of the softmax's denominator. `soft_cap`:
    replace each logit `x` by `soft_cap * tanh(x / soft_cap)`; None: keep it. `chunk_tokens`: tokens per chunk; None: as
    `CHUNK_BYTES` allows."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    chunk_tokens: int | None

    def num_rows(self, num_words: int) -> int:
        """Return the tokens per chunk: `chunk_tokens`; if that is None, as many tokens (at least one) as fit into `CHUNK_BYTES`
        with `num_words` float32 logits each."""
        return self.chunk_tokens or max(1, CHUNK_BYTES // (4 * num_words))

    @property
    def is_plain(self) -> bool:
        """True if `torch.nn.functional.linear_cross_entropy` can compute the loss: no smoothing, no `z_loss`, no cap."""
        return not self.label_smoothing and not self.z_loss and self.soft_cap is None

    def targets(self, labels: Tensor) -> Targets:
        """Return the targets of `labels` (tokens,) for logits of all words, in which the column of a label is the label itself.
        A token with the label `ignore_index` has column 0, no logit and no loss."""
        counts = labels != self.ignore_index
        return Targets(labels.where(counts, 0), counts, counts)

    def capped_(self, logits: Tensor) -> Tensor:
        """Return `logits`, soft-capped in place if there is a `soft_cap`."""
        return logits if self.soft_cap is None else logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def losses(self, log_sum: Tensor, own: Tensor, mean: Tensor | None, counts: Tensor) -> Tensor:
        """Return the loss of each token, zero if `counts` is False; all tensors are (tokens,). log_sum: logarithm of the sum of
        exponentials of a token's logits; own: logit of its label; mean: mean of its logits; None without label smoothing."""
        losses = log_sum - (1 - self.label_smoothing) * own
        if mean is not None:
            losses = losses - self.label_smoothing * mean
        if self.z_loss:
            losses = losses + self.z_loss * log_sum.square()
        return losses.where(counts, 0.0)

    def backward_(self, logits: Tensor, log_sum: Tensor, targets: Targets, weights: Tensor, num_words: int) -> Tensor:
        """Overwrite `logits` (tokens, some or all of `num_words` words), a result of `capped_`, with the gradient of the sum of
        losses times `weights` (tokens,) by logits before `capped_`; return it. log_sum: log of the sum of exp of all logits."""
        weights = weights.where(targets.counts, 0.0)
        slope = None if self.soft_cap is None else 1 - (logits / self.soft_cap).square()
        logits.sub_(log_sum[:, None]).exp_()
        logits.mul_((weights * (1 + 2 * self.z_loss * log_sum))[:, None])
        own = (self.label_smoothing - 1) * weights.where(targets.present, 0.0)
        logits.scatter_add_(1, targets.columns[:, None], own[:, None])
        if self.label_smoothing:
            logits.sub_((weights * (self.label_smoothing / num_words))[:, None])
        return logits if slope is None else logits.mul_(slope)


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype for matrix products of gradients with `tensor`: its own dtype, but at least float32 on the CPU, which
    multiplies 16-bit matrices up to 20 times as slowly as float32 ones."""
    # A fake tensor on the CPU stands for one on an accelerator: the planner traces with such.
    if tensor.device.type != "cpu" or _torch.fake_device(tensor) is not None:
        return tensor.dtype
    return torch.promote_types(tensor.dtype, torch.float32)
