"""Norms over sharded tensors, with one all-reduce per set of ranks; scaling of tensors in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import Communicator, reduced


@dataclass(slots=True)
class NormPart:
    """This rank's rows of tensors that are sharded over the ranks of `communicators`; without communicators, whole tensors."""

    communicators: Sequence[Communicator]
    tensors: list[Tensor] = field(default_factory=list)


def norms(rows: Sequence[Sequence[NormPart]], norm_type: float, device: torch.device) -> Tensor:
    """Return (len(rows),) float32 on `device`, equal on all ranks: entry i is the `norm_type`-norm over all parts in the list
    `rows[i]` (at least one). Collective: all ranks must pass parts with the same communicators in the same order. Parts with
    the same communicators share one all-reduce over each of them. `device`: of the communication, not of the tensors."""
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    of_ranks: dict[tuple[int, ...], list[tuple[int, NormPart]]] = {}
    for row, part in [(row, part) for row, parts in enumerate(rows) for part in parts]:
        of_ranks.setdefault(tuple(id(each.group) for each in part.communicators), []).append((row, part))
    powers: list[list[Tensor]] = [[] for _ in rows]
    for same in of_ranks.values():
        own = torch.stack([_power(part.tensors, norm_type, device) for _, part in same])
        for (row, _), power in zip(same, reduced(own, same[0][1].communicators, op), strict=True):
            powers[row].append(power)
    totals = list(map(torch.stack, powers))
    if math.isinf(norm_type):
        return torch.stack([total.max() for total in totals])
    return torch.stack([total.sum().pow(1.0 / norm_type) for total in totals])


def _power(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm over this rank's elements of `tensors`, raised to the power `norm_type` unless that is inf; 0-d float32."""
    each = []
    # One copy of norms per device. Norms of float64 tensors are separate, since torch computes them in float64 only.
    for same in _grouped((t for t in tensors if t.numel()), lambda t: (t.device, t.dtype is torch.float64)):
        wide = torch.promote_types(same[0].dtype, torch.float32)
        each.append(
            torch.stack(_torch.foreach_norm(same, norm_type, dtype=wide)).to(device=device, dtype=torch.float32)
        )
    norm: Tensor = torch.linalg.vector_norm(torch.cat(each or [torch.zeros(1, device=device)]), norm_type)
    return norm if math.isinf(norm_type) else norm.pow(norm_type)


def _grouped(tensors: Iterable[Tensor], key: Callable[[Tensor], object]) -> list[list[Tensor]]:
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    return list(groups.values())


def multiply(tensors: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply each tensor in place by `scale` (0-d). The host waits if `scale` is on an accelerator and a tensor on the host."""
    for same in _grouped(tensors, lambda tensor: tensor.device):
        _torch.foreach_mul_(same, scale.to(same[0].device))
