"""The sequences of each rank: the global order, a rank's share of it, and a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from accordion.errors import UsageError

IGNORED = -100  # label without a loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's share of every global batch: position `p` in the order of all samples belongs to rank `p % world`.

    A global batch has `world * micro_batch * accumulate` positions. With the same global batch, any number of ranks reads the
    same samples in every step.
    """

    rank: int
    world: int
    micro_batch: int
    accumulate: int

    @property
    def global_batch(self) -> int:
        return self.world * self.micro_batch * self.accumulate

    def positions(self, micro_step: int) -> range:
        """Return the positions in the order that this rank reads in its `micro_step`-th micro-batch."""
        start = micro_step * self.micro_batch * self.world + self.rank
        return range(start, start + self.micro_batch * self.world, self.world)


def shuffled(index: int, count: int, seed: int) -> int:
    """Return the image of `index` under a random permutation of `range(count)`, computed without a table.

    A Feistel network of four rounds permutes the numbers of the least even number of bits that `count` needs. It is applied
    again until the result is below `count` (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            left, right = right, left ^ (_mix(right, seed * 4 + turn) & mask)
        index = left << half | right
        if index < count:
            return index


def _mix(value: int, key: int) -> int:
    """Return a 64-bit hash of two numbers, by the last stage of splitmix64."""
    bits = (value * 0x9E3779B97F4A7C15 + key * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & (2**64 - 1)
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return bits ^ (bits >> 31)


class Sequences(Dataset[Tensor]):
    """Dataset of windows of `seq_len + 1` packed tokens: the inputs, and one more token for the labels."""

    def __init__(self, tokens: Any, seq_len: int) -> None:  # an array of numpy or of Arrow
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return num_sequences(len(self.tokens), self.seq_len)

    def __getitem__(self, index: int) -> Tensor:  # (seq_len + 1,) int64
        start = index * self.seq_len
        return torch.from_numpy(np.asarray(self.tokens[start : start + self.seq_len + 1]).astype(np.int64))


def num_sequences(num_tokens: int, seq_len: int) -> int:
    """Return the number of whole windows in `num_tokens` tokens; consecutive windows share one token."""
    return max(0, (num_tokens - 1) // seq_len)


def check_enough(num_train: int, num_validation: int, seq_len: int, global_batch: int, where: str) -> None:
    """Raise `UsageError` if the data is too short: training needs a global batch of sequences, validation two tokens.
    `num_train`, `num_validation`: tokens. `where`: name of the data."""
    count = num_sequences(num_train, seq_len)
    if count == 0 or num_validation < 2:
        raise UsageError(
            f"data.seq_len {seq_len} is longer than the data: {where} has {num_train:,} tokens to train on and "
            f"{num_validation:,} to validate on; lower data.seq_len or give more text."
        )
    if count < global_batch:
        raise UsageError(
            f"one step takes {global_batch} sequences of {seq_len} tokens (ranks x train.micro_batch x train.accumulate), "
            f"{where} has {count}; lower one of these, lower data.seq_len or give more text."
        )


class GlobalOrder(Sampler[list[int]]):
    """Sampler of this rank's micro-batches, as lists of indices, without end.

    Each epoch has a new order of all samples. Samples at its end that do not fill a global batch are left out, so that all
    ranks have equally many batches. `num_read`: samples that all ranks have read.
    """

    def __init__(self, count: int, share: Share, seed: int) -> None:
        self.count, self.share, self.seed = count, share, seed
        self.steps_per_epoch = count // share.global_batch
        self.num_read = 0

    @property
    def num_dropped(self) -> int:
        """Number of samples left out at the end of each epoch."""
        return self.count - self.steps_per_epoch * self.share.global_batch

    def notes(self, what: str) -> list[str]:
        """Return lines for the user that describe a step and an epoch. `what`: name of the samples, such as "sequences"."""
        sizes = f"{self.share.world} ranks x {self.share.micro_batch} x {self.share.accumulate}"
        uneven = f"; the remaining {self.num_dropped} do not fill a step and are left out" if self.num_dropped else ""
        return [
            f"a step is {self.share.global_batch} {what}: {sizes}",
            f"an epoch is {self.steps_per_epoch:,} steps{uneven}",
        ]

    def __iter__(self) -> Iterator[list[int]]:
        used, each = self.steps_per_epoch * self.share.global_batch, self.share.world * self.share.micro_batch
        while True:
            epoch, start = divmod(self.num_read, used)
            self.num_read += each
            positions = self.share.positions(start // each)
            yield [self.index_of(position, epoch) for position in positions]

    def index_of(self, position: int, epoch: int) -> int:
        return shuffled(position, self.count, self.seed + epoch)

    def state_dict(self) -> dict[str, int]:
        return {"num_read": self.num_read, "count": self.count, "seed": self.seed}

    def continues(self, state: dict[str, int]) -> bool:
        """Return True if `state` is a position in this order: as many samples, shuffled by the same seed."""
        return (state["count"], state["seed"]) == (self.count, self.seed)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position `state`, which a run on another number of ranks may have saved."""
        assert self.continues(state)
        self.num_read = state["num_read"]


def loader_of(
    dataset: Any, order: GlobalOrder, collate: Callable[[list[Any]], Any] | None, *, pins: bool
) -> DataLoader[Any]:
    """Return a loader of endless micro-batches of `dataset` in the order `order`. `pins`: use pinned memory."""
    # A loader draws a number when it starts, and a resumed run starts one more. The run's random numbers must not change.
    generator = torch.Generator()
    return DataLoader(dataset, batch_sampler=order, collate_fn=collate, pin_memory=pins, generator=generator)


def validation_order(count: int, most: int) -> Sequence[int]:
    """Return the indices below `count` that a validation reads: `most` random ones, equal each time; all if `most` is 0."""
    if not 0 < most < count:
        return range(count)
    return sorted(shuffled(position, count, 0) for position in range(most))


def rows_read(order: Sequence[int], count: int) -> str:
    """Return text for the number of validation rows in `order`, of `count`: `all 656 rows` or `256 of 656 rows`."""
    return f"all {count:,} rows" if len(order) == count else f"{len(order):,} of {count:,} rows"


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Return the number of windows of up to `seq_len` inputs in `num_tokens` tokens; the last may be shorter."""
    return -(-(num_tokens - 1) // seq_len)


def validation_batches(tokens: Any, seq_len: int, share: Share, order: Sequence[int]) -> Iterator[Tensor]:
    """Yield this rank's validation batches (micro_batch, seq_len + 1) of the windows in `order`, equally many on every rank. Rows
    are padded with `IGNORED` after a shorter last window, and completely on ranks with fewer windows."""
    each = share.world * share.micro_batch
    for start in range(0, len(order), each):
        batch = torch.full((share.micro_batch, seq_len + 1), IGNORED, device="cpu")
        for row, index in enumerate(order[start + share.rank : start + each : share.world]):
            window = np.asarray(tokens[index * seq_len : (index + 1) * seq_len + 1]).astype(np.int64)
            batch[row, : window.size] = torch.from_numpy(window)
        yield batch


def inputs_and_labels(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Split tokens (b, seq_len + 1) into (inputs, labels), each (b, seq_len). Padding is an input 0 with an ignored label."""
    return batch[:, :-1].clamp(min=0), batch[:, 1:]
