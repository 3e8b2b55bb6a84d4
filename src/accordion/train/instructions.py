"""Training of a causal language model on examples with answers: the loss is the mean over answer tokens of the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from accordion.errors import UsageError
from accordion.state import sharded_engine
from accordion.train.batches import OrderedBatches
from accordion.train.config import Config
from accordion.train.data import IGNORED, GlobalOrder, Share, rows_read, validation_order
from accordion.train.evaluate import validation_loss
from accordion.train.language_work import LanguageWork, validated
from accordion.train.model import rows_are_sequences, rows_hold_documents
from accordion.train.packing import Batch, Collate, ExampleRows, LengthOrder, validation_rows
from accordion.train.rows import Split
from accordion.train.screen import Screen
from accordion.train.token_tables import ExampleFiles
from accordion.train.work import Validation

ROWS_OF_TEST = (
    (1, 2, 3, 4),
    (5, 6, 7, 8, 9),
)  # two documents, told apart by how the model answers them in either order


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions(LanguageWork):
    """A language model on examples."""

    files: ExampleFiles
    unit: str = "training examples"

    @property
    def data(self) -> str:
        data = self.config.data
        return f"{self.files.digest} {data.packing} {data.seq_len}"

    def fill(self, model: nn.Module, seed: int, *, on_meta: bool) -> None:
        LanguageWork.fill(self, model, seed, on_meta=on_meta)
        if self.config.data.packing == "documents":
            check_apart(model)

    def _rows(self, split: Any) -> ExampleRows:
        return ExampleRows(self.files.read(split), self.config.data.seq_len, self.config.data.packing)

    def _collate(self) -> Collate:
        return Collate(self.config.data.seq_len, self.config.data.packing)

    def batches(self, share: Share, seed: int, *, pins: bool) -> OrderedBatches:
        order = LengthOrder if self.config.data.packing == "length" else GlobalOrder
        return OrderedBatches(self._rows("train"), share, seed, self._collate(), pins=pins, order=order)

    def notes(self, share: Share) -> list[str]:
        data, rows = self.config.data, self._rows("train")
        what = f"rows of {data.seq_len} tokens" if data.packing == "documents" else "examples"
        return GlobalOrder(len(rows), share, 0).notes(what)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum and count over the answer tokens of this micro-batch, 0-d float32."""
        return answer_losses(model, batch)

    def num_counted(self, share: Share, batches: list[Any]) -> int:
        """Tokens without filling, of each rank as many as of this one."""
        return share.world * sum(int(batch["num_tokens"]) for batch in batches)

    def validate(self, model: nn.Module, share: Share, device: torch.device) -> Validation:
        rows = self._rows("validation")
        order = validation_order(len(rows), self.config.train.validation_rows)
        batches = validation_rows(rows, self._collate(), share, order)
        loss = validation_loss(model, batches, device, answer_losses)
        return validated(loss, " of an answer's token", rows_read(order, len(rows)))

    def finish(self, model: nn.Module, device: torch.device, seed: int, screen: Screen) -> None:
        """An answer to the first held-out example."""
        ids, answers = self.files.read("validation")[0]
        prompt = [int(token) for token in ids[: int(answers.argmax())]][-self.config.data.seq_len :]
        if prompt:
            self._show_sample(model, device, prompt, seed, screen, skip_special_tokens=False)


def check_enough_rows(rows: Mapping[Split, ExampleRows], config: Config, global_batch: int, where: str) -> None:
    """Raise `UsageError` unless there is one example to validate on and one global batch to train on."""
    data = config.data
    for split, held in rows.items():
        if not len(held) or not held.fit.num_answers:
            raise UsageError(
                f"no {split} example of {where} has an answer among its first {data.seq_len} tokens (data.seq_len) that is to be "
                "learnt; raise data.seq_len, shorten the prompts, or give some answers a weight."
            )
    count = len(rows["train"])
    if count < global_batch:
        several = data.packing == "documents"
        what, less = (f"rows of {data.seq_len} tokens", " shorten data.seq_len") if several else ("examples", "")
        raise UsageError(
            f"one step takes {global_batch} {what} (ranks x train.micro_batch x train.accumulate), {where} has {count}; lower "
            f"one of these,{less} or give more data."
        )


def answer_losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The sum of the losses of all labels that count, and how many those are, 0-d float32."""
    shown = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
    labels: Tensor = batch["labels"]
    several = "position_ids" in shown
    if several and in_one_row(model):
        shown, labels = {name: value.reshape(1, -1) for name, value in shown.items()}, labels.reshape(1, -1)
    with rows_hold_documents() if several else rows_are_sequences():
        logits = model(**shown, use_cache=False).logits  # (b, tokens, vocab)
    total = functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (labels != IGNORED).sum().float()


def in_one_row(model: nn.Module) -> bool:
    """Whether its attention tells documents apart in a batch of one row alone: flash attention, by the lengths of each."""
    return str(getattr(model.config, "_attn_implementation", "")).startswith("flash")


@torch.no_grad()
def check_apart(model: nn.Module) -> None:
    """Raise `UsageError` on every rank where documents of a row see each other, by the logits of one in two places.

    Whether an architecture heeds position ids in its mask is nowhere written down, so it is tried.
    """
    device = sharded_engine(model, "training").context.device
    was_training = model.training
    model.eval()
    first, second = ROWS_OF_TEST
    ids = torch.tensor([[*first, *second], [*second, *first]], device=device)
    places = [torch.arange(len(part), device=device) for part in (first, second)]
    positions = torch.stack([torch.cat(places), torch.cat(places[::-1])])
    if in_one_row(model):
        ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
    with rows_hold_documents():
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    bound = 1e-3 if logits.dtype == torch.float32 else 5e-2
    logits = logits.float().reshape(2, len(first) + len(second), -1)
    model.train(was_training)
    here, there = logits[0, len(first) :], logits[1, : len(second)]
    apart = (here - there).abs().max() <= bound * here.abs().max()
    told = apart.to(torch.int64)
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    if not int(told):
        raise UsageError(
            f"data.packing is 'documents', and {type(model).__name__} lets the examples in a row see each other; take "
            "--data.packing length."
        )
