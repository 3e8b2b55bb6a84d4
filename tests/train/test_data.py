"""The order of sequences is a bijection, and validations read each token once."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from accordion.train.data import (
    IGNORED,
    GlobalOrder,
    Sequences,
    Share,
    permutation,
    validation_batches,
    validation_order,
)
from accordion.train.packing import Collate


def test_orders_are_random_and_stay_the_same() -> None:
    order = permutation(10_000, 7)
    assert sorted(order) == list(range(10_000))
    assert order[:4].tolist() == [1977, 3880, 52, 2551]  # a run resumes with later versions of numpy
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert (order == permutation(10_000, 8)).mean() < 0.01


def shares(world: int, micro_batch: int, accumulate: int) -> list[Share]:
    return [Share(rank=r, world=world, micro_batch=micro_batch, accumulate=accumulate) for r in range(world)]


def test_an_epoch_reads_each_sequence_at_most_once_and_drops_the_tail() -> None:
    order = GlobalOrder(50, Share(rank=0, world=2, micro_batch=6, accumulate=1), seed=3)
    assert order.steps_per_epoch == 4
    assert "the remaining 2 do not fill a step" in order.notes("rows")[1]
    ranks = [islice(GlobalOrder(50, share, seed=3), 8) for share in shares(2, 6, 1)]
    batches = [own + others for own, others in zip(*ranks, strict=True)]
    first, second = ({i for batch in batches[k : k + 4] for i in batch} for k in (0, 4))
    assert len(first) == len(second) == 48
    assert sorted(batches[0]) != sorted(batches[4])


SEQUENCES = Sequences(np.arange(1001, dtype=np.uint16), 10)
collate = Collate(10, "none")


def test_windows_overlap_by_one_token() -> None:
    assert [len(Sequences(np.arange(count), 10)) for count in (1001, 1000, 0)] == [100, 99, 0]
    ((inputs, labels),) = SEQUENCES[3]
    assert (inputs.dtype, inputs.tolist(), labels.tolist()) == (torch.int64, [*range(30, 40)], [*range(31, 41)])


@pytest.mark.parametrize("num_tokens", [2, 9, 10, 11, 12, 55, 101, 997])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_validation_reads_each_token_once_in_equally_many_batches(num_tokens: int, world: int) -> None:
    rows = Sequences(np.arange(num_tokens, dtype=np.uint16), 10, rest=True)
    ranks = [list(validation_batches(rows, range(len(rows)), share, collate)) for share in shares(world, 2, 1)]
    assert len({len(batches) for batches in ranks}) == 1
    labels = [batch["labels"][:num_rows] for batches in ranks for batch, num_rows in batches]
    seen = sorted(int(i) for label in labels for i in label.flatten() if i != IGNORED)
    assert seen == list(range(1, num_tokens))


def test_validation_reads_all_rows_or_the_same_random_ones_each_time() -> None:
    sample = validation_order(1000, 100)
    assert list(validation_order(1000, 0)) == list(validation_order(1000, 1000)) == list(range(1000))
    assert list(sample) == list(validation_order(1000, 100)) == sorted(set(sample))
    assert len(sample) == 100
    assert 300 < sum(sample) / len(sample) < 700  # not the first ones
