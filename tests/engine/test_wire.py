"""Communication of a step: collectives, bytes, and no copies of large parameters around them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import accordion as acc
from accordion import _torch
from accordion.config import STRATEGIES
from accordion.engine import reduce as reduce_file
from accordion.engine.communicator import Communicator, common_name
from accordion.engine.layout import PACK_LIMIT_BYTES
from tests.devices import device
from tests.inside import unit_in
from tests.support import models
from tests.support.checks import mesh_of, under
from tests.support.meters import Call, Copy, Wire
from tests.support.ranked import on_world
from tests.support.sample import sampled, turns

BF16, FP32 = torch.bfloat16, torch.float32
NUM_BLOCKS = 3
UNITS = NUM_BLOCKS + 1  # and the root
TAG_BYTES = 16  # at most, of what each rank says of itself in a gather: which unit, which call
MODELS = {"small": models.plain, "large": models.wide}


def steady_step(
    mesh, build: str, strategy: acc.Strategy, micros: int = 1, no_sync: bool = False, **options: Any
) -> tuple[list[Call], list[Copy]]:
    """Collectives and copies in forward and backward of the second step; the order of units is known by then."""
    model = acc.shard(MODELS[build](), mesh=mesh, strategy=strategy, **options)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters()))
    for step in range(2):
        wire = Wire()
        for micro in range(micros):
            tokens, targets = models.batch(step, micro, mesh.get_rank(), vocab=48, shape=(1, 4))
            with wire, acc.no_sync(model) if no_sync and micro < micros - 1 else nullcontext():
                models.loss_of(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wire.calls, wire.copies


def units_of(model: models.Tiny) -> list[list[Tensor]]:
    """Return the parameters of the root and of each block."""
    blocks = [list(block.parameters()) for block in model.blocks]
    inside = {id(p) for block in blocks for p in block}
    return [[p for p in model.parameters() if id(p) not in inside], *blocks]


def padded_bytes(params: Iterable[Tensor], num_ranks: int, itemsize: int = 4) -> int:
    """Bytes of all parameters, each padded to the same number of rows on every rank."""
    return sum(-(-p.shape[0] // num_ranks) * num_ranks * p[0].numel() * itemsize for p in params)


# (strategy, micro-batches, no_sync) -> collectives of a step for each unit. The root and the last block may stay full from
# their forward to their backward: two gathers less.
TABLE: dict[tuple[str, int, bool], dict[str, int]] = {
    ("full_shard", 1, False): {"gather": 2, "reduce": 1},
    ("shard_grad_op", 1, False): {"gather": 1, "reduce": 1},
    ("shard_optim", 1, False): {"gather": 1, "reduce": 1},
    ("no_shard", 1, False): {"all_reduce": 1},
    ("hybrid_shard", 1, False): {"gather": 2, "reduce": 1, "all_reduce": 1},
    ("hybrid_shard_optim", 1, False): {"gather": 3, "reduce": 2},  # the rows of other replicas once, a reduce over them
    ("full_shard", 2, False): {"gather": 4, "reduce": 2},
    ("full_shard", 2, True): {"gather": 4, "reduce": 1},
    ("shard_optim", 2, True): {"gather": 1, "reduce": 1},
    ("no_shard", 2, True): {"all_reduce": 1},
}


@pytest.mark.parametrize(("strategy", "micros", "no_sync"), TABLE)
def test_collectives_of_a_step_are_those_of_the_table(world, strategy, micros, no_sync):
    policy, wanted = STRATEGIES[strategy], TABLE[strategy, micros, no_sync]
    for calls, _ in world.run_mesh(*mesh_of(policy), steady_step, "small", policy, micros=micros, no_sync=no_sync):
        found = Counter(call.kind for call in calls)
        assert found.keys() == wanted.keys()
        for kind, times in wanted.items():
            fewer = 2 * micros if kind == "gather" and times > 1 else 0
            assert times * UNITS - fewer <= found[kind] <= times * UNITS, found


REDUCED = ("full_shard", "shard_grad_op", "shard_optim", "hybrid_shard")
WAYS = [(reduce, build) for build in MODELS for reduce in ("exchange", "reduce_scatter")]
BYTE_ROWS = [(strategy, *way, FP32) for strategy in REDUCED for way in WAYS]
BYTE_ROWS += [("shard_grad_op", reduce, "large", BF16) for reduce in ("exchange", "reduce_scatter")]
SHOWN = {(strategy, *way) for strategy, way in turns(REDUCED, WAYS)}


@pytest.mark.parametrize(
    ("strategy", "reduce", "build", "dtype"), sampled(BYTE_ROWS, lambda *row: row[:3] in SHOWN or row[3] == BF16)
)
def test_bytes_are_those_of_the_padded_parameters(world, strategy, reduce, build, dtype):
    """A gather carries each shard once, with a tag a rank; a reduce each gradient, with flags and a tag.

    The sum is float32 in any case: the exchange sends gradients as they are and adds on arrival, a reduce-scatter casts first.
    """
    policy, precision = dataclasses.replace(STRATEGIES[strategy], reduce=reduce), acc.Precision(params=dtype)
    sizes = [padded_bytes(unit, 2, dtype.itemsize) for unit in units_of(MODELS[build]())]
    reduced = sum(sizes) if reduce == "exchange" else sum(sizes) * 4 // dtype.itemsize
    flags = 4 * 2 * sum(len(unit) + 1 for unit in units_of(MODELS[build]()))
    for calls, _ in world.run_mesh(*mesh_of(policy), steady_step, build, policy, precision=precision):
        sent = {kind: sum(call.num_bytes for call in calls if call.kind == kind) for kind in ("gather", "reduce")}
        gathers = 1 if policy.keep_until_backward or strategy == "shard_optim" else 2
        kept = 0 if gathers == 1 else sizes[0] + sizes[-1]  # the root and the last block may stay
        assert gathers * sum(sizes) - kept <= sent["gather"] <= gathers * (sum(sizes) + 2 * TAG_BYTES * len(sizes))
        assert {call.dtype for call in calls if call.kind == "gather"} == {dtype}
        assert reduced <= sent["reduce"] <= reduced + flags
        summed = sum(call.num_bytes for call in calls if call.kind == "all_reduce")
        assert (reduced / 2 <= summed <= reduced / 2 + flags) if policy.hybrid else summed == 0


def test_one_rank_says_nothing_and_copies_nothing(world):
    for strategy in ("full_shard", "shard_grad_op", "shard_optim", "no_shard"):
        for calls, copies in world.run(1, steady_step, "large", STRATEGIES[strategy]):
            assert calls == []
            assert large(copies, 1) == []


def large(copies: list[Copy], num_ranks: int) -> list[Copy]:
    """Those of a parameter beyond the packing limit, or of one rank's shard of it.

    But for a shard to its own place in the full parameter, which gloo's gathers in place do inside.
    """
    limit = PACK_LIMIT_BYTES // 4 // num_ranks
    shard = max(p.numel() for unit in units_of(models.wide()) for p in unit) // 2
    plain = {
        copy for copy in copies if copy.name.startswith("aten::_foreach_copy_") and not (copy.cast or copy.strided)
    }
    return [copy for copy in copies if copy.numel >= limit and not (copy in plain and copy.numel <= shard)]


@under("full_shard", "no_shard", "hybrid_shard_optim")
def test_large_parameters_are_never_copied_around_a_collective(world, strategy):
    policy = dataclasses.replace(STRATEGIES[strategy], reduce="exchange")
    for _, copies in world.run_mesh(*mesh_of(policy), steady_step, "large", policy):
        assert large(copies, 4 if policy.optim_over_replicas else 2) == []


def test_nor_around_a_reduce_scatter(run_fake):
    """On the fake group: gloo's reduce-scatter copies in its wait, where it cannot be told from ours."""
    for shape, strategy in ((2, acc.FULL_SHARD), ((2, 2), acc.HYBRID_SHARD), ((2, 2), acc.HYBRID_SHARD_OPTIM)):
        policy = dataclasses.replace(strategy, reduce="reduce_scatter")
        _, copies = run_fake(shape, 0, steady_step, "large", policy)
        assert large(copies, 4) == []


def test_a_change_of_dtype_is_one_copy_and_no_more(world):
    """Each gather casts the own shard into place; an exchange sends gradients as they are."""
    policy = dataclasses.replace(acc.SHARD_GRAD_OP, reduce="exchange")
    for _, copies in world.run(2, steady_step, "large", policy, precision=acc.Precision(params=torch.bfloat16)):
        found = large(copies, 4)
        big = sum(p.numel() >= PACK_LIMIT_BYTES // 4 for unit in units_of(models.wide()) for p in unit)
        assert all(copy.cast for copy in found)
        assert 0 < len(found) <= big


@on_world(4)
def test_ranks_that_know_different_groups_meet(mesh) -> None:
    """A communicator of the engine's own, where each rank knows another number of groups; NCCL's communicators have one.

    In the end all know as many, which torch counts since 2.15 whatever a group is called.
    """
    rank, last = mesh.get_rank(), mesh.size() - 1
    for _ in range(last - rank):
        dist.new_group([rank], use_local_synchronization=True)
    communicator = Communicator(mesh.get_group(), torch.device("cpu"))
    group = _torch.named_group(common_name([communicator]), communicator.ranks, None)
    value = torch.ones(1, device=device())
    dist.all_reduce(value, group=group)
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    assert value.item() == 4.0


@pytest.mark.parametrize(("reduce", "share"), [("exchange", 0.6), ("reduce_scatter", 0.13)])
@on_world(2)
def test_gradients_that_are_reduced_in_pieces_receive_or_cast_less_at_a_time(mesh, reduce: str, share: float) -> None:
    """They are those reduced at once, bit for bit. A head of 1.05 billion parameters took 4 GiB in float32 on its way."""
    found, arriving = [], []
    for in_pieces in (False, True):
        torch.manual_seed(0)
        precision = acc.Precision(params=torch.bfloat16)
        strategy = dataclasses.replace(acc.FULL_SHARD, reduce=reduce)
        model = models.Tiny(width=256, hidden=2112, num_blocks=1)
        acc.shard(model, mesh=mesh, precision=precision, strategy=strategy, units={models.Block})
        unit = unit_in(model.blocks[0])
        axis = unit.groups[0].context.shard
        axis.reduce.in_one_piece = not in_pieces
        sizes = {"PIECE_BYTES": 2 * PACK_LIMIT_BYTES, "CAST_BYTES": PACK_LIMIT_BYTES}
        tokens, targets = models.batch(0, 0, mesh.get_rank(), vocab=48, shape=(1, 4))
        with mock.patch.multiple(reduce_file, **sizes):
            models.loss_of(model(tokens), targets).backward()
        (plan,) = unit.groups[0].plans(unit.trained.indices, torch.bfloat16)
        assert plan.exchange == (reduce == "exchange")
        pieces = plan.pieces if plan.exchange else plan.casts
        assert len(pieces) == ((2 if plan.exchange else 8) if in_pieces else 1), pieces
        arriving.append(plan.received_numel if plan.exchange else plan.cast_numel)
        found.append([p.grad.to_local() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert arriving[1] <= share * arriving[0]
