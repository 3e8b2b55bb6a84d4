"""What a model is worth: its loss on held-out text, and a sample of what it writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from accordion.describe import describe
from accordion.state import full_params
from accordion.train.batches import on_device
from accordion.train.data import IGNORED, inputs_and_labels
from accordion.train.model import rows_are_sequences

SMALL_BYTES = 4 << 30  # below it a sample is drawn from full parameters, above it from the sharded model, unit by unit
TEMPERATURE = 0.8


def token_losses(model: nn.Module, batch: Tensor) -> Tensor:
    """The sum of the losses of all labels of `batch` (b, seq_len + 1), 0-d float32."""
    inputs, labels = inputs_and_labels(batch)
    with rows_are_sequences():
        logits = model(input_ids=inputs, use_cache=False).logits  # (b, seq_len, vocab)
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def label_losses(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return `token_losses` and the number of labels that count."""
    return token_losses(model, batch), (batch[:, 1:] != IGNORED).sum()


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    batches: Iterable[Any],
    device: torch.device,
    losses: Callable[[nn.Module, Any], tuple[Tensor, Tensor]] = label_losses,
) -> float:
    """The mean loss of a token over the batches of all ranks; every rank must have equally many batches.

    `losses`: the sum of a batch, and the number of labels in it.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    for batch in batches:
        total += torch.stack([value.double() for value in losses(model, on_device(batch, device))])
    dist.all_reduce(total)
    model.train(was_training)
    loss, tokens = total.tolist()
    return float(loss / tokens)


@torch.no_grad()
def sample(
    model: nn.Module,
    device: torch.device,
    prompt: list[int],
    num_tokens: int,
    longest: int,
    seed: int,
    ends: Collection[int] = (),
) -> list[int]:
    """Return at most `num_tokens` tokens after `prompt`, up to one of `ends`, the same on every rank. Collective.

    `device`: on which the model computes; its parameters may rest elsewhere. `longest`: how many tokens it is shown at most.
    """
    generator = torch.Generator().manual_seed(seed)
    small = describe(model).total_params * 4 <= SMALL_BYTES
    was_training = model.training
    model.eval()
    ids = list(prompt)
    with full_params(model) if small else nullcontext():
        for _ in range(num_tokens):
            shown = torch.tensor([ids[-longest:]], device=device)  # (1, tokens)
            logits = model(input_ids=shown, use_cache=False).logits[0, -1].float().cpu()  # (vocab,)
            chances = torch.softmax(logits / TEMPERATURE, dim=-1)
            token = int(torch.multinomial(chances, 1, generator=generator))
            if token in ends:
                break
            ids.append(token)
    model.train(was_training)
    return ids[len(prompt) :]
