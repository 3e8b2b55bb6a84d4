"""The norm of all gradients of a sharded model, with one all-reduce of one number per set of ranks."""

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
    """Tensors that are sharded over the ranks of `communicators`. If there are none, every rank has the whole tensors."""

    communicators: Sequence[Communicator]
    tensors: list[Tensor] = field(default_factory=list)


def total_norm(parts: Sequence[NormPart], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm over all elements of all `parts` as a 0-d float32 tensor on `device`, equal on all ranks. A collective.

    All ranks must pass parts with the same communicators in the same order. `device`: of the communication; the tensors may be
    on the host. `norm_type`: as in `torch.nn.utils.clip_grad_norm_`.
    """
    is_max = math.isinf(norm_type)
    powers = []
    for part in parts:
        norms = []
        # One copy of norms per device. Norms of float64 tensors are separate, since torch computes them in float64 only.
        for same in _grouped((t for t in part.tensors if t.numel()), lambda t: (t.device, t.dtype is torch.float64)):
            wide = torch.promote_types(same[0].dtype, torch.float32)
            each = torch.stack(_torch.foreach_norm(same, norm_type, dtype=wide))
            norms.append(each.to(device=device, dtype=torch.float32))
        norm = torch.linalg.vector_norm(torch.cat(norms or [torch.zeros(1, device=device)]), norm_type)
        power = norm if is_max else norm.pow(norm_type)
        powers.append(reduced(power, part.communicators, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM))
    total = torch.stack(powers)
    return total.max() if is_max else total.sum().pow(1.0 / norm_type)


def _grouped(tensors: Iterable[Tensor], key: Callable[[Tensor], object]) -> list[list[Tensor]]:
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    return list(groups.values())


def multiply(tensors: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply each tensor in place by `scale` (0-d). The host waits only for tensors on another device than that of `scale`."""
    for same in _grouped(tensors, lambda tensor: tensor.device):
        _torch.foreach_mul_(same, scale.to(same[0].device))
