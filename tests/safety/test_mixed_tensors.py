"""An operator with a sharded parameter and a plain tensor: torch's error gets a note with advice, or is replaced by ours."""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accordion as acc
from accordion.safety import mixed_tensors
from tests.support.models import Block
from tests.support.processes import run_python
from tests.support.ranked import on_world

WIDTH = 8


class Clip(nn.Module):
    """Two towers, a scale that the loss uses, and submodules that users call directly."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, WIDTH)
        self.patches = nn.Conv1d(3, WIDTH, 2)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.rms = nn.RMSNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 16) for _ in range(2))
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
    """Run a step whose loss has a term with sharded weights, so that the loss is a DTensor."""

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
    "a mean and a term on weights": (in_a_loss(lambda m, out: out.mean()), OURS),
    "a method that is no entry point": (lambda m: m.encode_image(IMAGE), TORCHS),
    "a scale in the loss": (lambda m: m.logit_scale.exp() * torch.randn(4, 2), TORCHS),
    "a linear layer by hand": (lambda m: m.blocks[0].up(ROWS), TORCHS),
    "an embedding by hand": (lambda m: m.tokens(TOKENS), TORCHS),
    "a loss between both": (lambda m: F.mse_loss(m.positions, torch.randn(5, WIDTH)), TORCHS),
}


@pytest.mark.parametrize("name", MISTAKES)
@on_world(2)
def test_mixing_a_sharded_parameter_and_a_plain_tensor_raises_advice(mesh: Any, name: str) -> None:
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


@on_world(2)
def test_a_loss_term_written_as_advised_has_the_right_gradients(mesh: Any) -> None:
    """The gradients equal those of the unsharded model."""
    torch.manual_seed(0)
    plain = Clip()
    model = acc.shard(copy.deepcopy(plain), mesh, units={Block})
    (plain(TOKENS, IMAGE).mean() + plain.projection.pow(2).sum()).backward()
    (model(TOKENS, IMAGE).mean() + model.projection.pow(2).sum().full_tensor()).backward()
    torch.testing.assert_close(model.projection.grad.full_tensor(), plain.projection.grad)


def test_other_errors_get_no_note():
    error = RuntimeError("The size of tensor a (4) must match the size of tensor b (7)")
    mixed_tensors.advise(error)
    assert not hasattr(error, "__notes__")


PROGRAMS = """
import os, sys, torch, torch._dynamo, torch.distributed as dist, accordion as acc
from safetensors.torch import save_file
from tests.safety.test_mixed_tensors import IMAGE, MISTAKES, TOKENS, Block, Clip
name, rank = ("mistake", "alone")[os.fork() == 0], int(os.fork() == 0)  # all of them have these imports
os.dup2(os.open(f"{sys.argv[1]}/{name}{rank}", os.O_WRONLY | os.O_CREAT), 2)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/{name}", rank=rank, world_size=2)
model = acc.shard(Clip(), sync=True, units={Block})
if name == "mistake":
    MISTAKES["a cross entropy and a term on weights"][0](model)
if rank == 0:
    save_file(model.state_dict(), f"{sys.argv[1]}/model.safetensors")
model(TOKENS, IMAGE)
"""


def test_an_error_that_ends_the_program_prints_the_advice_and_reaches_other_ranks(tmp_path):
    pytest.importorskip("safetensors")
    run_python("-c", PROGRAMS, tmp_path)  # until none of them has its output open
    said = {path.name: path.read_text() for path in tmp_path.glob("*[01]")}
    for name in ("mistake0", "mistake1"):
        assert "weight.pow(2).sum().full_tensor()" in said[name].partition(TORCHS)[2], said[name]
    assert "invalid python storage" in said["alone0"], said
    assert "rank 0" in said["alone1"], said
