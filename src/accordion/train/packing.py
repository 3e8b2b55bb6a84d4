"""Rows of examples: pack examples into rows, make batches of rows, and preview the first examples."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from accordion.train.data import IGNORED, Row
from accordion.train.token_tables import Examples

SHOWN = 3  # examples shown before a run
LONGEST = 1200  # characters shown of an example; the middle of each part of a longer one is left out
Batch = dict[str, Any]
"""`input_ids` and `labels`, (b, tokens); `position_ids` if rows have several examples; `num_tokens`, without padding."""


def packed(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Pack items of `lengths`, each at most `size`, into rows of at most `size` tokens; return the indices of the items of each
    row. Uses best fit decreasing (Johnson et al., 1974), which needs at most 11/9 of the fewest possible rows, plus one."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of `by_room` that have rows, ascending
    for i in np.argsort(-lengths, kind="stable"):
        length = int(lengths[i])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), size
            rows.append([])
        else:
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        rows[row].append(int(i))
        left = room - length
        if not by_room.setdefault(left, []):
            insort(rooms, left)
        by_room[left].append(row)
    return rows


class ExampleRows(Dataset[Row]):
    """Dataset of rows of examples. An example with more than `seq_len` labels is truncated, and left out if no answer remains.
    `packing`: "documents" (several examples in a row) or "none" (one). There are no rows if no token of any example counts."""

    def __init__(self, examples: Examples, seq_len: int, packing: str) -> None:
        self.examples, self.seq_len = examples, seq_len
        lengths = examples.lengths - 1  # the first token is no label
        fits = np.ones(len(lengths), dtype=bool)
        for i in np.flatnonzero(lengths > seq_len):
            fits[i] = examples[int(i)][1][1 : seq_len + 1].any()
        self.indices = np.flatnonzero(fits)  # (examples,) positions in the data of those with an answer
        self.lengths = np.minimum(lengths[self.indices], seq_len)  # (examples,) labels of each
        self.num_long = int((lengths > seq_len).sum())  # examples that are truncated or left out
        if not examples.num_answers:
            self.rows = []
        elif packing == "documents":
            self.rows = packed(self.lengths, seq_len)
        else:
            self.rows = [[i] for i in range(len(self.indices))]

    def note(self) -> str | None:
        """Return a line on examples that are cut off at `seq_len`; None if there are none."""
        if not self.num_long:
            return None
        num_all = len(self.examples)
        return (
            f"{self.num_long:,} of {num_all:,} examples are longer than data.seq_len {self.seq_len} and cut; "
            f"{num_all - len(self.indices):,} of them have no answer left and are left out"
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        documents = []
        for i in self.rows[index]:
            ids, answers = (values[: self.seq_len + 1] for values in self.examples[int(self.indices[i])])
            labels = np.where(answers[1:], ids[1:].astype(np.int64), IGNORED)
            documents.append((torch.from_numpy(ids[:-1].astype(np.int64)), torch.from_numpy(labels)))
        return documents


@dataclass(frozen=True, slots=True)
class Collate:
    """Function object that makes a batch of rows. Pads each on the right: to `seq_len` tokens if `packing` is "documents", else
    to the longest row, and then to a multiple of `multiple`. In a causal model no token attends to padding, which is last."""

    seq_len: int
    packing: str
    multiple: int = 1

    def __call__(self, rows: list[Row]) -> Batch:
        several = self.packing == "documents"
        lengths = [sum(len(inputs) for inputs, _ in row) for row in rows]
        width = self.seq_len if several else max(1, *lengths)
        width += -width % self.multiple
        batch = {
            "input_ids": torch.zeros(len(rows), width, dtype=torch.int64, device="cpu"),
            "labels": torch.full((len(rows), width), IGNORED, device="cpu"),
        }
        if several:
            batch["position_ids"] = torch.zeros(len(rows), width, dtype=torch.int64, device="cpu")
        for i, row in enumerate(rows):
            at = 0
            for inputs, labels in row:
                span = slice(at, at := at + len(inputs))
                batch["input_ids"][i, span], batch["labels"][i, span] = inputs, labels
                if several:
                    batch["position_ids"][i, span] = torch.arange(len(inputs), device="cpu")
            if several:
                batch["position_ids"][i, at:] = torch.arange(width - at, device="cpu")
        return {**batch, "num_tokens": sum(lengths)}


def preview(examples: Examples, tokenizer: Any, seq_len: int) -> list[list[tuple[str, bool]]]:
    """Return the first `SHOWN` examples, cut to `seq_len` labels: lists of (text, shortened if long; True if it is learnt)."""
    shown = []
    for number in range(min(SHOWN, len(examples))):
        ids, learnt = (values[: seq_len + 1].copy() for values in examples[number])
        learnt[:1] = False  # nothing comes before it
        parts, whole = list[tuple[str, bool]](), ""
        for is_learnt, run in groupby(range(len(ids)), key=lambda i: bool(learnt[i])):
            text = tokenizer.decode(np.asarray(ids[: max(run) + 1]).tolist(), skip_special_tokens=False)
            parts.append((text[len(whole) :], is_learnt))
            whole = text
        room = max(80, LONGEST // max(1, len(parts)))
        for i, (text, is_learnt) in enumerate(parts):
            if len(text) > room:
                parts[i] = f"{text[: room // 2]} […] {text[-room // 2 :]}", is_learnt
        shown.append(parts)
    return shown
