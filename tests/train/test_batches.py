"""The order of samples, those that each rank reads from each kind of data, and the mean over them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accordion.checkpoint import RandomState
from accordion.errors import UsageError
from accordion.train.batches import LoaderBatches, OrderedBatches, batches_of, means_of, rows_of
from accordion.train.data import (
    IGNORED,
    GlobalOrder,
    Sequences,
    Share,
    permutation,
    validation_batches,
    validation_order,
)
from accordion.train.own_task import OwnTask, tried
from accordion.train.packing import Collate
from accordion.train.steps import MeanLoss
from tests.support.own_tasks import Task

SHARE = Share(rank=0, world=1, micro_batch=6, accumulate=1)


def of_ranks(
    world: int, data: object, steps: int, start: dict[int, object] | None = None
) -> tuple[list[set[int]], object]:
    """Return what `world` ranks read together in each step, and their positions afterwards."""
    every = []
    for rank in range(world):
        share = Share(rank=rank, world=world, micro_batch=6 // world, accumulate=2)
        batches = batches_of(data, share, 0, list, pins=False)
        if start is not None:
            assert batches.resume(start)
        every.append(([{int(x) for _ in range(2) for x in next(batches)} for _ in range(steps)], batches.position()))
    assert all(kept == every[0][1] for _, kept in every)
    return [set().union(*(read[i] for read, _ in every)) for i in range(steps)], every[0][1]


class Walk:
    """An iterable that starts at another number in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return (number % 50 for number in range(self.epoch, self.epoch + 50))


@pytest.mark.parametrize("data", [range(50), Walk()], ids=["map", "iter"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_the_data_and_any_number_of_ranks_resumes(data: object, world: int) -> None:
    """Each step has 12 samples, each of them once; four steps make an epoch of 50, and two samples are left out."""
    expected, _ = of_ranks(1, data, 9)
    assert all(len(step) == 12 for step in expected)
    assert [len(set().union(*expected[epoch : epoch + 4])) for epoch in (0, 4)] == [48, 48]
    assert expected[0] != expected[4]
    first, place = of_ranks(world, data, 5)
    again, _ = of_ranks(3, data, 4, place)  # type: ignore[arg-type]
    assert [*first, *again] == expected


def test_kinds_of_data() -> None:
    data = TensorDataset(torch.arange(8.0))
    assert isinstance(batches_of(data, SHARE, 0, list, pins=False), OrderedBatches)
    alone = DataLoader(data, sampler=torch.utils.data.SubsetRandomSampler([1, 2, 3]), batch_size=2)
    batches = batches_of(alone, SHARE, 0, list, pins=False)
    assert isinstance(batches, LoaderBatches)
    read = [next(batches) for _ in range(4)]
    assert [rows_of(batch) for batch in read] == [2, 1, 2, 1]
    other = batches_of(alone, SHARE, 0, list, pins=False)
    assert other.resume({"epoch": 1, "num_batches": 1})
    assert torch.equal(next(other)[0], read[3][0])
    assert not other.resume({"epoch": 1, "num_read": 1})
    assert not other.resume({"epoch": 1, "num_batches": 3}), "the data have shrunk since"
    assert torch.equal(next(other)[0], read[0][0])


def stateful_loader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about what the package calls
        return StatefulDataLoader(range(40), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))


def test_data_with_a_state_dict_resumes_from_it() -> None:
    """Across the end of an epoch of the loader, which has 20 batches."""
    first = batches_of(stateful_loader(), SHARE, 0, list, pins=False)
    read = [[int(x) for x in next(first)] for _ in range(13)]
    state, position = {name: deepcopy(one.state_dict()) for name, one in first.state().items()}, first.position()
    read += [[int(x) for x in next(first)] for _ in range(13)]
    again = batches_of(stateful_loader(), SHARE, 0, list, pins=False)
    for name, one in again.state().items():
        one.load_state_dict(state[name])
    assert again.resume(position)
    assert [[int(x) for x in next(again)] for _ in range(13)] == read[13:]


def counted(mesh: object, accumulate: int) -> tuple[float, float, float]:
    """Return the mean that four ranks compute from sums and counts, also without any, and the expected mean."""
    rank = torch.distributed.get_rank()
    sums = torch.tensor([[5.0, 2.0, 7.0], [1.0, 4.0, 3.0], [0.0, 0.0, 0.0], [8.0, 8.0, 8.0]])[:, :accumulate]
    counts = torch.tensor([[2.0, 0.0, 5.0], [0.0, 1.0, 9.0], [0.0, 0.0, 0.0], [3.0, 5.0, 1.0]])[:, :accumulate]
    found = []
    for scale in (1.0, 0.0):
        counter = MeanLoss(accumulate, 4)
        mine = sum(counter.mean_of((sums[rank, i], scale * counts[rank, i])) for i in range(accumulate))
        left = counter.left()
        total = mine * (1.0 if left is None else left)
        torch.distributed.all_reduce(total)
        found.append(float(total) / 4)
    return found[0], found[1], float(sums.sum() / counts.sum())


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_sums_and_counts_make_the_mean_of_a_step(world: object, accumulate: int) -> None:
    for mean, of_nothing, expected in world.run(4, counted, accumulate):  # type: ignore[attr-defined]
        assert mean == pytest.approx(expected, rel=1e-6)
        assert of_nothing == of_nothing  # no NaN


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("high", "str; it must"),
        (None, "NoneType; it"),
        (("high", 2), "str; it"),
        ((torch.ones(3), 2), "tensor of shape"),
    ],
)
def test_a_metric_that_is_no_number_is_named_and_the_model_keeps_its_modes(value: object, kind: str) -> None:
    """`frozen` stays in evaluation mode, in which its task put it."""
    model = torch.nn.ModuleDict({"frozen": torch.nn.Dropout().eval(), "trained": torch.nn.Dropout()})
    drawn = RandomState().state_dict()["torch"]

    def values_of(batch: object) -> dict[str, object]:
        assert not any(module.training for module in model.modules())
        torch.rand(1)
        return {"off": value}

    with pytest.raises(UsageError, match=f"the task's off is a {kind}"):
        means_of(model, [(torch.ones(2), 2)], values_of, torch.device("cpu"))
    assert [name for name, module in model.named_children() if module.training] == ["trained"]
    assert torch.equal(RandomState().state_dict()["torch"], drawn)


@pytest.mark.parametrize("is_training", [False, True])
def test_a_task_is_tried_in_the_mode_of_its_model(is_training: bool) -> None:
    task, modes = Task(), list[bool]()
    model = task.model().train(is_training)
    model.register_forward_hook(lambda module, *_: modes.append(module.training))
    tried(OwnTask(parts={}, task=task), model, SHARE, 0)
    assert [*modes, model.training] == [is_training] * 2


def test_orders_are_random_and_stay_the_same() -> None:
    order = permutation(10_000, 7)
    assert sorted(order) == list(range(10_000))
    assert order[:4].tolist() == [1977, 3880, 52, 2551]  # a run resumes with later versions of numpy
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert (order == permutation(10_000, 8)).mean() < 0.01
    notes = GlobalOrder(50, Share(rank=0, world=2, micro_batch=6, accumulate=1), seed=3).notes("rows")
    assert notes[1].startswith("an epoch is 4 steps; the remaining 2 do not fill a step")


def test_windows_overlap_by_one_token() -> None:
    assert [len(Sequences(np.arange(count), 10)) for count in (1001, 1000, 0)] == [100, 99, 0]
    ((inputs, labels),) = Sequences(np.arange(1001, dtype=np.uint16), 10)[3]
    assert (inputs.dtype, inputs.tolist(), labels.tolist()) == (torch.int64, [*range(30, 40)], [*range(31, 41)])


@pytest.mark.parametrize("num_tokens", [2, 9, 10, 11, 12, 55, 101, 997])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_validation_reads_each_token_once_in_equally_many_batches(num_tokens: int, world: int) -> None:
    rows = Sequences(np.arange(num_tokens, dtype=np.uint16), 10, rest=True)
    shares = [Share(rank=rank, world=world, micro_batch=2, accumulate=1) for rank in range(world)]
    ranks = [list(validation_batches(rows, range(len(rows)), share, Collate(10, "none"))) for share in shares]
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
