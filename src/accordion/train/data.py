"""The rows of each rank: windows of text, the global order, a rank's share of it, and validation batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

IGNORED = -100  # label without a loss
Row = list[tuple[Tensor, Tensor]]
"""For each document in a row (inputs, labels), each (tokens,) int64. Labels that are not learnt are `IGNORED`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's share of every global batch: position `p` in the order of samples belongs to rank `p % world`. With an equal
    `global_batch`, any number of ranks together reads the same samples in a step. Ranks that share sequences count as one."""

    rank: int
    world: int
    micro_batch: int
    accumulate: int

    @property
    def global_batch(self) -> int:
        return self.world * self.micro_batch * self.accumulate


@lru_cache(maxsize=2)
def permutation(count: int, seed: int) -> np.ndarray:
    """Return a random permutation of `range(count)`, (count,) int64, equal with every version of numpy. Cached: read only."""
    return np.random.RandomState(seed % 2**32).permutation(count)


class Sequences(Dataset[Row]):
    """Dataset of windows of `seq_len + 1` packed tokens: the inputs, and one more token for the labels. Consecutive windows
    share one token. `rest`: include a last window that is shorter; otherwise its tokens are not used."""

    def __init__(self, tokens: Any, seq_len: int, *, rest: bool = False) -> None:  # an array of numpy or of Arrow
        self.tokens, self.seq_len = tokens, seq_len
        self._count = max(0, (len(tokens) + (seq_len - 1) * rest - 1) // seq_len)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        start = index * self.seq_len
        window = torch.from_numpy(np.asarray(self.tokens[start : start + self.seq_len + 1]).astype(np.int64))
        return [(window[:-1], window[1:])]


class GlobalOrder(Sampler[list[int]]):
    """Sampler of this rank's micro-batches, as lists of indices, without end. Each epoch has a new order of all `count` samples
    (at least a global batch). Samples at the end of an epoch that do not fill a global batch are left out: all ranks have
    equally many batches. `num_read`: samples that all ranks have read; set it to continue an order of equal `count` and
    `seed`."""

    def __init__(self, count: int, share: Share, seed: int) -> None:
        self.count, self.share, self.seed = count, share, seed
        self.steps_per_epoch = count // share.global_batch
        self.num_read = 0

    def notes(self, what: str, who: str = "ranks") -> list[str]:
        """Return lines for the user on the sizes of a step and of an epoch. `what`: name of the samples, such as "sequences".
        `who`: name of those that read a share of them, such as "ranks"."""
        sizes = f"{self.share.world} {who} x {self.share.micro_batch} x {self.share.accumulate}"
        num_dropped = self.count - self.steps_per_epoch * self.share.global_batch
        uneven = f"; the remaining {num_dropped} do not fill a step and are left out" if num_dropped else ""
        return [
            f"a step is {self.share.global_batch} {what}: {sizes}",
            f"an epoch is {self.steps_per_epoch:,} steps{uneven}",
        ]

    def __iter__(self) -> Iterator[list[int]]:
        used, each = self.steps_per_epoch * self.share.global_batch, self.share.world * self.share.micro_batch
        while True:
            epoch, start = divmod(self.num_read, used)
            self.num_read += each
            order = permutation(self.count, self.seed + epoch)
            first = start // each * each + self.share.rank
            yield [int(order[position]) for position in range(first, first + each, self.share.world)]


def validation_order(count: int, most: int) -> Sequence[int]:
    """Return the sorted indices of the rows that a validation reads: `most` random ones of `count`, equal each time; 0: all."""
    return sorted(permutation(count, 0)[:most].tolist()) if 0 < most < count else range(count)


def validation_batches(
    rows: Any, order: Sequence[int], share: Share, collate: Callable[[list[Any]], Any]
) -> Iterator[tuple[Any, int]]:
    """Yield (batch, number of its rows that count) for this rank's share of the validation `rows` with indices in `order`. All
    ranks get equally many batches: a rank without rows left gets one row of another rank, and the number 0."""
    each = share.world * share.micro_batch
    for start in range(0, len(order), each):
        own = order[start + share.rank : start + each : share.world]
        yield collate([rows[i] for i in own or order[start : start + 1]]), len(own)
