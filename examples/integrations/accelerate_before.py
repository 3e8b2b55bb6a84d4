"""A loop with Accelerate: `torchrun --nproc-per-node 2 examples/integrations/accelerate_before.py`."""

import torch
from torch import nn
from accelerate import Accelerator


def train(folder: str = "runs/accelerate", steps: int = 12, device: str = "cpu") -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=device == "cpu")
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    x = torch.randn(8 * steps, 32)
    data = torch.utils.data.TensorDataset(x, x.abs())
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - y).pow(2).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    return losses


if __name__ == "__main__":
    print(train(device=torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"))
