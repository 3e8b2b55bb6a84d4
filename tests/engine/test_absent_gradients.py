"""Parameters for which some ranks, or all, have no gradient: what is None, what is a sum, and when it is known."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from accordion.config import STRATEGIES
from tests.devices import device
from tests.support.ranked import on_strategy
from tests.support.reference import assert_close, grads_of
from tests.support.sample import sampled

WIDTH = 16


class Routed(nn.Module):
    """Experts as modules of one unit, of which a rank uses those that it is told."""

    def __init__(self, num: int = 5) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num))

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        y = self.norm(x)
        for i in chosen:
            x = x + self.experts[i](y)
        return x


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Routed() for _ in range(3)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, chosen: tuple[int, ...], again: tuple[int, ...] = ()) -> Tensor:
        for block in self.blocks:
            x = block(x, chosen)
        return self.head(self.blocks[0](x, again) if again else x)


# For each rank the experts of one step. Expert 4 is nobody's in the first, and 3 is one rank's alone.
STEPS = [[(0, 1), (0, 3)], [(4,), (2, 4)], [(0, 1), (0, 1)]]


def losses(model: nn.Module, step: int, rank: int, where: torch.device, again: bool) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(where)
    return model(x, STEPS[step][rank], STEPS[step][1 - rank] if again else ()).square().mean()


ROWS = list(itertools.product(STRATEGIES, ("", "adding", "twice", "hooks")))
USUAL = [*ROWS[:4], ("hybrid_shard_optim", "adding")]


@pytest.mark.parametrize(("strategy", "how"), sampled(ROWS, lambda *row: row in USUAL))
@on_strategy
def test_what_no_rank_has_is_none_and_what_one_has_is_its_own(mesh, strategy: str, how: str) -> None:
    """`how`: gradients add up over steps, blocks are called twice, or hooks hear of gradients."""
    torch.manual_seed(0)
    rank, num_ranks = torch.distributed.get_rank() % 2, mesh.size()
    alone = Mixture()
    model = acc.shard(copy.deepcopy(alone), mesh, units={Routed}, strategy=strategy)
    heard: set[str] = set()
    if how == "hooks":
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: heard.add(name))
    for step in range(len(STEPS)):
        heard.clear()
        losses(model, step, rank, device(), how == "twice").backward()
        for r in range(num_ranks):
            (losses(alone, step, r % 2, torch.device("cpu"), how == "twice") / num_ranks).backward()
        assert_close(grads_of(model), grads_of(alone), 1e-5)
        if how == "hooks":
            assert heard >= {name for name, p in model.named_parameters() if p.grad is not None}
        if how != "adding":
            model.zero_grad()
            alone.zero_grad()
