"""The integer arithmetic of shards: every element has one owner, padding is bounded, small things travel together."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from accordion.engine.gather import in_runs
from accordion.engine.layout import (
    ALIGN_BYTES,
    LARGE_PACK_LIMIT_BYTES,
    PACK_LIMIT_BYTES,
    PADDING_BYTES,
    PADDING_SHARE,
    Cut,
    columns,
    cut,
    full_offsets,
    message,
)

SHAPES = [(), (1,), (7,), (0, 3), (33, 16), (4096, 512), (8, 28672, 4096), (3, 5, 7), (1, 1024), (2, 3, 1000)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 64, 1024, 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_has_one_owner(shape: tuple[int, ...], num_ranks: int) -> None:
    c = cut(shape, num_ranks, 4)
    if c.dim is None:
        assert c.local_shape(num_ranks - 1) == shape
        return
    assert sum(c.rows_of(rank) for rank in range(num_ranks)) == shape[c.dim]
    assert all(0 <= c.rows_of(rank) <= c.chunk for rank in range(num_ranks))
    assert c.padded_numel == c.shard_numel * num_ranks >= math.prod(shape)
    assert math.prod(c.local_shape(0)) == c.rows_of(0) * c.row_numel


def test_scalars_and_small_awkward_tensors_are_kept_whole() -> None:
    assert cut((), 8, 4).dim is None
    assert cut((3, 5, 700), 4096, 4).dim is None


def test_padding_is_bounded_or_small() -> None:
    generator = random.Random(0)
    for _ in range(500):
        shape = tuple(generator.randint(1, 3000) for _ in range(generator.randint(1, 2)))
        num_ranks = generator.choice([2, 3, 8, 64])
        c = cut(shape, num_ranks, 4)
        padding = c.padded_numel - c.numel
        small = padding * 4 <= PADDING_BYTES
        least = c.dim is not None and padding == min(
            Cut(shape, d, num_ranks).padded_numel - c.numel for d in range(len(shape))
        )
        assert c.dim is None or small or padding <= PADDING_SHARE * c.numel or least
    for experts, num_ranks in itertools.product((1, 2, 3), (2, 3, 4)):
        c = cut((experts, 97, 350), num_ranks, 4)
        assert c.padded_numel <= 1.05 * c.numel, "fused experts, fewer than ranks"


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 64])
def test_shards_of_a_message_do_not_overlap_and_packed_ones_are_one_row(num_ranks: int, itemsize: int) -> None:
    cuts = [
        cut(shape, num_ranks, itemsize) for shape in [(4096, 512), (512,), (), (33, 16), (1024, 512), (7,), (2, 3, 100)]
    ]
    for even_only, num_flags in [(False, 0), (True, 5)]:
        msg = message(cuts, itemsize, even_only=even_only, num_flags=num_flags)
        assert sorted([*msg.direct, *msg.packed, *msg.whole]) == list(range(len(cuts)))
        spans = sorted((msg.shard_offsets[i], msg.shard_offsets[i] + (c.shard_numel)) for i, c in enumerate(cuts))
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert spans[-1][1] <= msg.shard_numel
        at = msg.pack_start
        for i in msg.packed:
            assert msg.shard_offsets[i] == at
            at += cuts[i].shard_numel
        assert at - msg.pack_start == msg.pack_numel
        for i in msg.direct:
            assert num_ranks == 1 or cuts[i].padded_numel * itemsize >= PACK_LIMIT_BYTES
            assert not even_only or cuts[i].rows % num_ranks == 0


def test_a_communicator_may_ask_to_pack_more() -> None:
    cuts = [cut(shape, 2, 4) for shape in [(1024, 1024), (1024, 1023), (8,)]]
    assert message(cuts, 4).direct == (0, 1)
    assert message(cuts, 4, pack_limit_bytes=LARGE_PACK_LIMIT_BYTES).direct == (0,)


def test_full_parameters_start_aligned_and_have_room_for_their_padding() -> None:
    cuts = [cut(shape, 3, 2) for shape in [(7, 3), (1000, 30), (), (5,)]]
    offsets, total = full_offsets(cuts, 2)
    for c, start, end in zip(cuts, offsets, [*offsets[1:], total], strict=True):
        assert start * 2 % ALIGN_BYTES == 0
        assert end - start >= c.padded_numel


@pytest.mark.parametrize("most", [1, 7, 64, 1000])
def test_columns_cover_every_element_once_in_pieces_that_are_no_larger(most: int) -> None:
    numels = [5, 64, 1, 130, 7, 0, 3]
    pieces = columns(numels, most)
    assert all(sum(stop - start for _, start, stop in piece) <= most for piece in pieces)
    found = [(i, at) for piece in pieces for i, start, stop in piece for at in range(start, stop)]
    assert found == [(i, at) for i, numel in enumerate(numels) for at in range(numel)]
    small = [numel for numel in numels if numel <= most]
    assert len(pieces) <= sum(-(-numel // most) for numel in numels if numel > most) + len(small)
    if most == 1000:
        assert len(pieces) == 1


def test_neighbours_of_one_shape_that_lie_equally_far_apart_are_copied_at_once() -> None:
    places = [(0, 4), (8, 4), (16, 4), (24, 6), (30, 6), (50, 6), (60, 4)]  # three even ones; three uneven; one alone
    flat, packed = torch.zeros(64), torch.arange(34.0)
    tos = [flat[at : at + numel].view(2, -1) for at, numel in places]
    sources = [part.view(2, -1) for part in packed.split([numel for _, numel in places])]
    runs = list(in_runs(tos, sources))
    assert [tuple(to.shape) for to, _ in runs] == [(3, 2, 2), (1, 2, 3), (1, 2, 3), (1, 2, 3), (1, 2, 2)]
    for to, source in runs:
        to.copy_(source)
    assert all(torch.equal(to, source) for to, source in zip(tos, sources, strict=True))
