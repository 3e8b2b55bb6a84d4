"""The order of sequences is a bijection, is the same for any number of ranks, and resumes exactly at its position."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accordion.errors import UsageError
from accordion.train.data import (
    IGNORED,
    GlobalOrder,
    Sequences,
    Share,
    check_enough,
    inputs_and_labels,
    loader_of,
    num_sequences,
    num_windows,
    rows_read,
    shuffled,
    validation_batches,
    validation_order,
)


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**31 - 1))
def test_shuffling_is_a_bijection(count: int, seed: int) -> None:
    assert sorted(shuffled(i, count, seed) for i in range(count)) == list(range(count))


def test_shuffling_mixes() -> None:
    order = np.array([shuffled(i, 10_000, 7) for i in range(10_000)])
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert np.abs(np.diff(order)).mean() == pytest.approx(10_000 / 3, rel=0.05)  # of two random places
    assert (order == [shuffled(i, 10_000, 8) for i in range(10_000)]).mean() < 0.01


def shares(world: int, micro_batch: int, accumulate: int) -> list[Share]:
    return [Share(rank=r, world=world, micro_batch=micro_batch, accumulate=accumulate) for r in range(world)]


def global_batches(parts: list[Share], count: int, steps: int) -> list[list[int]]:
    """Return the positions that all ranks read in each step, sorted."""
    orders = [iter(GlobalOrder(count, share, seed=3)) for share in parts]
    accumulate = parts[0].accumulate
    return [sorted(i for order in orders for batch in islice(order, accumulate) for i in batch) for _ in range(steps)]


def test_the_same_global_batches_for_any_number_of_ranks() -> None:
    layouts = [(1, 12, 1), (2, 6, 1), (3, 4, 1), (4, 3, 1), (2, 3, 2), (1, 3, 4), (2, 1, 6)]
    batches = [global_batches(shares(*layout), count=50, steps=9) for layout in layouts]
    assert all(found == batches[0] for found in batches)


def test_an_epoch_reads_each_sequence_at_most_once_and_drops_the_tail() -> None:
    order = GlobalOrder(50, Share(rank=0, world=2, micro_batch=6, accumulate=1), seed=3)
    assert order.steps_per_epoch == 4
    assert order.num_dropped == 2
    epochs = global_batches(shares(2, 6, 1), count=50, steps=8)
    first, second = ([i for batch in epochs[k : k + 4] for i in batch] for k in (0, 4))
    assert len(set(first)) == len(set(second)) == 48
    assert epochs[0] != epochs[4]


SEQUENCES = Sequences(np.arange(1001, dtype=np.uint16), 10)


def read(share: Share, count: int, state: dict[str, int] | None = None) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Return what a rank reads in `count` micro-batches, and its position afterwards. `state`: its position before."""
    order = GlobalOrder(len(SEQUENCES), share, seed=5)
    if state is not None:
        order.load_state_dict(state)
    return list(islice(loader_of(SEQUENCES, order, None, pins=False), count)), order.state_dict()


def test_a_loader_resumes_at_its_position() -> None:
    share = Share(rank=1, world=2, micro_batch=4, accumulate=1)
    whole, _ = read(share, 45)
    for stop in (0, 1, 13, 40):
        _, place = read(share, stop)
        assert torch.equal(torch.stack(read(share, 5, place)[0]), torch.stack(whole[stop : stop + 5]))


def test_windows_overlap_by_one_token() -> None:
    assert num_sequences(1001, 10) == 100
    assert num_sequences(1000, 10) == 99
    assert num_sequences(0, 10) == 0
    (batch,), _ = read(Share(rank=0, world=1, micro_batch=4, accumulate=1), 1)
    assert batch.shape == (4, 11)
    assert batch.dtype == torch.int64
    inputs, labels = inputs_and_labels(batch)
    assert torch.equal(inputs + 1, labels)
    assert (inputs[:, 0] % 10 == 0).all()


@pytest.mark.parametrize("num_tokens", [2, 9, 10, 11, 12, 55, 101, 997])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_reads_each_token_once_in_equally_many_batches(num_tokens: int, world: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.uint16)
    ranks = [
        list(validation_batches(tokens, 10, share, range(num_windows(num_tokens, 10)))) for share in shares(world, 2, 1)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    labels = [inputs_and_labels(batch)[1] for batches in ranks for batch in batches]
    seen = sorted(int(i) for label in labels for i in label.flatten() if i != IGNORED)
    assert seen == list(range(1, num_tokens))


def test_validation_reads_all_rows_or_the_same_random_ones_each_time() -> None:
    sample = validation_order(1000, 100)
    assert list(validation_order(1000, 0)) == list(validation_order(1000, 1000)) == list(range(1000))
    assert list(sample) == list(validation_order(1000, 100)) == sorted(set(sample))
    assert len(sample) == 100
    assert 300 < sum(sample) / len(sample) < 700  # not the first ones
    assert [rows_read(range(1000), 1000), rows_read(sample, 1000)] == ["all 1,000 rows", "100 of 1,000 rows"]
    tokens = np.arange(10_001)
    batches = validation_batches(tokens, 10, Share(rank=0, world=1, micro_batch=8, accumulate=1), sample)
    assert [int(row[0]) for batch in batches for row in batch if row[0] >= 0] == [10 * index for index in sample]


def test_too_little_data_is_named() -> None:
    with pytest.raises(UsageError, match="longer than the data"):
        check_enough(128, 50, 128, 16, "corpus")
    with pytest.raises(UsageError, match="longer than the data"):
        check_enough(10_000, 1, 128, 16, "corpus")
    with pytest.raises(UsageError, match=r"16 sequences of 128 tokens.*corpus has 1"):
        check_enough(129, 50, 128, 16, "corpus")
    check_enough(129, 2, 128, 1, "corpus")
