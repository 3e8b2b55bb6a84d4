"""A sharded parameter that meets a plain tensor: torch's error gets a note with the ways out, or is replaced by ours."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accordion as acc
from accordion.safety import mixed_tensors
from tests.support.diverging import free_port

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Clip(nn.Module):
    """Two towers, a scale that the loss uses, and parts that people call by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, WIDTH)
        self.patches = nn.Conv1d(3, WIDTH, 2)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.rms = nn.RMSNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.projection = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.positions = nn.Parameter(torch.randn(5, WIDTH))
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.logit_scale = nn.Parameter(torch.tensor([0.5, 0.7]))
        self.head = nn.Linear(WIDTH, 12)

    def encode_image(self, x: Tensor) -> Tensor:
        return self.batch_norm(self.patches(x)).mean(-1) @ self.projection

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.rms(self.lstm(x)[0].mean(1) + self.encode_image(image)))


pytestmark = pytest.mark.cpu("plain tensors lie there; the error comes before a device is asked")
TOKENS, IMAGE, ROWS = torch.arange(10).view(2, 5), torch.randn(2, 3, 4), torch.randn(2, WIDTH)


def in_a_loss(loss: Callable[[Any, Tensor], Tensor]) -> Callable[[Any], None]:
    """A step whose loss has a term on sharded weights, which makes all of it a DTensor."""

    def step(model: Any) -> None:
        out = model(TOKENS, IMAGE)
        (loss(model, out) + 1e-4 * sum(p.pow(2).sum() for p in model.parameters())).backward()

    return step


TORCHS = "got mixed torch.Tensor and DTensor"
OURS = "an output of the sharded model is a DTensor"
MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a cross entropy and a term on weights": (
        in_a_loss(lambda m, out: F.cross_entropy(out, torch.tensor([1, 2]))),
        TORCHS,
    ),
    "a squared error and a term on weights": (in_a_loss(lambda m, out: F.mse_loss(out, torch.zeros(2, 12))), TORCHS),
    "a binary cross entropy and a term on weights": (
        in_a_loss(lambda m, out: F.binary_cross_entropy_with_logits(out, torch.ones(2, 12))),
        TORCHS,
    ),
    "a mean and a term on weights": (in_a_loss(lambda m, out: out.mean()), OURS),
    "a sum and a term on weights": (in_a_loss(lambda m, out: out.sum()), OURS),
    "a method that is no entry point": (lambda m: m.encode_image(IMAGE), TORCHS),
    "a scale in the loss": (lambda m: m.logit_scale.exp() * torch.randn(4, 2), TORCHS),
    "a linear layer by hand": (lambda m: m.blocks[0].up(ROWS), TORCHS),
    "an embedding by hand": (lambda m: m.tokens(TOKENS), TORCHS),
    "a matrix product": (lambda m: ROWS @ m.projection, TORCHS),
    "a loss between both": (lambda m: F.mse_loss(m.positions, torch.randn(5, WIDTH)), TORCHS),
    "a detached matrix": (lambda m: m.projection.detach() * torch.randn(WIDTH, WIDTH), TORCHS),
}


def makes(mesh: Any, name: str) -> None:
    torch.manual_seed(0)
    model = acc.shard(Clip(), mesh, units={Block})
    mistake, says = MISTAKES[name]
    with pytest.raises((RuntimeError, acc.UsageError), match=re.escape(says)) as caught:
        mistake(model)
    for _ in range(2):
        mixed_tensors.advise(caught.value)
    assert getattr(caught.value, "__notes__", []) == ([mixed_tensors.WAYS_OUT] if says == TORCHS else [])
    assert "weight.pow(2).sum().full_tensor()" in "".join(traceback.format_exception(caught.value))
    model.zero_grad()
    model(TOKENS, IMAGE).sum().backward()  # training goes on


@pytest.mark.parametrize("name", MISTAKES)
def test_a_sharded_parameter_beside_a_plain_tensor_is_torchs_error_with_advice_or_ours(world, name):
    world.run(2, makes, name)


def adds_a_plain_term(mesh: Any) -> None:
    """As the advice says: gradients are those of the unsharded model."""
    torch.manual_seed(0)
    plain = Clip()
    model = acc.shard(copy.deepcopy(plain), mesh, units={Block})
    (plain(TOKENS, IMAGE).mean() + plain.projection.pow(2).sum()).backward()
    (model(TOKENS, IMAGE).mean() + model.projection.pow(2).sum().full_tensor()).backward()
    torch.testing.assert_close(model.projection.grad.full_tensor(), plain.projection.grad)


def test_a_term_on_weights_as_the_advice_says(world):
    world.run(2, adds_a_plain_term)


NOT_CAUGHT = """
import sys, torch, torch.distributed as dist, accordion as acc
from tests.safety.test_mixed_tensors import MISTAKES, Block, Clip
rank, port, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
MISTAKES[name][0](acc.shard(Clip(), sync=True, units={Block}))
"""


def test_an_error_that_ends_the_program_is_printed_with_the_advice():
    paths = os.pathsep.join([str(Path(acc.__file__).parents[1]), str(Path(__file__).parents[2])])
    words = [sys.executable, "-c", NOT_CAUGHT]
    port, name = str(free_port()), "a cross entropy and a term on weights"
    env = {**os.environ, "PYTHONPATH": paths}
    ranks = [subprocess.Popen([*words, str(r), port, name], stderr=subprocess.PIPE, text=True, env=env) for r in (0, 1)]
    for rank in ranks:
        printed = rank.communicate(timeout=120)[1]
        assert "weight.pow(2).sum().full_tensor()" in printed.partition(TORCHS)[2], printed


def test_other_errors_get_no_note():
    error = RuntimeError("The size of tensor a (4) must match the size of tensor b (7)")
    mixed_tensors.advise(error)
    assert not hasattr(error, "__notes__")


def wraps_in_ddp(mesh: Any) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = acc.shard(Clip(), mesh, units={Block})
    for one in (model, model.blocks[0]):
        with pytest.raises(acc.UsageError, match="this model is sharded, and DistributedDataParallel"):
            DistributedDataParallel(one)


def test_ddp_over_a_sharded_model_is_refused(world):
    world.run(2, wraps_in_ddp)


ON_ONE_RANK = """
import os, sys, torch, torch._dynamo, torch.distributed as dist, accordion as acc
from safetensors.torch import save_file
from tests.safety.test_mixed_tensors import Block, Clip, IMAGE, TOKENS
rank = int(os.fork() != 0)  # both have these imports
if rank == 0:
    os.dup2(1, 2)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
model = acc.shard(Clip(), sync=True, units={Block})
if dist.get_rank() == 0:
    save_file(model.state_dict(), sys.argv[1] + ".safetensors")
model(TOKENS, IMAGE)
"""


def test_who_waits_for_a_rank_that_wrote_alone_hears_of_it(tmp_path):
    pytest.importorskip("safetensors")
    paths = os.pathsep.join([str(Path(acc.__file__).parents[1]), str(Path(__file__).parents[2])])
    command = [sys.executable, "-c", ON_ONE_RANK, str(tmp_path / "store")]
    other = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, timeout=120
    )
    assert "invalid python storage" in other.stdout  # the errors of rank 0
    assert other.returncode != 0
    assert "rank 0" in other.stderr
