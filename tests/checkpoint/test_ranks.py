"""Checkpoints saved with any number of ranks and any placements, loaded with any other."""

import errno
import importlib
import itertools
import os
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import accordion as acc
from accordion._torch import StridedShard
from accordion.checkpoint import latest, load, save
from accordion.config import strategy_named
from accordion.errors import CheckpointError
from tests.checkpoint.failing import failing
from tests.devices import device
from tests.support.checkpoints import equal_step, sharded
from tests.support.checks import everyone, full, mesh_of
from tests.support.ranked import on_world
from tests.support.sample import drawn, sampled

R, S0, S1 = Replicate(), Shard(0), Shard(1)
AXES = ("replicate", "shard")
LAYOUTS = {  # name -> (shape of the mesh, placements of a parameter)
    "1": ((1,), [S0]),
    "2": ((2,), [S0]),
    "3": ((3,), [S0]),
    "4": ((4,), [S0]),
    "dim 1": ((3,), [S1]),
    "replicated": ((2,), [R]),
    "hybrid": ((2, 2), [R, S0]),
    "over both": ((2, 2), [StridedShard(0, split_factor=2), S0]),
    "over both, 1 shard": ((4, 1), [StridedShard(0, split_factor=1), S0]),
    "blocks": ((2, 2), [S1, S0]),
}


class Model(nn.Module):
    """A model with uneven rows, fewer rows than ranks, no rows, a 0-d parameter, a tie and a buffer."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(13, 6))
        self.few = nn.Parameter(torch.randn(2, 3))
        self.none = nn.Parameter(torch.randn(0, 4))
        self.scale = nn.Parameter(torch.randn(()))
        self.short = nn.Parameter(torch.randn(7, 5).bfloat16())
        self.head = self.embed
        self.register_buffer("seen", torch.arange(3) + seed)


def part_of(whole, mesh, placements):
    """Return this rank's rows of `whole` as `shard` splits them: in the order of the mesh axes, but a strided one last."""
    axes = sorted(range(mesh.ndim), key=lambda axis: isinstance(placements[axis], StridedShard))
    for axis in axes:
        if not isinstance(placements[axis], Replicate):
            chunks = whole.chunk(mesh.size(axis), placements[axis].dim)
            index = mesh.get_coordinate()[axis]
            whole = chunks[index] if index < len(chunks) else whole.narrow(placements[axis].dim, 0, 0)
    return whole


def place(tensor, mesh, placements):
    """Return `tensor`, equal on all ranks, as a DTensor; it is replicated if it lacks the dim to shard."""
    whole = tensor.detach()
    if any(not isinstance(p, Replicate) and p.dim >= whole.ndim for p in placements):
        placements = [R] * mesh.ndim
    return DTensor.from_local(
        part_of(whole, mesh, placements).clone(),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def build(mesh, layout, seed, steps=2):
    """Return a model with the placements of `layout` and its AdamW after two steps."""
    model, full = Model(seed), Model(seed)
    for name, param in full.named_parameters():
        placed = place(param, mesh, LAYOUTS[layout][1])
        if not any(isinstance(p, StridedShard) for p in placed.placements):
            wanted = distribute_tensor(param.detach(), mesh, placed.placements)
            assert torch.equal(placed.to_local(), wanted.to_local())
        setattr(model, name, nn.Parameter(placed))
    model.head = model.embed
    return model, train(model, full, seed, steps)


def build_full(seed):
    """Return the model and optimizer of `build`, unsharded."""
    full = Model(seed)
    return full, train(full, Model(seed), seed, 2)


def train(model, full, seed, steps):
    """Take steps with gradients that are computed from `full`, the weights before them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed, amsgrad=True, foreach=False)
    for step in range(steps):
        for own, param in zip(model.parameters(), full.parameters(), strict=True):
            grad = torch.full_like(param, 0.1 + step) * param.detach().sign()
            own.grad = place(grad, own.device_mesh, own.placements) if isinstance(own, DTensor) else grad
        optimizer.step()
    return optimizer


def tensors_of(model, optimizer):
    """Return all local tensors of this rank by name."""
    tensors = dict(model.state_dict())
    for name, param in model.named_parameters():
        tensors |= {f"{name}/{key}": value for key, value in optimizer.state.get(param, {}).items()}
    return tensors


def assert_holds(model, optimizer, full, full_optimizer):
    """Check that every local tensor is this rank's part of the unsharded one."""
    loaded, wanted = tensors_of(model, optimizer), tensors_of(full, full_optimizer)
    assert loaded.keys() == wanted.keys()
    for name, tensor in loaded.items():
        local, whole = tensor, wanted[name].detach()
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            whole = part_of(whole, tensor.device_mesh, tensor.placements)
        assert torch.equal(local.cpu(), whole.cpu()), name
        assert isinstance(tensor, DTensor) == (name.split("/")[0] != "seen" and not name.endswith("/step")), name


def save_built(mesh, layout, path):
    model, optimizer = build(mesh, layout, 1)
    assert_holds(model, optimizer, *build_full(1))
    save(path, model, optimizer, extra={"layout": layout})


def load_built(mesh, layout, path):
    """Load a checkpoint of another layout into an optimizer without states, and then into one with states."""
    full, full_optimizer = build_full(1)
    model, optimizer = build(mesh, layout, 2, steps=0)
    for _ in range(2):
        places = [param.to_local().data_ptr() for param in model.parameters()]
        extra = load(path, model, optimizer)
        assert places == [param.to_local().data_ptr() for param in model.parameters()]
        assert_holds(model, optimizer, full, full_optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        with torch.no_grad():
            for param in model.parameters():
                optimizer.state[param]["exp_avg"] += param + 1  # the state goes together with the parameter
                optimizer.state[param]["step"] += 1
                param.zero_()
        optimizer.param_groups[0]["lr"] = 7
    return extra


def run(world, layout, fn, *args):
    shape = LAYOUTS[layout][0]
    return world.run_mesh(shape, AXES[-len(shape) :], fn, layout, *args)


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory):
    """Save one checkpoint of each layout."""
    folder = tmp_path_factory.mktemp("saved")
    for layout in LAYOUTS:
        run(world, layout, save_built, folder / layout)
    return folder


PAIRS = [(source, target) for source in LAYOUTS for target in LAYOUTS]
USUAL = drawn(PAIRS, 1, lambda source, _: source) | drawn(PAIRS, 1, lambda _, target: target)


@pytest.mark.parametrize(("source", "target"), sampled(PAIRS, lambda *pair: pair in USUAL))
def test_any_layout_loads_any_other(world, saved, source, target):
    extras = run(world, target, load_built, saved / source)
    assert extras == [{"layout": source}] * len(extras)


def test_ranks_with_rows_to_write_have_a_file(saved):
    files = {layout: len(list((saved / layout).glob("*.safetensors"))) for layout in LAYOUTS}
    assert list(files.values()) == [1, 2, 3, 4, 3, 1, 2, 4, 4, 4]


@on_world(3)
def test_checkpoint_of_another_model_is_refused_on_all_ranks(mesh, saved):
    model, _ = build(mesh, "3", 3)
    model.few = nn.Parameter(place(torch.ones(3, 3, device=device()), mesh, [S0]))
    model.more = nn.Parameter(place(torch.ones(3, device=device()), mesh, [S0]))
    del model.seen
    before = [param.to_local().clone() for param in model.parameters()]
    with pytest.raises(CheckpointError) as caught:
        load(saved / "2", model)
    assert all(torch.equal(param.to_local(), local) for param, local in zip(model.parameters(), before, strict=True))
    error = str(caught.value)
    assert everyone(mesh, error) == [error] * 3
    assert "1 missing in the checkpoint: model/more" in error
    assert "1 in the checkpoint but not in the model: model/seen" in error
    assert "model/few is (2, 3) in the checkpoint and (3, 3) in the model" in error


@pytest.mark.parametrize(("rank", "step"), [(2, 0), (0, 0), (0, 1), (0, 2)])
@on_world(3)
def test_failure_of_one_rank_raises_on_all_and_leaves_nothing(mesh, tmp_path, rank, step):
    """The disk of a rank is full."""
    model, optimizer = build(mesh, "3", 1)
    counter = itertools.count()

    def fails(handle):
        return mesh.get_rank() == rank and next(counter) >= step

    with failing(os, "fsync", errno.ENOSPC, fails), pytest.raises(CheckpointError) as caught:
        save(tmp_path / "c", model, optimizer)
    error = str(caught.value)
    assert everyone(mesh, error) == [error] * 3
    assert error.startswith(f"rank {rank}: OSError: [Errno 28] No space left on device: '{tmp_path}")
    assert os.listdir(tmp_path) == []  # the first rank has removed all before it joined the collective


@on_world(4)
def test_missing_file_raises_on_all_ranks_before_anything_changes(mesh, tmp_path):
    model, optimizer = build(mesh, "4", 1)
    save(tmp_path / "c", model, optimizer)
    assert latest(tmp_path) == str(tmp_path / "c")
    with torch.no_grad():
        model.embed.to_local().zero_()
    torch.distributed.barrier(mesh.get_group())
    if mesh.get_rank() == 3:  # only the last rank needs the last file
        (tmp_path / "c" / "rank-00003.safetensors").unlink()
    torch.distributed.barrier(mesh.get_group())
    with pytest.raises(CheckpointError, match=r"c is damaged: rank-00003\.safetensors: No such file"):
        load(tmp_path / "c", model)
    assert not model.embed.to_local().any()
    with pytest.raises(CheckpointError, match=r"there are checkpoints, and none is complete: .*rank-00003"):
        latest(tmp_path)


@on_world(2)
def test_partial_and_padded_tensors_are_refused_by_save(mesh, tmp_path):
    model, _ = build(mesh, "2", 1)
    model.few = nn.Parameter(DTensor.from_local(torch.ones(2, 3, device=device()), mesh, [Partial()], run_check=False))
    with pytest.raises(CheckpointError, match=r"^model/few is placed .*; a checkpoint holds sharded and replicated"):
        save(tmp_path / "c", model)
    padded = DTensor.from_local(
        torch.ones(2, 3, device=device()), mesh, [S0], shape=(3, 3), stride=(3, 1), run_check=False
    )
    model.few = nn.Parameter(padded)
    with pytest.raises(
        CheckpointError, match=r"^rank 1: model/few of shape \(3, 3\) .* \(1, 3\), but its local tensor"
    ):
        save(tmp_path / "c", model)
    assert os.listdir(tmp_path) == []


@on_world(4)
def test_load_between_sharded_and_unsharded_models(mesh, tmp_path):
    model, optimizer = build(mesh, "4", 1)
    full, full_optimizer = build_full(1)
    save(tmp_path / "plain", full, full_optimizer)
    load_built(mesh, "4", tmp_path / "plain")
    other = Model(5)
    other_optimizer = torch.optim.AdamW(other.parameters())
    save(tmp_path / "sharded", model, optimizer)
    load(tmp_path / "sharded", other, other_optimizer)
    loaded, wanted = tensors_of(other, other_optimizer), tensors_of(full, full_optimizer)
    assert all(torch.equal(loaded[name].cpu(), wanted[name].cpu()) for name in wanted)


def fused(mesh, path):
    """Resume with parameters, states and the learning rate on the device of the mesh."""

    def build_fused(seed):
        model = small(seed, mesh)
        lr = torch.tensor(0.5 * seed, device=mesh.device_type)
        return model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    model, optimizer = build_fused(1)
    model.weight.grad = model.weight.detach() * 3
    optimizer.step()
    save(path, model, optimizer)
    again, other = build_fused(2)
    load(path, again, other)
    loaded, wanted = tensors_of(again, other), tensors_of(model, optimizer)
    loaded["lr"], wanted["lr"] = (its.param_groups[0]["lr"] for its in (other, optimizer))
    assert loaded.keys() == wanted.keys()
    for name, tensor in loaded.items():
        ours, theirs = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, wanted[name]))
        assert ours.device == theirs.device, name
        assert torch.equal(ours, theirs), name


def test_fused_optimizer_resumes(world, tmp_path):
    world.run(2, fused, tmp_path / "c")


@pytest.mark.accelerator
def test_fused_optimizer_resumes_on_an_accelerator(device_world, tmp_path):
    device_world.run(device_world.num_ranks, fused, tmp_path / "c")


NUM_RANKS = {"full_shard": 3, "shard_optim": 2, "no_shard": 2, "hybrid_shard": 2, "hybrid_shard_optim": 2}
PAIRS_OF_STRATEGIES = [("full_shard", 2), ("no_shard", 2), ("hybrid_shard_optim", 2)]  # each is saved or loaded


def train_sharded(mesh, strategy, save_to, load_from, steps):
    """Train a sharded model from one checkpoint to another; return the losses and all full tensors at the start."""
    model, optimizer = sharded(mesh, strategy)
    if load_from is not None:
        assert acc.load(load_from, model, optimizer) == {"step": 2}
    before = full(model)
    losses = [equal_step(model, optimizer) for _ in range(steps)]
    if save_to is not None:
        acc.save(save_to, model, optimizer, extra={"step": steps})
    return losses, before, full(model)


def on_mesh(world, strategy, *args):
    shape, names = mesh_of(strategy_named(strategy), NUM_RANKS[strategy])
    return world.run_mesh(shape, names, train_sharded, strategy, *args)[0]


@pytest.mark.parametrize(
    ("strategy", "count"), sampled(product(NUM_RANKS, (2, len(NUM_RANKS))), lambda *case: case in PAIRS_OF_STRATEGIES)
)
def test_sharded_models_resume_under_any_strategy(world, tmp_path, strategy, count):
    """Save after training with one strategy; load with the same one and the next, or with all others."""
    _, _, saved = on_mesh(world, strategy, tmp_path / "c", None, 2)
    wanted = None
    names = [*NUM_RANKS, *NUM_RANKS]
    for other in names[names.index(strategy) :][:count]:
        losses, loaded, _ = on_mesh(world, other, None, tmp_path / "c", 3)
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
        wanted = wanted or losses
        assert losses == pytest.approx(wanted, rel=1e-5)
    unbroken, _, _ = on_mesh(world, strategy, None, None, 5)
    assert unbroken[2:] == wanted


PIECE = 2**12


def save_in_pieces(mesh, path):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("writing", "save"):
            patch.setattr(importlib.import_module(f"accordion.checkpoint.{name}"), "PIECE_BYTES", PIECE)
        save(path, small(1, mesh))


def small(seed, mesh):
    torch.manual_seed(seed)
    model = nn.Module()
    model.weight = nn.Parameter(place(torch.randn(600, 64, device=mesh.device_type), mesh, [S0]))
    return model


def bytes_read(mesh, path):
    """Return the bytes of the tensor file that a rank reads, and True if it then has its rows."""
    model, read, preadv = small(2, mesh), [], os.preadv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", lambda *words: read.append(preadv(*words)) or read[-1])
        load(path, model)
    assert torch.equal(model.weight.to_local(), small(1, mesh).weight.to_local())
    return sum(read), model.weight.to_local().numel() * 4


def test_rank_reads_its_rows_and_little_more(world, tmp_path):
    world.run(2, save_in_pieces, tmp_path / "c")
    for read, own in world.run(4, bytes_read, tmp_path / "c"):
        headers = 2 * 4000  # of the files
        assert 2 * own <= read <= 2 * own + 2 * PIECE + headers
