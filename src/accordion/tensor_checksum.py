"""Checksums of tensors, computed on their devices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from accordion import _torch

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # the odd multiplier of Knuth's 64-bit multiplicative hash
ROW = 2**14  # elements that are summed to one total; the CPU sums row by row, so that the products stay in its cache
ROWS_AT_ONCE = 2**10  # rows that other devices sum at once: 128 MiB of products


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name -> "with checksum <16 hex digits>" for tensors not on the meta device. The host waits once per device."""
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if not tensor.is_meta:
            by_device.setdefault(tensor.device, {})[name] = checksum(tensor)
    sums: dict[str, int] = {}
    for each in by_device.values():
        sums |= zip(each, torch.stack([*each.values()]).tolist(), strict=True)
    return {name: f"with checksum {sums[name] % 2**64:016x}" for name in tensors if name in sums}


def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of a tensor's bits, 0-d int64 on its device: the sum of its elements' bits as integers, weighted by
    position. Of a tensor subclass, return the sum of the checksums of the inner tensors that its `__tensor_flatten__` names,
    weighted by position; 0 if it has no such method."""
    # Integers wrap around, so the order of summation does not matter.
    if type(tensor.data) is not Tensor:  # a subclass: the checksum of its inner tensors, if it lists them
        sums = [*map(checksum, _torch.inner_tensors(tensor)), torch.tensor(0, device=tensor.device)]
        return (torch.stack(sums) * _weights(len(sums), tensor.device)).sum()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # Elements of 8 bytes count as two of 4, because a weight would shift the top bit out of a 64-bit product.
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
