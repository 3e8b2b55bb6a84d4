"""Layers that neighbouring ranks share by tensor parallelism, in a trace: each rank has a part, and activations are sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accordion.plan.tensor_parallel import COLWISE, GATHERED, ROWWISE, SPLIT, SUMMED, VOCABULARY, dim_cut, layers_in
from accordion.plan.trace.moves import moved, with_tensors


class Messages:
    """What ranks that share layers say to each other. `said`: is told of each message: its kind, and bytes of full tensors.

    As torch's DTensors have it: nothing is summed in place, and the last dim is gathered by way of the first.
    """

    def __init__(self, ranks: int, said: Callable[[str, int], None]) -> None:
        self.ranks, self._said = ranks, said

    def sum(self, part: Tensor) -> Tensor:
        self._said("sum", part.nbytes)
        return part.clone()

    def gather(self, part: Tensor) -> Tensor:
        """`part`: (..., n). Gives (..., n * ranks)."""
        self._said("gather", part.nbytes * self.ranks)
        parts = part.new_empty(self.ranks * part.shape[0], *part.shape[1:])
        return torch.cat(parts.chunk(self.ranks), -1)

    def split(self, whole: Tensor) -> Tensor:
        """`whole`: (..., n). Gives this rank's (..., n / ranks)."""
        return whole.chunk(self.ranks, -1)[0].clone()


def cut_layers(model: nn.Module, messages: Messages) -> None:
    """Leave each rank its part of the layers that the model's own plan names, and let their forwards send activations."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    for module, style in layers_in(model).values():
        for name, p in list(module.named_parameters(recurse=False)):
            dim = dim_cut(style, name)
            if dim is None:
                continue
            if p not in made:
                own = p.detach().chunk(messages.ranks, dim)[0].clone()
                made[p] = nn.Parameter(own, requires_grad=p.requires_grad)
            setattr(module, name, made[p])
        if style == SUMMED:
            module.forward = partial(_with_summed_gradients, module, messages)
        elif style == VOCABULARY:
            module.padding_idx = None  # type: ignore[assignment]  # a row of the whole table
            module.forward = partial(_looked_up, module, module.forward, messages)
        else:
            module.forward = partial(_forward, module.forward, style, messages)


def _forward(inside: Callable[..., Tensor], style: str, messages: Messages, given: Tensor) -> Tensor:
    """A linear layer's. `inside`: of this rank's part."""
    if style in (COLWISE, GATHERED):
        given = moved(given, _same, messages.sum)
    elif style == SPLIT:
        given = moved(given, messages.split, messages.gather)
    out = inside(given)
    if style in (ROWWISE, SPLIT):
        return moved(out, messages.sum, _same)
    return moved(out, messages.gather, messages.split) if style == GATHERED else out


def _looked_up(module: Any, inside: Callable[..., Tensor], messages: Messages, tokens: Tensor) -> Tensor:
    """An embedding's, of which each rank has some rows: those of other ranks' tokens are 0 here."""
    elsewhere = tokens >= module.weight.shape[0]
    rows = inside(tokens.masked_fill(elsewhere, 0))
    return moved(rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0), messages.sum, _same)


def _with_summed_gradients(module: nn.Module, messages: Messages, given: Tensor) -> Tensor:
    """That of a layer which each rank has whole, for its own part of what goes through it."""
    twin = with_tensors(module, lambda p: moved(p, _same, messages.sum))
    out: Tensor = type(module).forward(twin, given)
    return out


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)
