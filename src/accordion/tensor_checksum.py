"""Checksums of tensors, computed on their devices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from accordion import _torch

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # odd, its bits even: Knuth's multiplicative hash of 64 bits
ROW = 2**14  # elements that share a total; a CPU takes one row at a time, whose products stay in its cache
ROWS_AT_ONCE = 2**10  # on another device: 128 MiB of products


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the checksum of each tensor that is not on the meta device, in words. The host waits once for each device."""
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if not tensor.is_meta:
            by_device.setdefault(tensor.device, {})[name] = checksum(tensor)
    sums = {
        k: v for each in by_device.values() for k, v in zip(each, torch.stack([*each.values()]).tolist(), strict=True)
    }
    return {name: f"with checksum {sums[name] % 2**64:016x}" for name in tensors if name in sums}


def checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of a tensor's bits, 0-d int64 on its device: integers, summed with weights by their place.

    It is the same for every order of summation, as integers wrap around.
    """
    if type(tensor.data) is not Tensor:  # a subclass: what it is made of, where it tells
        sums = [checksum(inner) for inner in _torch.inner_tensors(tensor)]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # Of 8 bytes the halves: the top bit of a 64-bit product would have no weight.
    kind = {1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    bits = tensor.detach().contiguous().view(-1).view(kind)
    num_rows = bits.numel() // ROW
    rows, rest = bits[: num_rows * ROW].view(-1, ROW), bits[num_rows * ROW :].view(1, -1)
    parts = (*rows.split(1 if bits.device.type == "cpu" else ROWS_AT_ONCE), rest)
    weights = _weights(ROW, bits.device)
    totals = torch.cat([(part * weights[: part.shape[1]]).sum(1) for part in parts])
    return (totals * _weights(len(totals), bits.device)).sum()


def _weights(num: int, device: torch.device) -> Tensor:
    weights = torch.arange(1, num + 1, device=device) * GOLDEN
    return weights ^ (weights >> 29)
