"""Models of diffusers, timm and PyTorch Geometric in a plain training loop learn as under DDP."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import accordion as acc
from tests.integrations.jobs import bytes_held, full, needs
from tests.support.ranked import on_job

pytestmark = pytest.mark.cpu("batches are drawn and compared there")
Batch = tuple[Any, ...]


def drawn(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * step + rank)


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": 8, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "norm_num_groups": 4}
    return UNet2DModel(block_out_channels=(16, 32), attention_head_dim=8, **sizes, **kinds)


def transformer() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 3, "num_layers": 2, "sample_size": 8}
    return DiTTransformer2DModel(**sizes, norm_num_groups=4, num_embeds_ada_norm=100)


def noise(rank: int, step: int) -> Batch:
    from diffusers import DDPMScheduler

    g = drawn(rank, step)
    image, added = (torch.randn(2, 3, 8, 8, generator=g) for _ in range(2))
    when, labels = torch.randint(0, 100, (2,), generator=g), torch.randint(0, 10, (2,), generator=g)
    return DDPMScheduler(num_train_timesteps=100).add_noise(image, added, when), when, labels, added


def unet_loss(model: nn.Module, batch: Batch) -> Tensor:
    noisy, when, _, added = batch
    return F.mse_loss(model(noisy, when).sample, added)


def transformer_loss(model: nn.Module, batch: Batch) -> Tensor:
    noisy, when, labels, added = batch
    return F.mse_loss(model(noisy, timestep=when, class_labels=labels).sample, added)


def of_timm(name: str, **sizes: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=5, **sizes)


def pictures(rank: int, step: int) -> Batch:
    g = drawn(rank, step)
    return torch.randn(4, 3, 32, 32, generator=g), torch.randint(0, 5, (4,), generator=g)


def picture_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class GraphNet(nn.Module):
    """Two kinds of convolution over the edges of graphs, and a mean over the nodes of each."""

    def __init__(self) -> None:
        from torch_geometric.nn import GATConv, SAGEConv

        super().__init__()
        self.first, self.second, self.head = GATConv(8, 16, heads=2), SAGEConv(32, 32), nn.Linear(32, 5)

    def forward(self, data: Any) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        x = self.first(data.x, data.edge_index).relu()
        return self.head(global_mean_pool(self.second(x, data.edge_index).relu(), data.batch))


def graphs(rank: int, step: int) -> Batch:
    """Return four graphs, with different sizes on each rank."""
    from torch_geometric.data import Batch as Graphs
    from torch_geometric.data import Data

    g, found = drawn(rank, step), []
    for i in range(4):
        count = 5 + i + 3 * rank
        edges = torch.randint(0, count, (2, 3 * count), generator=g)
        found.append(Data(x=torch.randn(count, 8, generator=g), edge_index=edges))
    return Graphs.from_data_list(found), torch.randint(0, 5, (4,), generator=g)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch], Callable[[nn.Module, Batch], Tensor]]] = {
    "diffusers UNet": (unet, noise, unet_loss),
    "diffusers DiT": (transformer, noise, transformer_loss),
    "timm ViT": (
        lambda: of_timm("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=4),
        pictures,
        picture_loss,
    ),
    "timm ResNet": (lambda: of_timm("resnet10t"), pictures, picture_loss),
    "PyG": (GraphNet, graphs, picture_loss),
}


NEEDED = {"diffusers": ["diffusers"], "timm": ["timm", "torchvision"], "PyG": ["torch_geometric"]}
MARKED = [
    pytest.param(case, marks=[needs(*NEEDED[library]), *[pytest.mark.slow] * (library == "diffusers")])
    for case in CASES
    for library in [case.partition(" ")[0]]
]


def learns(mesh: Any, case: str, ours: bool, steps: int = 6) -> tuple[nn.Module, list[float], list[Tensor]]:
    """Return the model, losses and gradient norms, and the full tensors of diffusers' averages of the model."""
    make, draw, loss_of = CASES[case]
    torch.manual_seed(0)
    whole = make().train()
    units: Any = None
    if case == "diffusers DiT":  # its forward calls the first block's embedding by itself: that is a unit of its own
        units = {type(m) for block in whole.transformer_blocks for m in (block, block.norm1.emb)}
    model = acc.shard(whole, mesh, units=units) if ours else DistributedDataParallel(whole)
    # The gradient of a key's bias is rounding errors, which a small `eps` would scale up.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    average = None
    if case.startswith("diffusers"):
        from diffusers.training_utils import EMAModel

        average = EMAModel(model.parameters(), decay=0.9, min_decay=0.5)
    found = []
    for step in range(steps):
        loss = loss_of(model, draw(mesh.get_local_rank(), step))
        loss.backward()
        clip = acc.clip_grad_norm_(model, 1.0) if ours else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.step(model.parameters())
        found += [loss.item(), clip.item()]
    kept = [] if average is None else average.shadow_params
    return whole, found, [p.full_tensor() if ours else p for p in kept]


@pytest.mark.parametrize("case", MARKED)
@on_job(2)
def test_a_model_of_a_library_learns_as_under_ddp(mesh: Any, tmp_path: Path, case: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # theirs
        theirs, expected, averages = learns(mesh, case, False)
        mine, found, sharded_averages = learns(mesh, case, True)
        assert found == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(sharded_averages, averages, rtol=1e-4, atol=1e-5)
        assert bytes_held(mine) < 0.6 * bytes_held(theirs)
        if case.startswith("diffusers"):
            acc.save_pretrained(mine, tmp_path)
            whole = full(mine)
            torch.distributed.barrier()
            loaded = type(theirs).from_pretrained(tmp_path)
            torch.testing.assert_close(dict(loaded.state_dict()), whole, rtol=0, atol=0)
