"""`linear_cross_entropy`: the loss of a language model without a tensor of all logits, computed while the head is gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accordion import _torch
from accordion.engine.communicator import reduced
from accordion.engine.hooks import Hooks, hooks_of
from accordion.errors import UsageError
from accordion.losses.head_rows import chunks, row_losses
from accordion.losses.token_loss import TokenLoss, product_dtype

Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Linear,
    labels: Tensor,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    shift: bool = False,
    over_ranks: bool = False,
    chunk_tokens: int | None = None,
    head_rows: bool = False,
) -> Tensor:
    """Return the cross entropy of `head(hidden)` and `labels` without a tensor of all logits.

    Logits are computed for one chunk of tokens at a time. For "mean" and "sum" the same pass computes the gradients of `hidden`
    and of the head; for "none", or with `head_rows`, the backward computes the logits again. If the head is sharded, it is
    gathered once, and all ranks must call this function together, inside the model's forward or with its output.

    Args:
        hidden: (..., in_features), the input of the head.
        head: the last layer, with or without a bias, whose weight may be tied to the embedding.
        labels: (...), int64. Tokens with `ignore_index` have no loss.
        reduction: "mean" over this rank's tokens that have a loss (zero if none has), "sum", or "none" for one loss per token.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        z_loss: add `z_loss` times the squared logarithm of the softmax's denominator.
        soft_cap: replace each logit `x` by `soft_cap * tanh(x / soft_cap)`.
        shift: token i predicts label i + 1 of its sequence: drop the last token of `hidden` and the first label.
        over_ranks: for "mean" and a sharded head, divide the sum by the mean number per rank of tokens that have a loss (a
            collective), so that averaged gradients are those of the mean over the tokens of all ranks, and the mean of all
            ranks' losses is the loss of the whole batch.
        chunk_tokens: number of tokens per chunk; by default the logits of a chunk take at most 128 MiB.
        head_rows: gather some rows of the head at a time, twice, so that no rank has the whole head or its whole gradient in
            memory. The head must be a unit of its own. No effect if it is not sharded.

    Raises:
        UsageError: if `head` is no linear layer, or with `head_rows` no unit of its own, if `reduction` is unknown, if shapes do
            not match, or if labels on the host are outside of the vocabulary. Without `head_rows`, a second backward of "mean" or
            "sum" raises this or a `RuntimeError`, even with `retain_graph=True`.
    """
    loss = TokenLoss(ignore_index, label_smoothing, z_loss, soft_cap, chunk_tokens)
    if shift:
        hidden, labels = hidden[..., :-1, :], labels[..., 1:]
    _check(hidden, head, labels, loss, reduction)
    shape, labels = labels.shape, labels.flatten()
    # Without hooks to run, the head shows its full parameters.
    hooks = [one for one in hooks_of(head) if not (one.engine.suspended or one.unit.module_params.is_shown)]

    def compute(hidden: Tensor) -> Tensor:
        inputs = (hidden.flatten(0, -2), head.weight, head.bias, labels)
        return _summed(inputs, loss, "none" if reduction == "none" else "sum")

    if head_rows and hooks:
        losses = row_losses(hidden.flatten(0, -2), head, labels, loss, hooks)
        total = losses if reduction == "none" else losses.sum()
    else:
        call: Callable[[Tensor], Tensor] = compute
        for one in hooks:
            call = _inside(one, call)
        total = call(hidden)
    if reduction == "none":
        return total.view(shape)
    return total if reduction == "sum" else total / _divisor(head, labels, loss, over_ranks)


@contextmanager
def head_returns_loss(head: nn.Linear, labels: Tensor, **options: Any) -> Iterator[list[Tensor]]:
    """Context manager in which `head(hidden)` returns `linear_cross_entropy(hidden, head, labels, **options)`.

    For models that return the output of their head: inside, they return the loss. Yields a list, to which each call of `head`
    appends its loss. Replaces `head.forward` meanwhile. With `head_rows=True` the head's forward hooks and pre-hooks do not run.
    """
    losses: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        losses.append(linear_cross_entropy(hidden, head, labels, **options))
        return losses[-1]

    replaced: dict[str, Any] = {"forward": forward}
    if options.get("head_rows"):  # those of its unit would gather all of it
        replaced |= {"_forward_pre_hooks": {}, "_forward_hooks": {}}
    attributes = vars(head)
    before = {name: attributes[name] for name in replaced if name in attributes}
    attributes.update(replaced)
    try:
        yield losses
    finally:
        for name in replaced:
            del attributes[name]
        attributes.update(before)


def _inside(hooks: Hooks, call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of `hidden` that returns `call(hidden)`, computed while the unit of `hooks` is gathered."""
    return lambda hidden: hooks.enter(hooks.attached_modules()[0], call, (hidden,), {})


def _check(hidden: Tensor, head: nn.Linear, labels: Tensor, loss: TokenLoss, reduction: str) -> None:
    if not isinstance(head, nn.Linear):
        raise UsageError(
            f"linear_cross_entropy takes a head that is an nn.Linear, not {type(head).__name__}; pass the model's last layer."
        )
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"reduction={reduction!r} is unknown; pass 'mean', 'sum' or 'none'.")
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1:] != (head.in_features,) or labels.dtype != torch.int64:
        raise UsageError(
            f"linear_cross_entropy got hidden {tuple(hidden.shape)} and {labels.dtype} labels {tuple(labels.shape)}; pass "
            f"hidden (..., {head.in_features}) and one int64 label for each of its rows."
        )
    if labels.device.type == "cpu" and labels.numel() and _torch.fake_device(labels) is None:
        # On an accelerator this would make the host wait; there torch's own check stops the kernel. Fake tensors have no values.
        outside = labels[((labels < 0) | (labels >= head.out_features)) & (labels != loss.ignore_index)]
        if outside.numel():
            raise UsageError(
                f"label {int(outside[0])} is outside of the head's vocabulary of {head.out_features}; mark tokens without a "
                f"loss by ignore_index={loss.ignore_index}."
            )


def _divisor(head: nn.Linear, labels: Tensor, loss: TokenLoss, over_ranks: bool) -> Tensor:
    """Return the number of this rank's tokens that have a loss, at least 1. With `over_ranks` and a sharded `head`, return the
    mean of these numbers over the ranks of the head, at least 1 / ranks; this is collective."""
    count = (labels != loss.ignore_index).sum().float()
    contexts = [hooks.engine.context for hooks in hooks_of(head)]
    if not over_ranks or not contexts:
        return count.clamp(min=1.0)
    context = contexts[0]
    return reduced(count, [context.shard.reduce, context.replicate.reduce]).clamp(min=1.0) * context.scale


Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""hidden (tokens, width), weight of the head (words, width), bias (words,), labels (tokens,) int64."""


def _summed(inputs: Inputs, loss: TokenLoss, reduction: str) -> Tensor:
    """Return the sum of all tokens' losses, or the loss of each token, (tokens,), if `reduction` is "none"."""
    hidden, weight, bias, labels = inputs
    # With 16-bit inputs torch's function returns a 16-bit sum, whose error is a thousandth (torch 2.13).
    is_exact = hidden.dtype == weight.dtype and hidden.dtype in (torch.float32, torch.float64)
    if loss.is_plain and is_exact and hasattr(F, "linear_cross_entropy"):
        rows = min(loss.num_rows(weight.shape[0]), max(1, len(labels)))
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        arguments: dict[str, Any] = {"reduction": reduction, "ignore_index": loss.ignore_index, "options": options}
        return F.linear_cross_entropy(hidden, weight, labels, linear_bias=bias, **arguments)
    losses: Tensor = ChunkedLoss.apply(loss, reduction, *inputs)  # type: ignore[no-untyped-call]
    return losses


class ChunkedLoss(torch.autograd.Function):
    """Autograd function of token losses, by chunks. `apply(loss, reduction, *inputs)`, of `Inputs`, returns the sum, or for
    "none" each loss. Gradients are computed in the forward for a sum (one backward scales them), else in the backward."""

    @staticmethod
    def forward(ctx: Any, loss: TokenLoss, reduction: str, *inputs: Any) -> Tensor:
        ctx.loss, ctx.reduction, ctx.needed = loss, reduction, ctx.needs_input_grad[2:5]
        _, weight, _, labels = inputs
        if reduction == "none":
            ctx.save_for_backward(*inputs)
            return _pass(inputs, loss, None, ctx.needed)[0]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        ones = torch.ones(labels.shape, dtype=dtype, device=labels.device)
        losses, ctx.grads = _pass(inputs, loss, ones if any(ctx.needed) else None, ctx.needed)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.reduction == "none":
            grads = _pass(ctx.saved_tensors, ctx.loss, grad, ctx.needed)[1]
        elif ctx.grads is None:
            raise UsageError(
                "the backward of linear_cross_entropy ran twice; call the function again for each backward."
            )
        else:
            grads, ctx.grads = ctx.grads, None
            grads = [g if g is None else g.mul_(grad.to(g.dtype)) for g in grads]
        return None, None, *grads, None


def _pass(
    inputs: Inputs, loss: TokenLoss, weights: Tensor | None, needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return (loss of each token, [gradient of hidden, of weight, of bias]). The gradients are those of the sum of losses times
    `weights` (tokens,); one is None if its entry of `needed` is False or there is no bias, all are None if `weights` is None."""
    hidden, weight, bias, labels = inputs
    wide, dtype = torch.promote_types(weight.dtype, torch.float32), product_dtype(weight)
    grads = [
        torch.zeros_like(t, dtype=dtype) if t is not None and need and weights is not None else None
        for t, need in zip((hidden, weight, bias), needed, strict=True)
    ]
    weight_in_product = weight.to(dtype)
    losses = torch.empty(labels.shape, dtype=wide, device=labels.device)
    targets = loss.targets(labels)
    for chunk in chunks(loss, labels, weight):
        logits = loss.capped_(F.linear(hidden[chunk], weight, bias).to(wide))
        log_sum, aims = torch.logsumexp(logits, 1), targets.of(chunk)
        own = logits.gather(1, aims.columns[:, None])[:, 0]
        losses[chunk] = loss.losses(log_sum, own, logits.mean(1) if loss.label_smoothing else None, aims.counts)
        if weights is None:
            continue
        grad = loss.backward_(logits, log_sum, aims, weights[chunk], weight.shape[0]).to(dtype)
        if grads[0] is not None:
            grads[0][chunk] = grad @ weight_in_product
        if grads[1] is not None:
            grads[1].addmm_(grad.t(), hidden[chunk].to(dtype))
        if grads[2] is not None:
            grads[2].add_(grad.sum(0))
    return losses, [None if grad is None else grad.to(weight.dtype) for grad in grads]
