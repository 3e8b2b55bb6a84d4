"""Communication of a step: collectives, bytes, no copies of large parameters around them, and the same in large worlds."""

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
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import accordion as acc
from accordion import _torch
from accordion.config import STRATEGIES
from accordion.engine import layout
from accordion.engine import reduce as reduce_file
from accordion.engine.communicator import Communicator, common_name
from tests.devices import device
from tests.inside import unit_in
from tests.support import models
from tests.support.checks import mesh_of, under
from tests.support.meters import Allocations, Call, Copy, Wire
from tests.support.ranked import on_world
from tests.support.reference import local_of
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
    limit = layout.PACK_LIMIT_BYTES // 4 // num_ranks
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
        big = sum(p.numel() >= layout.PACK_LIMIT_BYTES // 4 for unit in units_of(models.wide()) for p in unit)
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
        sizes = {"PIECE_BYTES": 2 * layout.PACK_LIMIT_BYTES, "CAST_BYTES": layout.PACK_LIMIT_BYTES}
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


# -- large worlds, on torch's fake process group: shards, bytes and collectives are what `layout` says at any size

SHARD_RANKS = 8  # of a hybrid mesh
BUILDS = {
    "small": models.plain,
    "large": lambda: models.seeded(vocab=1000, width=64, hidden=2112),
    "experts": lambda: models.seeded(width=64, hidden=512, experts=8),
    "uneven": models.uneven,
}


def local_shape(p: nn.Parameter, strategy: acc.Strategy, mesh) -> tuple[int, ...]:
    """Return the shape of this rank's shard: its rows of `p`, divided again over replicas if the strategy does so."""
    c = layout.cut(p.shape, mesh.size(mesh.ndim - 1), 4)
    shape = c.local_shape(mesh.get_local_rank(mesh.ndim - 1))
    if c.dim is None or not strategy.optim_over_replicas:
        return shape
    return layout.Cut(shape, c.dim, mesh.size(0)).local_shape(mesh.get_local_rank(0))


def grow(mesh, strategies: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """For each strategy and model: what this rank keeps, and what it says in a steady step."""
    steps = {}
    for name in strategies:
        for build, make in BUILDS.items():
            plain, strategy = make(), STRATEGIES[name]
            with Allocations() as memory:
                model = acc.shard(make(), mesh=mesh, strategy=strategy, units=acc.only_blocks())
            params, original = dict(model.named_parameters()), dict(plain.named_parameters())
            assert params.keys() == original.keys()
            for key, p in params.items():
                assert p.shape == original[key].shape
                assert local_of(p).shape == local_shape(original[key], strategy, mesh), key
                if p.placements == (Shard(0),):
                    start = -(-p.shape[0] // mesh.size()) * mesh.get_local_rank()
                    assert torch.equal(local_of(p), original[key][start : start + len(local_of(p))])
            optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters()))
            for _ in range(2):
                tokens, targets = models.batch(0, 0, 0, vocab=plain.embed.num_embeddings, shape=(1, 4))
                with Wire() as wire:
                    models.loss_of(model(tokens), targets).backward()
                for key, p in params.items():
                    assert p.grad is not None
                    assert local_of(p.grad).shape == local_of(p).shape, key
                    assert p.grad.placements == p.placements
                optimizer.step()
                optimizer.zero_grad()
            num_bytes: Counter[str] = Counter()
            for call in wire.calls:
                num_bytes[call.kind] += call.num_bytes
            calls = Counter(call.kind for call in wire.calls)
            steps[name, build] = {"held": memory.live_bytes, "calls": calls, "bytes": num_bytes}
    return steps


def cuts_of(build: str, num_ranks: int) -> list[layout.Cut]:
    return [layout.cut(p.shape, num_ranks, 4) for p in BUILDS[build]().parameters()]


def num_units(build: str, num_ranks: int) -> tuple[int, int]:
    """Units, and those among them that have anything to gather: small parameters may be kept whole."""
    units = units_of(BUILDS[build]())
    return len(units), sum(any(layout.cut(p.shape, num_ranks, 4).dim is not None for p in unit) for unit in units)


def assert_flat(name: str, build: str, num_ranks: int, found: dict[str, Any]) -> None:
    """One axis: shards and messages hold every padded row once, and no unit speaks more often than among two ranks."""
    cuts = cuts_of(build, num_ranks)
    rows = sum(c.shard_numel for c in cuts) * 4
    whole = sum(c.dim is None for c in cuts)
    assert rows <= found["held"] <= rows + 256 * len(cuts)
    units, cut_units = num_units(build, num_ranks)
    gathers = 2 if name in ("full_shard", "hybrid_shard") else 1
    direct = sum(c.padded_numel * 4 >= layout.PACK_LIMIT_BYTES for c in cuts)  # each a call of its own on this group
    assert gathers * cut_units - 2 * (gathers - 1) <= found["calls"]["gather"] <= gathers * (units + direct)
    assert cut_units <= found["calls"]["reduce"] <= units
    sums = units if name == "hybrid_shard" else 0  # over replicas
    assert sums <= found["calls"]["all_reduce"] <= sums + whole
    padded = sum(c.padded_numel for c in cuts if c.dim is not None) * 4
    flags = 4 * num_ranks * (len(cuts) + units)  # one a parameter: has it a gradient, and one a unit: its tag
    assert padded <= found["bytes"]["reduce"] <= padded + flags
    assert padded <= found["bytes"]["gather"] <= gathers * (padded + TAG_BYTES * num_ranks * units)


ROWS = [(num_ranks, place) for num_ranks in (8, 64, 1024) for place in ("first", "middle", "last")]


@pytest.mark.parametrize(
    ("num_ranks", "place"),
    sampled(ROWS, lambda num_ranks, place: (num_ranks, place) in ((1024, "middle"),)),
)
def test_shards_bytes_and_collectives_at_any_size(run_fake, num_ranks, place):
    rank = {"first": 0, "middle": num_ranks // 2 + 1, "last": num_ranks - 1}[place]
    found = run_fake(num_ranks, rank, grow, ["full_shard", "shard_grad_op", "shard_optim"])
    for (name, build), facts in found.items():
        assert_flat(name, build, num_ranks, facts)


@pytest.mark.parametrize("num_ranks", sampled([64, 1024], (1024).__eq__))
def test_hybrids_speak_to_few_ranks_at_any_size(run_fake, num_ranks):
    shape = (num_ranks // SHARD_RANKS, SHARD_RANKS)
    found = run_fake(shape, num_ranks - 3, grow, ["hybrid_shard", "hybrid_shard_optim"])
    for build in BUILDS:
        plain, over_all = found["hybrid_shard", build], found["hybrid_shard_optim", build]
        assert_flat("hybrid_shard", build, SHARD_RANKS, plain)
        cuts = cuts_of(build, SHARD_RANKS)
        inner_shards = sum(c.shard_numel for c in cuts) * 4
        assert over_all["held"] >= inner_shards, "the rows of all replicas stand beside the own ones"
        assert over_all["calls"]["reduce"] == 2 * plain["calls"]["reduce"]
