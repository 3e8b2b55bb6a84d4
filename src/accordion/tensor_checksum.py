"""Checksums of tensors, computed where the tensors are."""

from __future__ import annotations

import torch
from torch import Tensor

from accordion import _torch

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # odd, its bits even: Knuth's multiplicative hash of 64 bits


def checksum(tensor: Tensor) -> Tensor:
    """0-d int64: the tensor's bits taken as integers and summed, rows and columns with weights, so that their order counts.

    The same for every order of summation, as integers wrap around.
    """
    if type(tensor.data) is not Tensor:  # a subclass: what it is made of, where it tells
        sums = [checksum(inner) for inner in _torch.inner_tensors(tensor)]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(kind)
    table = bits.reshape(bits.shape[0] if bits.dim() > 1 else 1, -1)
    return _weighted(table.sum(0, dtype=torch.int64)) + _weighted(table.sum(1, dtype=torch.int64))


def _weighted(sums: Tensor) -> Tensor:
    weights = torch.arange(1, sums.numel() + 1, device=sums.device) * GOLDEN
    return (sums * (weights ^ (weights >> 29))).sum()
