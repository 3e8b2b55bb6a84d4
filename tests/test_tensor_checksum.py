"""A checksum of a tensor subclass depends on the order of its inner tensors."""

from __future__ import annotations

import torch
from torch.testing._internal.two_tensor import TwoTensor

from accordion.tensor_checksum import checksum


def test_swapped_inner_tensors_have_another_checksum() -> None:
    first, second = torch.arange(4.0), torch.ones(4)
    assert checksum(TwoTensor(first, second)) != checksum(TwoTensor(second, first))
