"""States neither shaped like the rows of their rank nor equal on all ranks: refused, or saved as an object of each rank."""

import re

import pytest
import torch
import torch.distributed as dist

import accordion as acc
from tests.optim.test_states import trained
from tests.support import models
from tests.support.checks import assert_equal, full, go_on, one_loss
from tests.support.ranked import on_world
from tests.support.row_states import InBlocks, Packed
from tests.support.sample import sampled

MAKERS = {"blocks": InBlocks, "packed": Packed}


def refused(mesh, kind, path, key):
    """Check that a save is refused before anything is written, with the same error on every rank."""
    model, optimizer = trained(mesh, make=MAKERS[kind])
    before = full(model)
    for background in (False, True):
        with pytest.raises(acc.CheckpointError) as caught:
            acc.save(path / "new" / "ckpt", model, optimizer, background=background)
        assert re.search(rf"states.*'{key}' of .*neither shaped.*nor equal on all ranks", str(caught.value))
        assert str(caught.value).count(". ") == 0
        dist.barrier(mesh.get_group())
        assert not (path / "new").exists()
    assert_equal(full(model), before)
    acc.save(path / "weights", model)  # and all is at rest
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "key"),
    sampled([("blocks", "absmax"), ("packed", "packed")], lambda kind, _: kind == "blocks"),
)
def test_states_of_another_shape_are_refused_before_anything_is_written(world, tmp_path, kind, key):
    said = world.run(2, refused, kind, tmp_path, key)
    assert said[0] == said[1]


@on_world(1)
def test_states_of_rows_are_refused_on_one_rank_too(mesh, tmp_path):
    """They are equal on all ranks, but wrong for any other number of ranks."""
    with pytest.raises(acc.CheckpointError, match=r"'absmax' of .*neither shaped"):
        acc.save(tmp_path / "c", *trained(mesh, make=InBlocks))


@on_world(2)
def test_an_optimizer_in_state_resumes_bit_for_bit(mesh, tmp_path):
    model, optimizer = trained(mesh, 3, make=InBlocks)
    acc.save(tmp_path / "c", model, state={"optimizer": optimizer}, extra=3)
    go_on(model, optimizer, range(3, 6))
    other, its = trained(mesh, 1, make=InBlocks, seed=5)
    assert acc.load(tmp_path / "c", other, state={"optimizer": its}) == 3
    go_on(other, its, range(3, 6))
    assert_equal(full(other), full(model))


@on_world(2)
def test_values_that_differ_are_refused(mesh, tmp_path):
    """Check that floats, ints, 0-d tensors and keys are compared over ranks."""
    rank = dist.get_rank()
    model, optimizer = trained(mesh, 1)
    state = optimizer.state[model.head.weight]
    for value in (0.5 * rank, rank, torch.tensor(0.5 * rank)):
        state["own"] = value
        with pytest.raises(acc.CheckpointError, match=r"'own' of head.weight"):
            acc.save(tmp_path / "c", model, optimizer)
    del state["own"]
    for only in (0, 1):
        if rank == only:
            state["mine"] = 3
        with pytest.raises(acc.CheckpointError, match=r"'mine' of head.weight"):
            acc.save(tmp_path / "c", model, optimizer)
        state.pop("mine", None)
    acc.save(tmp_path / "c", model, optimizer)


@on_world(2)
def test_differences_between_optimizers_are_named(mesh, tmp_path):
    path = tmp_path / "ckpt"
    rank = dist.get_rank()
    model = acc.shard(models.seeded(0), mesh=mesh)
    one_loss(model).backward()

    def says(words, optimizer):
        with pytest.raises(acc.CheckpointError, match=words):
            acc.save(path, model, optimizer)

    kinds = [torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)]
    for optimizer in kinds:
        acc.wrap_optimizer(optimizer).step()
    says("rank 0.*AdamW.*rank 1.*SGD", kinds[rank])
    for which in (0, 1):
        words = ("no optimizer", "AdamW")
        says(f"rank 0 has {words[which == 0]} and rank 1 has {words[which == 1]}", kinds[0] if rank == which else None)
    says(
        "rank 0.*0.1.*rank 1.*0.2",
        acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=(0.1, 0.2)[rank])),
    )
    some = list(model.parameters())[rank:]
    says("group/0/params rank 0 has 22 .* rank 1 has 21", acc.wrap_optimizer(torch.optim.SGD(some, lr=0.1)))
    assert not path.exists()
    acc.save(path, model, kinds[0])
    for which in (0, 1):
        with pytest.raises(acc.CheckpointError, match=r"rank 0 has .* and rank 1 has .*optimizer"):
            acc.load(path, model, kinds[0] if rank == which else None)


class Halves(torch.Tensor):
    """A tensor subclass of two inner tensors, as in libraries of low-bit optimizers."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        return NotImplemented


@on_world(2)
def test_a_tensor_subclass_among_states_is_refused_by_name(mesh, tmp_path):
    path = tmp_path / "ckpt"
    model = acc.shard(models.seeded(0), mesh=mesh)
    optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    go_on(model, optimizer, range(1))
    own = model.head.weight.to_local()
    optimizer.state[model.head.weight]["low"] = Halves(torch.zeros(own.shape, dtype=torch.uint8), torch.ones(3))
    with pytest.raises(acc.CheckpointError, match=r"low of head.weight|head.weight/low.*Halves"):
        acc.save(path, model, optimizer)
    assert not path.exists()
