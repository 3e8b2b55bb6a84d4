"""Image and text towers; each rank has another number of images and texts, and in each step one rank has no image at all:

torchrun --nproc-per-node 2 examples/two_towers.py

Images are scikit-learn's handwritten digits. Texts are the names of Unicode's characters that are digits, such as "GUJARATI
DIGIT SEVEN". Both towers learn that images and names of the same digit are near each other, and far from all others in the
batch of all ranks. A rank without images never calls the image tower. The others do not wait for it, because it takes part
in the gathers and reduces of that tower all the same; gradients are those of one process with the whole batch.
"""

import sys
import unicodedata

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import accordion as acc

WIDTH, LONGEST, SHARPNESS = 32, 40, 10.0  # size of the features; letters of a name, counted from its end; of the scores
LETTERS = " -ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        self.images = nn.Sequential(*convolution, nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        letters = nn.Embedding(len(LETTERS) + 1, 16), nn.Flatten()
        self.texts = nn.Sequential(*letters, nn.Linear(LONGEST * 16, 64), nn.ReLU(), nn.Linear(64, WIDTH))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:  # features (images or texts, WIDTH)
        read = F.normalize(self.texts(texts), dim=-1)
        seen = F.normalize(self.images(images), dim=-1) if len(images) else read[:0]  # skips the tower without images
        return seen, read


def data() -> tuple[list[Tensor], list[Tensor]]:
    """Return images (n, 8, 8), texts (m, LONGEST) and the digits of both, to train on and held out: the last fifth of each."""
    names = dict[str, int]()
    for character in map(chr, range(sys.maxunicode + 1)):
        if (digit := unicodedata.digit(character, None)) is not None:
            names[unicodedata.name(character)] = digit
    texts = [[LETTERS.find(letter) + 1 for letter in name[-LONGEST:].rjust(LONGEST)] for name in names]
    images = torch.from_numpy(load_digits().images).float().div(16)
    parts = images, torch.tensor(texts), torch.from_numpy(load_digits().target), torch.tensor([*names.values()])
    return [part[: len(part) * 4 // 5] for part in parts], [part[len(part) * 4 // 5 :] for part in parts]


def batch_of(train: list[Tensor], step: int, rank: int, world: int) -> list[Tensor]:
    """Return this rank's images, none if it is its turn, its texts, and the digits of both."""
    images, texts, shown, named = train
    draw = torch.Generator().manual_seed(step * world + rank)
    i = torch.randint(len(images), (0 if step % world == rank else 48,), generator=draw)
    t = torch.randint(len(texts), (int(torch.randint(16, 64, (), generator=draw)),), generator=draw)
    return [images[i], texts[t], shown[i], named[t]]


def of_all_ranks(own: Tensor) -> Tensor:
    """Return the rows of all ranks, in the order of ranks. Only those of this rank have a gradient."""
    rank, numbers = dist.get_rank(), torch.zeros(dist.get_world_size(), dtype=torch.long, device=own.device)
    numbers[rank] = len(own)
    dist.all_reduce(numbers)
    counts = numbers.tolist()
    rows = F.pad(own, (0, 0, sum(counts[:rank]), sum(counts[rank + 1 :])))  # zeros in place of other ranks' rows
    every = rows.detach().clone()
    dist.all_reduce(every)
    return rows + (every - rows.detach())


def contrast(seen: Tensor, read: Tensor, shown: Tensor, named: Tensor) -> Tensor:
    """Return the cross-entropy of each image among all texts, and of each text among all images; several may be right."""
    scores, same = SHARPNESS * seen @ read.T, (shown[:, None] == named).float()
    pairs = (scores, same), (scores.T, same.T)
    return sum(F.cross_entropy(s, right / right.sum(1, keepdim=True).clamp(min=1)) for s, right in pairs) / 2


def loss_of(model: nn.Module, images: Tensor, texts: Tensor, shown: Tensor, named: Tensor) -> Tensor:
    """Return the loss of the batch of all ranks. The digits are sent as one more column of the features."""
    seen, read = model(images, texts)
    seen, read = of_all_ranks(torch.cat([seen, shown[:, None]], 1)), of_all_ranks(torch.cat([read, named[:, None]], 1))
    return contrast(seen[:, :-1], read[:, :-1], seen[:, -1], read[:, -1])


def shard_towers() -> nn.Module:
    """Return the sharded model. With `debug="order"` a rank may lack images for the first time in any step."""
    torch.manual_seed(0)  # gradients are summed, because each rank has those of its own rows
    return acc.shard(Towers(), units=lambda name, _: name in ("images", "texts"), reduce_op="sum", debug="order")


def train(steps: int = 300) -> float:
    """Train on the ranks of the process group; return the share of held-out images whose nearest held-out name is right."""
    model, (train_data, held_out) = shard_towers(), data()
    device = next(model.parameters()).device
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    for step in range(steps):
        batch = [part.to(device) for part in batch_of(train_data, step, dist.get_rank(), dist.get_world_size())]
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < 2 or step % 100 == 99:
            print(
                f"step {step + 1}, rank {dist.get_rank()}: {len(batch[0])} images, {len(batch[1])} texts, loss {loss:.3f}"
            )
    images, texts, shown, named = (part.to(device) for part in held_out)
    with torch.no_grad():
        seen, read = model(images, texts)
    return (named[(seen @ read.T).argmax(1)] == shown).float().mean().item()


if __name__ == "__main__":
    acc.init()
    accuracy = train()
    if dist.get_rank() == 0:
        print(f"held-out accuracy {accuracy:.2%}")
