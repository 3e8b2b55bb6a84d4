"""Images and text in two towers: accordion train --task examples/tasks/two_towers.py --train.steps 200 --train.micro_batch 32

The image tower is frozen, as where a trained one is given; a projection of its features and the text tower learn that an
image and its caption are near each other, and far from all others in the batch of all ranks. The data is made here: a bright
spot in one of sixteen fields, of one of four shapes, and a caption of two words.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

FIELDS, SIDE = 16, 4  # fields of an image, and dots along a side of each
SHAPES = torch.tensor(
    [[[1, 1], [1, 1]], [[1, 0], [0, 1]], [[0, 1], [1, 0]], [[1, 1], [0, 0]]], dtype=torch.float32
)  # (4, 2, 2)
WORDS = FIELDS + len(SHAPES)


class Captioned(Dataset):
    """`count` images (1, 16, 16) and captions (2,) of word numbers, from number `first` on."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.first + index)
        field, shape = (int(torch.randint(n, (), generator=draw)) for n in (FIELDS, len(SHAPES)))
        image = 0.1 * torch.randn(1, 16, 16, generator=draw)
        top, left = SIDE * (field // 4) + 1, SIDE * (field % 4) + 1
        image[0, top : top + 2, left : left + 2] += SHAPES[shape]
        return image, torch.tensor([field, FIELDS + shape])


class Towers(nn.Module):
    """Both towers: (b, 1, 16, 16) and (b, 2) to features (b, width) of length 1, and the sharpness of the comparison."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(1, 16, 2, stride=1), nn.ReLU(), nn.Flatten()).requires_grad_(False)
        self.project = nn.Linear(16 * 15 * 15, width)
        self.words = nn.Embedding(WORDS, width)
        self.text = nn.Sequential(nn.Flatten(), nn.Linear(2 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.sharpness = nn.Parameter(torch.tensor([2.0]))

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seen = F.normalize(self.project(self.images(images)), dim=-1)
        read = F.normalize(self.text(self.words(words)), dim=-1)
        return seen, read, self.sharpness.exp()


class GatherRows(torch.autograd.Function):
    """(b, n) of each rank to (ranks * b, n) on all of them; gradients of all ranks come back as a sum."""

    @staticmethod
    def forward(ctx, rows):
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def contrast(seen: torch.Tensor, read: torch.Tensor, sharpness: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each image among all captions, and the other way round."""
    scores = sharpness * seen @ read.T
    own = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


@dataclass
class Task:
    """Images and captions.

    Args:
        width: of the features
        lr: of AdamW
        held_out: images for validation
    """

    width: int = 32
    lr: float = 3e-3
    held_out: int = 256

    def model(self):
        return Towers(self.width)

    def dataset(self, split):
        return Captioned(0, 6000) if split == "train" else Captioned(1_000_000, self.held_out)

    def loss(self, model, batch):
        seen, read, sharpness = model(*batch)
        if model.training and dist.is_initialized():  # held-out batches are compared within themselves
            seen, read = GatherRows.apply(seen), GatherRows.apply(read)
        return contrast(seen, read, sharpness)

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=self.lr)

    def metrics(self, model, batch):
        images, words = batch
        seen, _, _ = model(images, words)
        every = torch.cartesian_prod(torch.arange(FIELDS), torch.arange(FIELDS, WORDS)).to(words.device)
        _, read, _ = model(images[:1].expand(len(every), -1, -1, -1), every)
        found = every[(seen @ read.T).argmax(1)]
        return {"captions_found": (found == words).all(1).float().mean()}
