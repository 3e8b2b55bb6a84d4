"""A Trainer of Lightning: `torchrun --nproc-per-node 2 examples/integrations/lightning_after.py`."""

import lightning as L
import torch
from torch import nn
from accordion.integrations.lightning import AccordionStrategy


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)])
        self.losses: list[float] = []

    def training_step(self, batch, index):
        x, y = batch
        loss = (self.net(x) - y).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(folder: str = "runs/lightning", steps: int = 12, device: str = "cpu") -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(8 * steps, 32)
    data = torch.utils.data.TensorDataset(x, x.abs())
    trainer = L.Trainer(
        accelerator=device,
        devices=2,
        strategy=AccordionStrategy(),
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
    return module.losses


if __name__ == "__main__":
    print(train(device="gpu" if torch.cuda.is_available() else "cpu"))
