"""An encoder-decoder that reads a handwritten digit and spells its name:

accordion train --task examples/tasks/digit_words.py --train.steps 400 --train.micro_batch 64 --train.lr 2e-3

The encoder of a small T5 with random weights reads the rows and columns of an image of scikit-learn's digits; the decoder
writes "three", letter by letter. The validation generates the names of 360 images that are not trained on, with full
parameters under one lease, so each rank generates for as long as its own names take. Takes scikit-learn.
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import T5Config, T5ForConditionalGeneration

import accordion as acc

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
PAD, END = 0, 1  # tokens; T5 also begins each answer with PAD
LETTERS = ["", "", *sorted(set("".join(NAMES)))]
LONGEST = 6  # tokens of the longest name and its end


def tokens_of(name: str) -> list[int]:
    """Return the tokens of the letters and END, padded to LONGEST."""
    return [*map(LETTERS.index, name), END, *[PAD] * (LONGEST - len(name) - 1)]


class Reader(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes = {"d_model": width, "d_kv": width // 4, "d_ff": 2 * width, "num_layers": layers, "num_heads": 4}
        tokens = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}
        self.t5 = T5ForConditionalGeneration(T5Config(vocab_size=len(LETTERS), **sizes, **tokens, dropout_rate=0.0))
        self.project, self.positions = nn.Linear(8, width), nn.Parameter(0.1 * torch.randn(16, width))

    def embed(self, images: Tensor) -> Tensor:  # (batch, 8, 8) -> (batch, 16, width)
        return self.project(torch.cat([images, images.mT], 1)) + self.positions

    def forward(self, images: Tensor, names: Tensor) -> Tensor:  # -> logits (batch, LONGEST, letters)
        labels = names.masked_fill(names == PAD, -100)  # T5 shifts them to the right for its decoder
        return self.t5(inputs_embeds=self.embed(images), labels=labels).logits


@dataclass
class Task:
    """Names of handwritten digits.

    Args:
        width: of the model
        layers: of the encoder, and of the decoder
        held_out: images for validation
    """

    width: int = 64
    layers: int = 2
    held_out: int = 360

    def model(self):
        return Reader(self.width, self.layers)

    def dataset(self, split):
        data = load_digits()
        images, names = (
            torch.from_numpy(data.images).float().div(16),
            torch.tensor([*map(tokens_of, NAMES)])[data.target],
        )
        train, held_out, *labels = train_test_split(images, names, test_size=self.held_out, random_state=0)
        return TensorDataset(train, labels[0]) if split == "train" else TensorDataset(held_out, labels[1])

    def loss(self, model, batch):
        """A sum and a count: names are not equally long, so micro-batches have unequal numbers of labels."""
        images, names = batch
        logits = model(images, names)
        total = F.cross_entropy(logits.flatten(0, 1), names.flatten(), ignore_index=PAD, reduction="sum")
        return total, (names != PAD).sum()

    def metrics(self, model, batch):
        images, names = batch
        with acc.full_params(model):
            written = model.t5.generate(inputs_embeds=model.embed(images), max_new_tokens=LONGEST, do_sample=False)
        written = F.pad(written[:, 1:], (0, LONGEST + 1 - written.shape[1]), value=PAD)
        return {"spelled": (written == names).all(1).float().mean()}
