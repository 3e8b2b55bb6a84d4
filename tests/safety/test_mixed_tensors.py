"""Where a sharded parameter meets a plain tensor, torch's error has a note: which parameter, of which unit, and what to do."""

from __future__ import annotations

import os
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
ONES = torch.ones(5, WIDTH, dtype=torch.bool)
MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a method that is no entry point": (lambda m: m.encode_image(IMAGE), "'patches.weight' of unit 'root'"),
    "a scale in the loss": (lambda m: m.logit_scale.exp() * torch.randn(4, 2), "'logit_scale'"),
    "a clamped scale": (lambda m: torch.randn(4, 2) / m.logit_scale.exp().clamp(max=100), "'logit_scale'"),
    "a linear layer by hand": (lambda m: m.blocks[0].up(ROWS), "'blocks.0.up.*' of unit 'blocks.0'"),
    "an embedding by hand": (lambda m: m.tokens(TOKENS), "'tokens.weight' of unit"),
    "a convolution by hand": (lambda m: m.patches(IMAGE), "'patches.weight' of unit 'root'"),
    "a layer norm by hand": (lambda m: m.blocks[1].norm(ROWS), "'blocks.1.norm.*' of unit 'blocks.1'"),
    "an RMS norm by hand": (lambda m: m.rms(ROWS), "'rms.weight' of unit 'root'"),
    "a batch norm by hand": (lambda m: m.batch_norm(ROWS), "'batch_norm.*' of unit 'root'"),
    "an LSTM by hand": (lambda m: m.lstm(torch.randn(2, 5, WIDTH)), "'lstm.*' of unit 'root'"),
    "a matrix product": (lambda m: ROWS @ m.projection, "'projection' of unit 'root'"),
    "a product with its transpose": (lambda m: ROWS @ m.projection.T, "'projection' of unit 'root'"),
    "a head's weight as a function's argument": (lambda m: F.linear(ROWS, m.head.weight), "'head.weight'"),
    "a sum": (lambda m: torch.randn(5, WIDTH) + m.positions, "'positions'"),
    "a pull towards what it was": (lambda m: (m.projection - torch.randn(WIDTH, WIDTH)).pow(2).sum(), "'projection'"),
    "a loss between both": (lambda m: F.mse_loss(m.positions, torch.randn(5, WIDTH)), "'positions'"),
    "put together": (lambda m: torch.cat([m.positions, torch.randn(2, WIDTH)]), "'positions'"),
    "an einsum": (lambda m: torch.einsum("bi,ij->bj", ROWS, m.projection), "'projection'"),
    "a detached matrix": (lambda m: m.projection.detach() * torch.randn(WIDTH, WIDTH), "'projection' of unit 'root'"),
    "columns of a detached one": (lambda m: torch.randn(5, 2) * m.positions[:, 1:3].detach(), "'positions' of unit 'root'"),
    "a detached bias": (lambda m: torch.randn(16) + m.blocks[1].up.bias.detach(), "'blocks.1.up.bias' of unit 'blocks.1'"),
    "an average of plain tensors": (lambda m: torch.zeros(5, WIDTH).lerp_(m.positions, 0.1), "'positions'"),
    "rows that a mask takes": (lambda m: torch.where(ONES, m.positions, torch.zeros(5, WIDTH)), "'positions'"),
}  # fmt: skip


def makes(mesh: Any, name: str) -> None:
    torch.manual_seed(0)
    model = acc.shard(Clip(), mesh, units={Block})
    model(TOKENS, IMAGE).sum().backward()
    mistake, place = MISTAKES[name]
    modes = [torch.enable_grad(), torch.no_grad(), torch.inference_mode()]
    for mode in modes[:2] if "detach" in name else modes:  # torch detaches no DTensor in inference mode
        with mode, pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor") as caught:
            mistake(model)
        (note,) = caught.value.__notes__
        words = place.split("*")
        assert all(part in note for part in words), note
        for way in ("inside the model's forward", "accordion.entry_point", ".full_tensor()", "full_params(model)"):
            assert way in note
        assert note in "".join(traceback.format_exception(caught.value))
    model(TOKENS, IMAGE).sum().backward()  # it goes on


@pytest.mark.parametrize("name", MISTAKES)
def test_the_note_names_the_parameter_its_unit_and_the_ways_out(world, name):
    if name == "an LSTM by hand" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 looks for a DTensor among an LSTM's arguments and not in their lists, and says so")
    world.run(2, makes, name)


class Holder:
    """As a trainer of somebody's own holds its model."""

    def __init__(self, model: nn.Module) -> None:
        self.net = model

    @torch.no_grad()
    def scaled(self, of: Tensor) -> Tensor:
        return of * self.net.logit_scale.exp().clamp(max=100)


def was_computed_without_a_graph(mesh: Any) -> None:
    """Nothing leads from there to the parameter; that it has the shape of one that somebody at work holds is said as a guess."""
    model = acc.shard(Clip(), mesh, units={Block})
    with pytest.raises(RuntimeError, match="got mixed") as caught:
        Holder(model).scaled(torch.randn(4, 2))
    (note,) = caught.value.__notes__
    assert "'logit_scale' of unit 'root', or what has its shape and was computed from it" in note
    with torch.no_grad():
        squared = model.projection * 2
        with pytest.raises(RuntimeError, match="got mixed") as caught:
            squared + torch.randn(WIDTH, WIDTH)
    assert "'projection' of unit 'root', or what has its shape" in caught.value.__notes__[0]
    del model
    with torch.no_grad(), pytest.raises(RuntimeError, match="got mixed") as caught:
        squared + torch.randn(WIDTH, WIDTH)
    assert not getattr(caught.value, "__notes__", [])


def test_what_was_computed_without_a_graph_is_guessed_by_its_shape(world):
    world.run(2, was_computed_without_a_graph)


def is_right(mesh: Any) -> None:
    """What torch computes on DTensors alone is as it was, and other mixing has no note."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.manual_seed(0)
    plain = Clip()
    whole = plain.projection.detach().clone()
    model = acc.shard(plain, mesh, units={Block})
    x = distribute_tensor(ROWS, mesh, [Replicate()])
    torch.testing.assert_close((x @ model.projection).full_tensor(), ROWS @ whole)
    torch.testing.assert_close((model.projection * 2 + 1).full_tensor(), whole * 2 + 1)
    with pytest.raises(RuntimeError, match="got mixed") as caught:
        x @ whole
    assert not getattr(caught.value, "__notes__", [])
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        distribute_tensor(ROWS.T.contiguous(), mesh, [Replicate()]) @ model.projection


def test_other_operators_and_errors_are_torchs(world):
    world.run(2, is_right)


def wraps_in_ddp(mesh: Any) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = acc.shard(Clip(), mesh, units={Block})
    for one in (model, model.blocks[0]):
        with pytest.raises(acc.UsageError, match="this model is sharded, and DistributedDataParallel"):
            DistributedDataParallel(one)


def test_ddp_over_a_sharded_model_is_refused(world):
    world.run(2, wraps_in_ddp)


def writes(mesh: Any, folder: Path) -> None:
    from safetensors.torch import load_file, save, save_file, save_model

    torch.manual_seed(0)
    plain = Clip()
    whole = {name: t.detach().clone() for name, t in plain.state_dict().items()}
    model = acc.shard(plain, mesh, units={Block})
    for call in (
        lambda: save_file(model.state_dict(), folder / "no.safetensors"),
        lambda: save(dict(model.state_dict())),
        lambda: save_model(model, str(folder / "no.safetensors")),
    ):
        with pytest.raises(acc.UsageError, match=r"accordion\.save_pretrained\(model, folder\), or write what"):
            call()
    assert not (folder / "no.safetensors").exists()
    full = acc.full_state_dict(model)
    if mesh.get_local_rank() == 0:
        save_file(full, folder / "yes.safetensors")
        torch.testing.assert_close(load_file(folder / "yes.safetensors"), whole)


def test_safetensors_says_what_to_call(world, tmp_path):
    pytest.importorskip("safetensors")
    world.run(2, writes, tmp_path)


IMPORTED_LATE = """
import sys, torch.distributed as dist, accordion as acc
from torch import nn
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = acc.shard(nn.Linear(4, 4))
from safetensors.torch import save_file
try:
    save_file(model.state_dict(), sys.argv[1] + ".safetensors")
except acc.UsageError as error:
    print(error)
"""


def test_safetensors_imported_later_says_so_too(tmp_path):
    paths = os.pathsep.join([str(Path(acc.__file__).parents[1]), str(Path(__file__).parents[2])])
    command = [sys.executable, "-c", IMPORTED_LATE, str(tmp_path / "store")]
    said = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, timeout=120)
    assert "safetensors writes whole tensors" in said.stdout, said.stderr


class Adafactor(torch.optim.SGD):
    """Its step meets `error` in an operator."""

    def step(self, error: Exception) -> None:  # type: ignore[override]
        def fail(*args: Any) -> None:
            raise error

        mixed_tensors.answer(fail, torch.ops.aten.add_.Tensor, (), {})


@pytest.mark.parametrize(
    ("text", "its_own"),
    [
        ("aten.add_.Tensor got mixed torch.Tensor and DTensor, need to convert all", True),
        ("aten.pow_.Scalar: in-place operations that require placement changes are not supported.", True),
        ("The size of tensor a (4) must match the size of tensor b (7) at non-singleton dimension 1", False),
        ("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory", False),
    ],
)
def test_an_error_in_a_step_of_adafactor_tells_of_its_means_if_it_comes_from_them(text: str, its_own: bool) -> None:
    with pytest.raises(RuntimeError) as caught:
        Adafactor([nn.Parameter(torch.zeros(1))]).step(RuntimeError(text))
    notes = getattr(caught.value, "__notes__", [])
    assert notes == ([mixed_tensors.NO_ADAFACTOR] if its_own else [])


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
    assert "safetensors writes whole tensors" in other.stdout  # the errors of rank 0
    assert other.returncode != 0
    assert "rank 0" in other.stderr
