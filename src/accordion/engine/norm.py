"""The norm of all gradients, with one reduction of one number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from accordion import _torch
from accordion.engine.collectives import Link, reduced


def total_norm(
    cut: Sequence[Tensor], whole: Sequence[Tensor], links: Sequence[Link], norm_type: float, device: torch.device
) -> Tensor:
    """0-d float32: the norm over all elements. `cut`: rows of this rank; `whole`: tensors that every rank has whole.

    `device`: where ranks communicate and the norm will be; the tensors may lie on the host, offloaded.
    Only `cut` is reduced over `links`; the norm of DTensors instead gathers or reduces each one apart.
    """
    norms = [
        torch.linalg.vector_norm(torch.stack([n.to(device) for n in _norms(part, norm_type)]), norm_type)
        if part
        else None
        for part in (cut, whole)
    ]
    zero = torch.zeros((), dtype=torch.float32, device=device)
    mine, theirs = (zero if n is None else n.to(torch.float32) for n in norms)
    if math.isinf(norm_type):
        return torch.maximum(reduced(mine.clone(), links, dist.ReduceOp.MAX), theirs)
    power = reduced(mine.pow(norm_type), links)
    return (power + theirs.pow(norm_type)).pow(1.0 / norm_type)


def _norms(tensors: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return [torch.zeros((), dtype=torch.float32, device=tensors[0].device)]
    norms = [n for same in _by_device(filled) for n in _torch.foreach_norm(same, norm_type, dtype=torch.float32)]
    return [n.to(torch.float32) for n in norms]


def _by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    devices = dict.fromkeys(t.device for t in tensors)
    return [[t for t in tensors if t.device == device] for device in devices]


def scale_to(tensors: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Multiply all by max_norm / norm where that is under one; no read of the device where all lie there."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for same in _by_device(tensors):
        _torch.foreach_mul_(same, scale.to(same[0].device))
