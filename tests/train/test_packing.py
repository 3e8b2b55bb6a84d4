"""Rows of several examples: the losses of each example are those of the example alone, whatever shares its row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from accordion.train import language_work
from accordion.train.data import GlobalOrder, Share
from accordion.train.packing import Collate, ExampleRows, LengthOrder, packed
from accordion.train.token_tables import Examples
from tests.support import language_folders
from tests.train.tables import examples_of

SEQ = 24


def examples(count: int = 40, longest: int = 20, seed: int = 0) -> Examples:
    draws = np.random.default_rng(seed)
    lengths = draws.integers(3, longest, count)
    tokens = draws.integers(1, 300, lengths.sum())
    answers = draws.random(lengths.sum()) < 0.4
    ends = np.cumsum(lengths)
    answers[ends - 1] = True
    return examples_of(tokens, answers, ends)


def test_packed_rows_have_each_example_once_and_little_padding() -> None:
    lengths = np.random.default_rng(1).integers(1, 65, 500)
    rows = packed(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(lengths[row].sum() <= 64 for row in rows)
    assert len(rows) <= 1.05 * lengths.sum() / 64
    assert packed(np.array([64, 64]), 64) == [[0], [1]]


def test_examples_that_are_cut_are_counted() -> None:
    held = examples(200, longest=60)
    rows = ExampleRows(held, SEQ, "none")
    kept, lost, cut = [], 0, 0
    for i in range(len(held)):
        labels = held[i][1][1:]
        lost += labels[SEQ:].sum()
        kept += [i] if labels[:SEQ].any() else []
        cut += len(labels) > SEQ and bool(labels[:SEQ].any())
    assert rows.indices.tolist() == kept
    assert (rows.num_lost, rows.num_long) == (lost, cut + 200 - len(kept))
    assert rows.lengths.max() == SEQ
    assert f"{rows.num_long} of 200 examples are longer" in str(rows.note())
    assert (f"; {200 - len(kept)} of them have no answer left" in str(rows.note())) == (len(kept) < 200)
    assert ExampleRows(examples(), SEQ, "none").note() is None


def alone(model: Any, held: Examples, number: int) -> tuple[float, int]:
    """Return the sum of the answers' losses of one example, computed by plain transformers."""
    ids, answers = (torch.tensor(values) for values in held[number])
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
    losses = functional.cross_entropy(logits, ids[1:], reduction="none")
    return float(losses[answers[1:]].sum()), int(answers[1:].sum())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {"llama": language_folders.llama(place / "llama"), "gpt2": language_folders.gpt2(place / "gpt2")}


@pytest.mark.parametrize(
    ("kind", "attention", "flat"),
    [("llama", "sdpa", False), ("llama", "eager", False), ("llama", "sdpa", True), ("gpt2", "sdpa", False)],
)
@torch.no_grad()
def test_packed_losses_are_those_of_each_example_alone(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str, attention: str, flat: bool
) -> None:
    """`flat`: the batch as one row, as flash attention needs it; here with the same kernels."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders[kind], attn_implementation=attention).eval()
    monkeypatch.setattr(language_work, "in_one_row", lambda model: flat)
    held = examples(14)
    rows = ExampleRows(held, SEQ, "documents")
    collate = Collate(SEQ, "documents")
    assert len(rows) < len(held)
    for at in range(0, len(rows), 4):
        numbers = [int(rows.indices[i]) for row in rows.rows[at : at + 4] for i in row]
        expected = [alone(model, held, number) for number in numbers]
        batch = collate([rows[i] for i in range(at, min(at + 4, len(rows)))])
        total, count = language_work.label_losses(model, batch)
        assert float(total) == pytest.approx(sum(loss for loss, _ in expected), rel=1e-4)
        assert int(count) == sum(n for _, n in expected)
        assert int(batch["num_tokens"]) == sum(held.lengths[n] - 1 for n in numbers)


@pytest.mark.parametrize("packing", ["none", "length"])
@torch.no_grad()
def test_one_example_in_a_row_has_the_same_loss(folders: dict[str, Path], packing: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders["llama"]).eval()
    held = examples()
    rows = ExampleRows(held, SEQ, packing)
    batch = Collate(SEQ, packing)([rows[i] for i in range(8)])
    numbers = [row[0] for row in rows.rows[:8]]
    expected = [alone(model, held, int(rows.indices[i])) for i in numbers]
    total, _ = language_work.label_losses(model, batch)
    assert float(total) == pytest.approx(sum(loss for loss, _ in expected), rel=1e-4)
    assert batch["input_ids"].shape[1] == int(rows.lengths[numbers].max())


@pytest.mark.parametrize(("world", "micro", "accumulate"), [(1, 8, 1), (2, 2, 2), (4, 1, 2)])
def test_rows_of_a_step_have_similar_lengths_on_any_number_of_ranks(world: int, micro: int, accumulate: int) -> None:
    def order_of(world: int, rank: int, micro: int, accumulate: int) -> LengthOrder:
        return LengthOrder(43, Share(rank=rank, world=world, micro_batch=micro, accumulate=accumulate), seed=3)

    orders = [iter(order_of(world, rank, micro, accumulate)) for rank in range(world)]
    steps = [{i for _ in range(accumulate) for order in orders for i in next(order)} for _ in range(20)]  # four epochs
    assert all(max(step) - min(step) == 7 for step in steps)
    assert [len(set().union(*steps[at : at + 5])) for at in (0, 5, 10, 15)] == [40] * 4
    assert len(set().union(*steps)) == 43
    whole = order_of(1, 0, 8, 1)
    batches = iter(whole)
    assert steps == [set(next(batches)) for _ in range(20)]
    state = order_of(world, 0, micro, accumulate).state_dict()
    assert whole.continues(state)
    assert not order_of(1, 0, 4, 1).continues(state)
    assert not whole.continues(GlobalOrder(43, whole.share, 3).state_dict())


def test_rows_that_are_sorted_by_length_are_the_same_rows() -> None:
    held = examples()
    rows = ExampleRows(held, SEQ, "length")
    lengths = rows.lengths[[row[0] for row in rows.rows]]
    assert lengths.tolist() == sorted(rows.lengths)
    assert sorted(row[0] for row in rows.rows) == list(range(len(held)))
