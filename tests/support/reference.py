"""Full gradients and parameters of a sharded model, and the comparison of tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from tests.support.gathered import gathered

LR = 1e-2


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.1)


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return name -> full copy of each tensor; shards of DTensors are joined over all ranks. Collective. Fails if values that are
    replicated differ between ranks."""
    # Joined here because `full_tensor` lacks uneven strided shards. The last mesh axis splits first: join the first one first.
    parts = {name: local_of(t).detach().clone() for name, t in tensors.items()}
    cut = {name: t for name, t in tensors.items() if isinstance(t, DTensor)}
    if not cut:
        return parts
    mesh = next(iter(cut.values())).device_mesh
    for axis in range(mesh.ndim):
        all_sent = gathered({name: parts[name] for name in cut}, mesh.get_group(axis))
        for name, t in cut.items():
            pieces, placement = [part[name] for part in all_sent], t.placements[axis]
            if isinstance(placement, Replicate):
                assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"{name} differs over {placement}"
            else:
                parts[name] = torch.cat(pieces, dim=placement.dim)
    for name, t in cut.items():
        assert parts[name].shape == t.shape, f"{name}: the shards join to {parts[name].shape}, it should be {t.shape}"
    return parts


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Return name -> full gradient of every parameter, None if it has none. Collective."""
    found = {name: p.grad for name, p in model.named_parameters()}
    full = whole({name: grad for name, grad in found.items() if grad is not None})
    return {name: full.get(name) for name in found}


def params_of(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> full copy of every parameter. Collective."""
    return whole(dict(model.named_parameters()))


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_close(
    found: Mapping[str, Tensor | None],
    wanted: Mapping[str, Tensor | None],
    tolerance: float = 1e-6,
    least: Mapping[str, float] | float = 0.0,
) -> None:
    """Fail unless `found` and `wanted` have the same names, shapes and Nones, and the largest error of each tensor is at most
    `tolerance` times the largest value of its wanted tensor, or times `least` (for all, or by name) if that is more."""
    assert found.keys() == wanted.keys()
    problems = []
    for name, expected in wanted.items():
        value = found[name]
        if expected is None or value is None:
            problems += [] if value is expected else [f"{name} is {value}, should be {expected}"]
            continue
        assert value.shape == expected.shape, (name, value.shape, expected.shape)
        value, expected = value.detach().cpu(), expected.detach().cpu()
        if torch.equal(value, expected):
            continue
        error, largest = (value.double() - expected.double()).abs().max().item(), expected.double().abs().max().item()
        largest = max(largest, least.get(name, 0.0) if isinstance(least, Mapping) else least)
        if not error <= tolerance * largest:  # a NaN is no match
            problems.append(f"{name} differs by {error:.3g}, the largest is {largest:.3g}")
    assert not problems, "\n".join(problems)
