"""`row_losses`: the losses of tokens, with a few rows of a sharded head at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accordion.engine.hooks import Hooks
from accordion.engine.layout import Slice
from accordion.engine.slices import SlicedReduce, Slices, begin_backward, begin_call, why_not_sliced
from accordion.errors import UsageError
from accordion.losses.token_loss import Targets, TokenLoss, product_dtype

# A slice has at most so many bytes of gathered rows, and an eighth of the head. Two are in memory, and the gradients of two.
SLICE_BYTES, SHARE = 32 * 2**20, 8
WEIGHT, BIAS = 0, 1  # indices of the parameters of a unit that is a linear layer


def row_losses(hidden: Tensor, head: nn.Linear, labels: Tensor, loss: TokenLoss, hooks: Sequence[Hooks]) -> Tensor:
    """Return the loss of each token, (tokens,), computed with a few gathered rows of `head` at a time. A collective.

    The forward keeps a running softmax of each token, and the backward gathers the rows again. The gradient of a slice of rows
    is reduced as soon as it is complete. hidden: (tokens, width); labels: (tokens,); hooks: of the units with parameters of
    `head`. Raises `UsageError` if `head` is gathered together with other modules, or if its unit cannot be gathered in slices.
    """
    unit = hooks[0].unit
    alone = len(hooks) == 1 and unit.module_params.modules() == [head] and unit.params[0].places[0][1] == "weight"
    why = why_not_sliced(unit) if alone else "it shares a unit with other modules, as a tied head does"
    if why:
        name = next(param.name for param in unit.params if any(ref() is head for ref, _ in param.places))
        raise UsageError(
            f"head_rows=True needs a head that is a unit of its own, whose rows are sharded, and {name!r} cannot "
            f"be gathered by rows, because {why}; leave out head_rows, or name the head in units."
        )
    device, dtype = hidden.device.type, unit.groups[0].dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    max_rows = min(SLICE_BYTES // (head.in_features * unit.groups[0].dtype.itemsize), head.out_features // SHARE)
    slices, call = Slices(hooks[0].engine, unit, max_rows), begin_call(hooks[0].engine, unit)
    return RowLosses.apply(loss, slices, call, labels, hidden.to(dtype), *call.trained.params)  # type: ignore[no-any-return,no-untyped-call]


def targets_in(part: Slice, labels: Tensor, ignore_index: int) -> Targets:
    """Return the targets of `labels` (tokens,) among the words of the slice `part`. The column of a label is the index of its
    row in the gathered slice."""
    counts = labels != ignore_index
    words = labels.where(counts, 0)
    rows = words % part.cut.chunk - part.start
    present = counts & (rows >= 0) & (rows < part.height)
    return Targets((words // part.cut.chunk * part.height + rows).where(present, 0), present, counts)


class RowLosses(torch.autograd.Function):
    """Autograd function of the loss of each token. Forward and backward gather `slices` of the head's rows one after the other.
    `params`: the sharded parameters of the head that are trained."""

    @staticmethod
    def forward(
        ctx: Any, loss: TokenLoss, slices: Slices, call: Any, labels: Tensor, hidden: Tensor, *params: Tensor
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_sum = torch.full(labels.shape, -torch.inf, dtype=wide, device=labels.device)
        own, total = torch.zeros_like(log_sum), torch.zeros_like(log_sum)
        for part, rows in slices.gathered():
            targets = targets_in(part, labels, loss.ignore_index)
            for chunk in chunks(loss, labels, rows[WEIGHT]):
                logits = logits_of(loss, hidden[chunk], *rows)
                aims = targets.of(chunk)
                log_sum[chunk] = torch.logaddexp(log_sum[chunk], torch.logsumexp(logits, 1))
                own[chunk] += logits.gather(1, aims.columns[:, None])[:, 0].where(aims.present, 0.0)
                if loss.label_smoothing:
                    total[chunk] += logits.sum(1)
            del rows
        ctx.loss, ctx.slices, ctx.call = loss, slices, call
        ctx.save_for_backward(labels, hidden, log_sum)
        mean = total / slices.slices[0].cut.rows if loss.label_smoothing else None
        return loss.losses(log_sum, own, mean, labels != loss.ignore_index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        labels, hidden, log_sum = ctx.saved_tensors
        loss, slices, call = ctx.loss, ctx.slices, ctx.call
        begin_backward(call)
        trained = call.trained.indices
        reduce = SlicedReduce(call) if trained else None
        hidden_grad = torch.zeros_like(hidden, dtype=log_sum.dtype)
        dtype = product_dtype(hidden)
        for part, rows in slices.gathered():
            targets, weight = targets_in(part, labels, loss.ignore_index), rows[WEIGHT].to(dtype)
            num_padded = part.height * part.cut.num_ranks
            grads = {i: weight.new_zeros(num_padded, *rows[i].shape[1:]) for i in trained}
            for chunk in chunks(loss, labels, weight):
                logits, aims = logits_of(loss, hidden[chunk], *rows), targets.of(chunk)
                logits = loss.backward_(logits, log_sum[chunk], aims, grad[chunk], part.cut.rows).to(dtype)
                hidden_grad[chunk] += logits @ weight
                if WEIGHT in grads:
                    grads[WEIGHT][: part.num_rows].addmm_(logits.t(), hidden[chunk].to(dtype))
                if BIAS in grads:
                    grads[BIAS][: part.num_rows] += logits.sum(0)
                del logits
            del weight, rows
            if reduce is not None:
                reduce.add(part, list(grads.values()))
            del grads
        written = () if reduce is None else reduce.write()
        return None, None, None, None, hidden_grad.to(hidden.dtype), *written


def chunks(loss: TokenLoss, labels: Tensor, weight: Tensor) -> list[slice]:
    """Return slices that divide the tokens of `labels` into chunks of as many tokens as `loss` allows for logits of all words
    in `weight` (words, width). The last slice may reach beyond the end."""
    step = loss.num_rows(max(1, weight.shape[0]))
    return [slice(start, start + step) for start in range(0, len(labels), step)]


def logits_of(loss: TokenLoss, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return logits (tokens, words), capped by `loss`, in float32 or wider, computed in the dtype of `hidden` (tokens, width).
    weight: (words, width); bias: (words,)."""
    bias = None if bias is None else bias.to(hidden.dtype)
    logits = F.linear(hidden, weight.to(hidden.dtype), bias)
    return loss.capped_(logits.to(torch.promote_types(logits.dtype, torch.float32)))
