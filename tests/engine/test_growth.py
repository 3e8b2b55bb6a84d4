"""Large worlds, on torch's fake process group: shards, bytes and collectives are what `layout` says at any size."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import accordion as acc
from accordion.config import STRATEGIES
from accordion.engine import layout
from tests.engine.test_wire import TAG_BYTES, units_of
from tests.support import models
from tests.support.meters import Allocations, Wire
from tests.support.reference import local_of
from tests.support.sample import sampled

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
