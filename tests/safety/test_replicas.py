"""Replicas that become different without a counted write are named before they are saved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import accordion as acc
from accordion.config import STRATEGIES
from accordion.safety.same_on_ranks import different
from accordion.tensor_checksum import ROW, checksum, checksums
from tests.support import models
from tests.support.checks import mesh_of, one_loss
from tests.support.ranked import on_mesh


@pytest.mark.parametrize("strategy", ["no_shard", "hybrid_shard"])
@on_mesh(lambda given: mesh_of(STRATEGIES[given["strategy"]]), pool="alone")
def test_different_replicas_are_named_before_a_save(mesh, tmp_path, strategy: str) -> None:
    """Equal replicas are saved; then an element of a weight on rank 0 changes without a counted write."""
    other = 2 if strategy == "hybrid_shard" else 1  # it has the rows of rank 0
    error = f"^replicas differ: rank {other} has other values than rank 0 in head.weight;"
    model = acc.shard(models.plain(), mesh=mesh, strategy=strategy, units={models.Block})
    one_loss(model).backward()
    acc.save(tmp_path / "equal", model)
    if dist.get_rank() == 0:
        model.head.weight.to_local().data.view(-1)[-1:].add_(1.0)  # type: ignore[operator, union-attr]
    with pytest.raises(acc.DivergenceError, match=error):
        acc.save(tmp_path / "save", model)
    assert not (tmp_path / "save").exists()


def test_ranks_are_compared_with_the_first_rank_that_has_their_shard():
    details = {
        0: {"shard": 0, "digests": {"a": "1", "b": "2"}},
        1: {"shard": 1, "digests": {"a": "3", "b": "4"}},
        2: {"shard": 0, "digests": {"a": "1", "b": "2"}},
        3: {"shard": 1, "digests": {"a": "3", "b": "5"}},
    }
    assert different(details) == "rank 3 has other values than rank 1 in b"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("num", [1, 5, ROW, 2 * ROW + 3])
def test_any_bit_changes_a_checksum(dtype, num):
    torch.manual_seed(0)
    values = torch.randint(0, 2, (num,)).to(dtype)
    for place in {0, num // 2, num - 1}:
        changed = values.clone()
        changed.view(torch.uint8)[(place + 1) * dtype.itemsize - 1] ^= 128 if dtype.is_floating_point else 1
        assert checksum(changed) != checksum(values)
    if dtype.is_floating_point:
        assert checksum(-values) != checksum(values)


def test_a_checksum_depends_on_positions():
    for dtype in (torch.float32, torch.complex64, torch.float8_e4m3fn):
        square = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
        square, other = square.to(dtype), square.flip(0).to(dtype)
        assert checksum(square) != checksum(other)
        assert checksum(square) == checksum(square.t().contiguous().t())
    assert checksum(square[:0]) == 0
    rows = torch.arange(3.0 * ROW)
    assert checksum(rows) != checksum(rows.roll(ROW))
    assert checksums({"a": square, "meta": square.to("meta")}).keys() == {"a"}
    assert checksums({}) == {}
