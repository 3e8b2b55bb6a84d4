"""Random inputs for a model family of transformers (ids, pixels, waves), and the loss of its outputs."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from tests.devices import device

VOCAB = 61  # a prime: no number of ranks cuts it evenly
Inputs = dict[str, Tensor]


def loss_of(model: nn.Module, inputs: Inputs, seed: int) -> Tensor:
    """Run the model with seeded random numbers. Return its loss, or if it has none a fixed weighted sum of its first output."""
    import numpy as np

    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    out = model(**inputs)
    loss = out.get("loss")
    if loss is not None:
        return loss
    first = out[0].float()
    return (first * torch.arange(first.numel(), device=device()).view_as(first).cos()).sum() / first.shape[0]


def draw_ids(g: torch.Generator, *shape: int, low: int = 3, high: int = VOCAB) -> Tensor:
    return torch.randint(low, high, shape, generator=g).to(device())


def causal(g: torch.Generator, length: int = 12) -> Inputs:
    tokens = draw_ids(g, 2, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked(g: torch.Generator, length: int = 12) -> Inputs:
    """Return a batch whose second row is shorter, by its attention mask, with labels at every second position only."""
    labels = draw_ids(g, 2, length)
    labels[:, ::2] = -100
    mask = torch.ones(2, length, dtype=torch.long, device=device())
    mask[1, -3:] = 0
    return {"input_ids": draw_ids(g, 2, length), "attention_mask": mask, "labels": labels}


def translated(g: torch.Generator) -> Inputs:
    """Return a batch for an encoder-decoder: `masked` input, and labels of another length."""
    return {**masked(g), "labels": draw_ids(g, 2, 7)}


def image(g: torch.Generator, size: int = 16, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size, generator=g).to(device())


def pixels(g: torch.Generator, size: int = 16) -> Inputs:
    return {"pixel_values": image(g, size)}


def classified(g: torch.Generator, size: int = 16) -> Inputs:
    return {"pixel_values": image(g, size), "labels": torch.randint(0, 2, (2,), generator=g).to(device())}


def captioned(g: torch.Generator, size: int = 16) -> Inputs:
    """Return pairs of image and text, with which the model computes its contrastive loss."""
    tokens = draw_ids(g, 2, 8, high=VOCAB - 1)
    tokens[:, -1] = VOCAB - 1  # the end of the text, which pools it
    return {"input_ids": tokens, "pixel_values": image(g, size), "return_loss": True}  # type: ignore[dict-item]


def wave(g: torch.Generator) -> Inputs:
    return {"input_values": torch.randn(2, 800, generator=g).to(device()), "labels": draw_ids(g, 2, 3)}


def mel(g: torch.Generator, *shape: int) -> Inputs:
    return {"input_features": torch.randn(2, *shape, generator=g).to(device()), "labels": draw_ids(g, 2, 7)}


def seen(g: torch.Generator, num_tokens: int = 16) -> Inputs:
    """Return images, and texts that begin with `num_tokens` image tokens, in whose places the model puts the image's features."""
    tokens = draw_ids(g, 2, num_tokens + 8, high=VOCAB - 4)
    tokens[:, :num_tokens] = VOCAB - 1
    return {"input_ids": tokens, "labels": tokens.clone(), **pixels(g)}


def qwen(g: torch.Generator) -> Inputs:
    """Return a batch as `seen`, in the format of Qwen2-VL: patches of all images in one tensor, four patches per image token."""
    inputs = seen(g, 4)
    inputs["input_ids"] = torch.cat([torch.full((2, 1), VOCAB - 3, device=device()), inputs["input_ids"]], dim=1)
    inputs["labels"] = inputs["input_ids"].clone()
    patches = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=g).to(device())
    types = (inputs["input_ids"] == VOCAB - 1).long()
    return {
        **inputs,
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2, device=device()),
        "mm_token_type_ids": types,
    }


def forecast(g: torch.Generator) -> Inputs:
    """Return time series with their continuations."""
    inputs = {
        "past_values": torch.randn(2, 15, generator=g), "past_time_features": torch.randn(2, 15, 1, generator=g),
        "past_observed_mask": torch.ones(2, 15), "future_values": torch.randn(2, 4, generator=g),
        "future_time_features": torch.randn(2, 4, 1, generator=g),
    }  # fmt: skip
    return {name: value.to(device()) for name, value in inputs.items()}
