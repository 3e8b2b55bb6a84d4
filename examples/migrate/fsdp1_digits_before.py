"""A convolutional classifier of digits, sharded; run it with torchrun --nproc-per-node 2."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.fc1, self.fc2 = nn.Linear(16 * 6 * 6, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.relu(self.fc1(F.max_pool2d(x, 2).flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits(count, seed):
    """Ten shapes of 16 x 16 pixels under noise, and which one each is."""
    shapes = torch.randn(10, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=draw)
    return TensorDataset(shapes[labels] + 0.7 * torch.randn(count, 1, 16, 16, generator=draw), labels)


def train(epochs=2, device="cpu"):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    model = FSDP(
        Net().to(device),
        auto_wrap_policy=policy,
        cpu_offload=CPUOffload(offload_params=False),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device(device),
        sync_module_states=device != "cpu",
        use_orig_params=True,
    )
    optimizer = optim.Adadelta(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    data = digits(256, seed=1)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)
        for images, labels in DataLoader(data, batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images.to(device)), labels.to(device), reduction="sum")
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), len(images)], device=device)
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
        scheduler.step()
    model.eval()
    with torch.no_grad():
        images, labels = digits(256, seed=2).tensors
        correct = (model(images.to(device)).argmax(1) == labels.to(device)).float().mean().item()
    return losses, correct


if __name__ == "__main__":
    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    if gpus:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    losses, correct = train(device=f"cuda:{torch.cuda.current_device()}" if gpus else "cpu")
    if dist.get_rank() == 0:
        print(f"losses of epochs {losses}, {correct:.0%} of new digits right")
    dist.destroy_process_group()
