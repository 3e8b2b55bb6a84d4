"""The norm of all gradients, with one reduction of one number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import Communicator, reduced


@dataclass(slots=True)
class NormPart:
    """Tensors of which each rank of `communicators` has other rows; without communicators every rank has them whole."""

    communicators: Sequence[Communicator]
    tensors: list[Tensor] = field(default_factory=list)


def total_norm(parts: Sequence[NormPart], norm_type: float, device: torch.device) -> Tensor:
    """0-d float32: the norm over all elements, the same on all ranks. Ranks pass parts of the same communicators in one order.

    `device`: where ranks communicate and the norm will be; the tensors may lie on the host, offloaded.
    One number is reduced for each part that is cut; the norm of DTensors instead gathers or reduces each one apart.
    """
    zero = torch.zeros((), dtype=torch.float32, device=device)
    is_max = math.isinf(norm_type)
    found: dict[tuple[int, ...], tuple[Sequence[Communicator], Tensor]] = {}
    for part in parts:
        key = tuple(id(communicator.group) for communicator in part.communicators)
        norms = _norms(part.tensors, norm_type, device) if part.tensors else [zero.view(1)]
        mine = torch.linalg.vector_norm(torch.cat(norms), norm_type)
        mine = mine.to(torch.float32) if is_max else mine.to(torch.float32).pow(norm_type)
        held = found.get(key, (part.communicators, zero))[1]
        found[key] = part.communicators, torch.maximum(held, mine) if is_max else held + mine
    op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    powers = torch.stack([reduced(value.clone(), communicators, op) for communicators, value in found.values()])
    return powers.max() if is_max else powers.sum().pow(1.0 / norm_type)


def _norms(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> list[Tensor]:
    """One or more 1-D tensors on `device`: the norms of the tensors on each of theirs, brought there together."""
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return [torch.zeros(1, dtype=torch.float32, device=device)]
    norms = [
        torch.stack(_torch.foreach_norm(same, norm_type, dtype=torch.promote_types(same[0].dtype, torch.float32)))
        for same in _alike(filled)
    ]
    return [n.to(device=device, dtype=torch.float32) for n in norms]


def _alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """By device, and those of float64 by themselves, whose norms torch computes in nothing less."""
    kinds = [
        [t for t in same if (t.dtype is torch.float64) is wide]
        for same in _by_device(tensors)
        for wide in (False, True)
    ]
    return [same for same in kinds if same]


def _by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    devices = dict.fromkeys(t.device for t in tensors)
    return [[t for t in tensors if t.device == device] for device in devices]


def scale_to(tensors: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Multiply all by max_norm / norm where that is under one; no read of the device where all lie there."""
    multiply(tensors, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def multiply(tensors: Sequence[Tensor], scale: Tensor) -> None:
    """All in place, on whichever device each of them lies; `scale`: 0-d."""
    for same in _by_device(tensors):
        _torch.foreach_mul_(same, scale.to(same[0].device))
