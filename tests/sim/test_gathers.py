"""All-gathers on a device: kernels, memory on their stream, and dtypes."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from tests.devices import device
from tests.inside import units_of
from tests.support.ranked import on_num_ranks, on_world

pytestmark = pytest.mark.sim
MOST_TEMPORARY = 4096  # bytes that the comparison of tags allocates on a side stream


def traced(function) -> list[tuple]:
    """Return (kind, name, stream, bytes, begin, end) of each event of the device during `function()`."""
    torch.accelerator.synchronize()
    torch.sim.trace(True)
    function()
    torch.accelerator.synchronize()
    return torch.sim.trace(False)


class Experts(nn.Module):
    """Three fused experts, which do not divide over ranks, so that they are sharded on another dim."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 256, 250) / 16)  # 250 rows of another dim: the last rank has fewer
        self.norm = nn.LayerNorm(256)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.pad(torch.einsum("bd,edf->bf", self.norm(x), self.weight), (0, 6))


def one_step(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


@pytest.mark.parametrize("num_ranks", [2, 4])
@on_num_ranks
def test_a_parameter_cut_on_another_dim_is_not_copied_by_its_gather(mesh) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(8, 256), Experts(), Experts(), nn.Linear(256, 8))
    model = acc.shard(copy.deepcopy(alone), mesh, units={Experts})
    assert any(p.cut.dim not in (0, None) for unit in units_of(model) for p in unit.params)
    x = torch.randn(4, 8)
    for _ in range(2):
        one_step(model, x.to(device()))
        model.zero_grad()
    main = torch.accelerator.current_stream().stream_id
    events = traced(lambda: one_step(model, x.to(device())))
    aside = [num_bytes for kind, _, stream, num_bytes, *_ in events if kind == "alloc" and stream != main]
    assert max(aside, default=0) <= MOST_TEMPORARY, sorted(aside)[-3:]
    one_step(alone, x)
    for own, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor().cpu(), want.grad)


def small_blocks(num: int = 3) -> nn.Module:
    """Return `num` blocks of width 16, with the same values on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(num)]
    )


@on_world(2)
def test_tags_are_compared_until_ranks_have_gone_on_alike_for_some_steps_and_after_every_surprise(mesh) -> None:
    model = acc.shard(small_blocks(), mesh, units={nn.Sequential})
    x, compared = torch.randn(4, 16, device=device()), []
    for step in range(8):
        if step == 6:  # what no step did before
            with torch.no_grad():
                model(x)
        events = traced(lambda: one_step(model, x))
        model.zero_grad()
        compared.append(sum(kind == "kernel" and "assert" in name for kind, name, *_ in events))
    assert compared[0] > 0
    assert compared[5] == 0
    assert compared[6] > 0


@on_world(2)
def test_small_parameters_are_unpacked_from_rows_without_gaps(mesh) -> None:
    """CUDA unpacks such rows with one kernel; from rows with gaps it would copy each tensor by itself."""
    model, plain, given = acc.shard(small_blocks(), mesh, units={nn.Sequential}), torch.split_with_sizes_copy, []

    def unpack(rows: Tensor, sizes: list[int], dim: int, out: list[Tensor]) -> None:
        given.append((rows.is_contiguous(), all(to.is_contiguous() for to in out), sum(sizes) == rows.shape[dim]))
        plain(rows, sizes, dim, out=out)

    with mock.patch.object(torch, "split_with_sizes_copy", unpack):
        one_step(model, torch.randn(4, 16, device=device()))
    assert set(given) == {(True, True, True)}


FROZEN = [torch.int16, torch.uint16, torch.complex64, torch.float8_e4m3fn, torch.int8, torch.bool, torch.bfloat16]


class Table(nn.Module):
    """A layer with frozen parameters of any dtype: one that is sent alone, and a small one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        for name, shape in (("large", (600, 256)), ("small", (5, 3))):
            values = torch.randint(0, 2, shape).to(dtype)
            setattr(self, name, nn.Parameter(values, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.large.detach().clone(), self.small.detach().clone()]
        return x + self.layer(x)


@pytest.mark.parametrize("dtype", FROZEN, ids=str)
@on_world(2)
def test_frozen_parameters_of_any_dtype_are_gathered(mesh, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(Table(dtype), Table(dtype))
    model = acc.shard(copy.deepcopy(alone), mesh, units={Table})
    for _ in range(3):
        one_step(model, torch.randn(2, 16).to(device()))
        for own, table in zip(model, alone, strict=True):
            for seen, want in zip(own.seen, (table.large, table.small), strict=True):
                assert torch.equal(seen.cpu().view(torch.uint8), want.detach().view(torch.uint8))
    for name, full in acc.full_state_dict(model).items():
        assert torch.equal(full.cpu().view(torch.uint8), alone.state_dict()[name].view(torch.uint8)), name
