"""Classify scikit-learn's 1,797 handwritten digits with convolutions: torchrun --nproc-per-node 2 examples/digits.py

Prints the accuracy on the 360 images that it does not train on. Takes scikit-learn.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accordion as acc

EPOCHS, BATCH = 8, 32  # images in a batch of one rank


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:  # (batch, 1, 8, 8) -> (batch, 10)
        return self.head(self.features(images))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the images (1, 8, 8) and digits to train on, and those held out."""
    data = load_digits()
    images = torch.from_numpy(data.images).float().div(16).unsqueeze(1)
    train, held_out, *labels = train_test_split(images, torch.from_numpy(data.target), test_size=0.2, random_state=0)
    return TensorDataset(train, labels[0]), TensorDataset(held_out, labels[1])


device = acc.init()
torch.manual_seed(0)  # every rank builds the same model; shard() checks that
model = acc.shard(Net())  # each rank keeps its rows of every parameter
optimizer = acc.wrap_optimizer(torch.optim.Adadelta(model.parameters()))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)

train, held_out = digits()
sampler = DistributedSampler(train)  # each rank reads its own part of the images
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for images, labels in DataLoader(train, BATCH, sampler=sampler):
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    model.eval()
    images, labels = held_out.tensors
    with torch.no_grad():  # all ranks evaluate: the forward gathers parameters
        correct = model(images.to(device)).argmax(1) == labels.to(device)
    model.train()
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, held-out accuracy {correct.float().mean().item():.2%}")
