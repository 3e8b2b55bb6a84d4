"""A loop with Fabric: `torchrun --nproc-per-node 2 examples/integrations/fabric_after.py`."""

import lightning as L
import torch
from torch import nn
from accordion.integrations.lightning import FabricStrategy


def train(folder: str = "runs/fabric", steps: int = 12, device: str = "cpu") -> list[float]:
    torch.manual_seed(0)
    fabric = L.Fabric(accelerator=device, devices=2, strategy=FabricStrategy())
    fabric.launch()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    x = torch.randn(8 * steps, 32)
    data = torch.utils.data.TensorDataset(x, x.abs())
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=2))

    losses = []
    for i, (x, y) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=i % 2 == 0):
            loss = (model(x) - y).pow(2).mean()
            fabric.backward(loss)
        if i % 2:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    fabric.save(f"{folder}/last.ckpt", {"model": model, "optimizer": optimizer, "step": steps})
    fabric.load(f"{folder}/last.ckpt", {"model": model, "optimizer": optimizer})
    return losses


if __name__ == "__main__":
    print(train(device="gpu" if torch.cuda.is_available() else "cpu"))
