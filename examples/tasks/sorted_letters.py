"""An encoder-decoder that sorts letters: accordion train --task examples/tasks/sorted_letters.py --train.steps 600

A T5 of transformers, small and untrained, reads a few letters in any order and writes them in the order of the alphabet. How
often it writes all of them rightly is found by generation, with full parameters under one lease: so each rank generates as
long as its own texts take.
"""

from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import T5Config, T5ForConditionalGeneration

import accordion as acc

PAD, END, FIRST = 0, 1, 2  # tokens: PAD also begins each answer, as T5 has it; letters follow
IGNORED = -100  # labels that do not count, as transformers has it


class Letters(Dataset):
    """`count` pairs of tokens, (longest + 1,) each: letters, and the same ones sorted; END and then filler behind both."""

    def __init__(self, first: int, count: int, letters: int, longest: int) -> None:
        self.first, self.count, self.letters, self.longest = first, count, letters, longest

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.first + index)
        length = int(torch.randint(1, self.longest + 1, (), generator=draw))
        letters = FIRST + torch.randint(self.letters, (length,), generator=draw)
        given = torch.full((self.longest + 1,), PAD)
        labels = torch.full((self.longest + 1,), IGNORED)
        given[:length], labels[:length] = letters, letters.sort().values
        given[length] = labels[length] = END
        return {"input_ids": given, "attention_mask": (given != PAD).long(), "labels": labels}


@dataclass
class Task:
    """Sorted letters.

    Args:
        letters: of the alphabet
        longest: letters in a text at most
        width: of the model
        layers: of the encoder, and of the decoder
        lr: of AdamW
        held_out: texts for validation
    """

    letters: int = 12
    longest: int = 6
    width: int = 48
    layers: int = 2
    lr: float = 2e-3
    held_out: int = 200

    def model(self):
        config = T5Config(
            vocab_size=FIRST + self.letters,
            d_model=self.width,
            d_kv=self.width // 4,
            d_ff=4 * self.width,
            num_layers=self.layers,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=PAD,
        )
        return T5ForConditionalGeneration(config)

    def dataset(self, split):
        first, count = (0, 20000) if split == "train" else (1_000_000, self.held_out)
        return Letters(first, count, self.letters, self.longest)

    def loss(self, model, batch):
        """A sum and a count: texts are not equally long, so micro-batches have unevenly many labels."""
        logits = model(**batch).logits
        labels = batch["labels"]
        lost = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return lost, (labels != IGNORED).sum()

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=self.lr)

    def metrics(self, model, batch):
        labels = batch["labels"].masked_fill(batch["labels"] == IGNORED, PAD)
        with acc.full_params(model):
            written = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=labels.shape[1],
                do_sample=False,
            )[:, 1:]
        written = torch.nn.functional.pad(written, (0, labels.shape[1] - written.shape[1]), value=PAD)
        return {"sorted": (written == labels).all(1).float().mean()}
