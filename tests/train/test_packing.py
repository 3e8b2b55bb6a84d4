"""Rows of several examples: the losses of each example are those of the example alone, whatever shares its row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from accordion.train import language_work
from accordion.train.packing import Collate, ExampleRows, packed
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
    kept = [i for i in range(len(held)) if held[i][1][1 : SEQ + 1].any()]
    num_long = sum(len(held[i][0]) > SEQ + 1 for i in range(len(held)))
    assert rows.indices.tolist() == kept
    assert rows.lengths.max() == SEQ
    assert f"{num_long} of 200 examples are longer" in str(rows.note())
    assert f"; {200 - len(kept)} of them have no answer left" in str(rows.note())
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
    ("packing", "kind", "attention", "flat"),
    [
        ("documents", "llama", "sdpa", False),
        ("documents", "llama", "eager", False),
        ("documents", "llama", "sdpa", True),
        ("documents", "gpt2", "sdpa", False),
        ("none", "llama", "sdpa", False),
    ],
)
@torch.no_grad()
def test_losses_of_rows_are_those_of_each_example_alone(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, packing: Any, kind: str, attention: str, flat: bool
) -> None:
    """`flat`: the batch as one row, as flash attention needs it; here with the same kernels."""
    model = AutoModelForCausalLM.from_pretrained(folders[kind], attn_implementation=attention).eval()
    monkeypatch.setattr(language_work, "in_one_row", lambda model: flat)
    held = examples(14)
    rows = ExampleRows(held, SEQ, packing)
    collate = Collate(SEQ, packing)
    assert (len(rows) < len(held)) == (packing == "documents")
    for at in range(0, len(rows), 4):
        numbers = [int(rows.indices[i]) for row in rows.rows[at : at + 4] for i in row]
        expected = [alone(model, held, number) for number in numbers]
        batch = collate([rows[i] for i in range(at, min(at + 4, len(rows)))])
        total, count = language_work.label_losses(model, batch)
        assert float(total) == pytest.approx(sum(loss for loss, _ in expected), rel=1e-4)
        assert int(count) == sum(n for _, n in expected)
        assert int(batch["num_tokens"]) == sum(held.lengths[n] - 1 for n in numbers)
        if packing == "none":
            assert batch["input_ids"].shape[1] == max(held.lengths[n] - 1 for n in numbers)
