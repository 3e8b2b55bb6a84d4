"""Digits by convolutions: accordion train --task examples/tasks/digits.py --train.steps 300

The data is made here: the ten digits drawn in seven by five dots, shifted, stretched, thinned and blurred in noise, 16 x 16
grey values each. Samples are drawn from their own number, so the held-out ones are others.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

DOTS = """
.###. ..#.. .###. .###. ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# #...# ..##. #.... .#... ....# #...# #...#
#..## ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ..##. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""
ROWS = [line.split() for line in DOTS.split("\n") if line]
GLYPHS = torch.tensor([[dot == "#" for row in ROWS for dot in row[digit]] for digit in range(10)])
GLYPHS = GLYPHS.float().view(10, 1, 7, 5)


class Digits(Dataset):
    """`count` images (1, 16, 16) and their digits, from number `first` on."""

    def __init__(self, first: int, count: int, noise: float) -> None:
        self.first, self.count, self.noise = first, count, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        draw = torch.Generator().manual_seed(self.first + index)
        digit = int(torch.randint(10, (), generator=draw))
        height, width = (int(torch.randint(low, low + 4, (), generator=draw)) for low in (12, 9))
        image = F.interpolate(GLYPHS[digit : digit + 1], (height, width), mode="bilinear")[0]
        top, left = (int(torch.randint(17 - n, (), generator=draw)) for n in (height, width))
        image = F.pad(image, (left, 16 - width - left, top, 16 - height - top))
        ink = 0.6 + 0.4 * torch.rand((), generator=draw)
        return ink * image + self.noise * torch.randn(image.shape, generator=draw), digit


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(2 * width * 64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # (b, 1, 16, 16) -> (b, 10)
        return self.head(F.max_pool2d(self.convolutions(images), 2))


@dataclass
class Task:
    """Digits.

    Args:
        width: channels of the first convolution
        noise: of the images
        lr: Adadelta's rate at the beginning
        gamma: what is left of it after every hundred steps
    """

    width: int = 16
    noise: float = 0.15
    lr: float = 1.0
    gamma: float = 0.6

    def model(self):
        return Net(self.width)

    def dataset(self, split):
        return Digits(0, 20000, self.noise) if split == "train" else Digits(1_000_000, 1001, self.noise)

    def loss(self, model, batch):
        images, digits = batch
        return F.cross_entropy(model(images), digits)

    def optimizer(self, params):
        return torch.optim.Adadelta(params, lr=self.lr)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=self.gamma)

    def metrics(self, model, batch):
        images, digits = batch
        return {"accuracy": (model(images).argmax(1) == digits).float().mean()}
