"""States neither shaped like the rows of their rank nor equal on all ranks: refused by `save`, or saved for each rank."""

import json
import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import accordion as acc
from accordion.checkpoint.command import inspect
from accordion.checkpoint.reading import verify
from accordion.config import STRATEGIES
from tests.support import models
from tests.support.checkpoints import differing
from tests.support.checks import assert_equal, full, go_on, mesh_of, one_loss
from tests.support.ranked import on_world
from tests.support.row_states import Factored, InBlocks
from tests.support.sample import sampled

KINDS = {"blocks": InBlocks, "factored": Factored}
MAKERS = {**KINDS, "adamw": torch.optim.AdamW}


def built(mesh, kind, seed=0, **options):
    model = acc.shard(models.seeded(seed), mesh=mesh, **options)
    return model, acc.wrap_optimizer(MAKERS[kind](model.parameters()), elementwise=True)


def trained(mesh, kind, steps=3, **options):
    model, optimizer = built(mesh, kind, **options)
    go_on(model, optimizer, range(steps))
    return model, optimizer


def refused(mesh, kind, path, key):
    """Check that a save is refused before anything is written, with the same error on every rank."""
    model, optimizer = trained(mesh, kind)
    before = full(model)
    for background in (False, True):
        with pytest.raises(acc.CheckpointError) as caught:
            acc.save(path / "new" / "ckpt", model, optimizer, background=background)
        assert re.search(
            rf"states.*'{key}' of .*neither shaped.*nor equal on all ranks.*rank_states=True", str(caught.value)
        )
        assert str(caught.value).count(". ") == 0
        dist.barrier(mesh.get_group())
        assert not (path / "new").exists()
    assert_equal(full(model), before)
    acc.save(path / "weights", model)  # and all is at rest
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "key"),
    sampled([("blocks", "absmax"), ("factored", "rows")], lambda kind, _: kind == "blocks"),
)
def test_states_of_another_shape_are_refused_before_anything_is_written(world, tmp_path, kind, key):
    said = world.run(2, refused, kind, tmp_path, key)
    assert said[0] == said[1]


def kept(mesh, kind, path, strategy, background, offload=False):
    options = {"strategy": strategy, **({"offload": acc.Offload(params="host", optimizer="host")} if offload else {})}
    model, optimizer = trained(mesh, kind, **options)
    saving = acc.save(path / "ckpt", model, optimizer, rank_states=True, background=background, extra=3)
    go_on(model, optimizer, range(3, 6))
    saving.wait()
    dist.barrier(mesh.get_group() if mesh.ndim == 1 else None)
    assert verify(path / "ckpt") == []
    for fresh in (True, False):  # an optimizer without states, and one whose states are overwritten
        other, its = built(mesh, kind, seed=5, **options)
        if not fresh:
            go_on(other, its, range(7, 9))
        assert acc.load(path / "ckpt", other, its) == 3
        go_on(other, its, range(3, 6))
        assert_equal(full(other), full(model))
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            own, theirs = optimizer.state[p], its.state[q]
            assert sorted(own) == sorted(theirs)
            for key in own:
                same = torch.equal if isinstance(own[key], torch.Tensor) else (lambda a, b: a == b)
                a, b = (v.to_local() if hasattr(v, "to_local") else v for v in (own[key], theirs[key]))
                assert type(a) is type(b), key
                assert same(a, b), key


@pytest.mark.parametrize(
    ("name", "kind"),
    sampled(
        [(name, kind) for name in ("full_shard", "hybrid_shard", "no_shard") for kind in KINDS],
        lambda name, kind: (name, kind) in (("full_shard", "factored"), ("no_shard", "blocks")),
    ),
)
def test_states_of_each_rank_resume_bit_for_bit(world, tmp_path, name, kind):
    strategy = STRATEGIES[name]
    world.run_mesh(*mesh_of(strategy), kept, kind, tmp_path, strategy, name == "full_shard")


def test_offloaded_states_of_each_rank_resume(world, tmp_path):
    world.run(2, kept, "blocks", tmp_path, acc.FULL_SHARD, True, offload=True)


@on_world(3)
def test_ranks_without_rows_save_empty_states(mesh, tmp_path):
    """Save and load on ranks without rows, whose states have no elements."""
    path = tmp_path / "ckpt"
    model, optimizer = trained(mesh, "blocks", 2)
    acc.save(path, model, optimizer, rank_states=True)
    other, its = built(mesh, "blocks", 1)
    acc.load(path, other, its)
    for each in ((model, optimizer), (other, its)):
        go_on(*each, range(2, 4))
    assert_equal(full(other), full(model))


def save_kept(mesh, kind, path, **options):
    acc.save(path, *trained(mesh, kind, **options), rank_states=True)


def loaded_elsewhere(mesh, kind, path, strategy, words):
    model, optimizer = trained(mesh, kind, strategy=strategy)
    before, states = full(model), {id(p): dict(optimizer.state[p]) for p in model.parameters()}
    with pytest.raises(acc.CheckpointError, match=words):
        acc.load(path, model, optimizer)
    assert_equal(full(model), before)
    assert all(optimizer.state[p][key] is value for p in model.parameters() for key, value in states[id(p)].items())
    with pytest.warns(UserWarning, match="rows") if dist.get_rank() == 0 else nullcontext():
        acc.load(path, model, optimizer, strict=False)
    go_on(model, optimizer, range(1))
    acc.load(path, model)  # the weights, under any cut


def test_states_of_each_rank_are_refused_with_other_shards(world, tmp_path):
    world.run(2, save_kept, "blocks", tmp_path / "two")
    world.run(1, save_kept, "blocks", tmp_path / "one")
    there = r"'absmax' of .*rows.*2 ranks.*1"
    world.run(1, loaded_elsewhere, "blocks", tmp_path / "two", acc.FULL_SHARD, there)
    world.run(2, loaded_elsewhere, "blocks", tmp_path / "two", acc.NO_SHARD, r"other rows")
    world.run(2, loaded_elsewhere, "blocks", tmp_path / "one", acc.FULL_SHARD, r"1 rank.*2")


def of_one_rank(mesh, path, first):
    """Save on one rank, which differs from no other; its states still do not fit other shards."""
    model, optimizer = trained(mesh, "blocks") if first else built(mesh, "blocks")
    if first:
        acc.save(path, model, optimizer)
        acc.load(path, model, optimizer)
    else:
        with pytest.raises(acc.CheckpointError, match=r"1 rank.*2"):
            acc.load(path, model, optimizer)


def test_states_saved_by_one_rank_are_refused_on_two(world, tmp_path):
    world.run(1, of_one_rank, tmp_path / "one", True)
    world.run(2, of_one_rank, tmp_path / "one", False)


def test_commands_list_states_of_each_rank(world, tmp_path, capsys):
    for i in (1, 2):
        world.run(2, save_kept, "blocks", tmp_path / f"step-{i}", steps=i)
    world.run(2, save_kept, "blocks", tmp_path / "again", steps=1)
    found = inspect(tmp_path / "step-1")
    absmax = [name for name in found["tensors"] if name.endswith("absmax")]
    assert {name.split("/")[1] for name in absmax} == {"00000", "00001"}
    assert found["rank_states"]["num_ranks"] == 2
    assert "absmax" in json.dumps(found["rank_states"])
    assert not differing(tmp_path / "step-1", tmp_path / "step-2").isdisjoint(absmax)
    assert differing(tmp_path / "step-1", tmp_path / "again") == set()
    assert verify(tmp_path / "step-1") == []
    held = found["tensors"][absmax[0]]["num_bytes"]
    assert held
    path = tmp_path / "step-1" / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    at = next(
        chunk["at"]
        for name, entry in json.loads((tmp_path / "step-1" / "manifest.json").read_text())["tensors"].items()
        for chunk in entry["chunks"]
        if name.startswith("rank/00001") and name.endswith("absmax") and chunk["file"] == path.name
    )
    data[at] ^= 1
    path.write_bytes(data)
    assert any("absmax is damaged" in fault for fault in verify(tmp_path / "step-1"))
    world.run(2, damaged, tmp_path / "step-1")


def damaged(mesh, path):
    model, optimizer = trained(mesh, "blocks")
    before = full(model)
    with pytest.raises(acc.CheckpointError, match="absmax is damaged"):
        acc.load(path, model, optimizer)
    assert_equal(full(model), before)


@on_world(2)
def test_values_that_differ_are_refused_or_saved_for_each_rank(mesh, tmp_path):
    """Check that floats, ints, 0-d tensors, keys, options and classes are compared over ranks."""
    rank = dist.get_rank()
    for i, make in enumerate((lambda: 0.5 * rank, lambda: rank, lambda: torch.tensor(0.5 * rank))):
        model, optimizer = trained(mesh, "adamw", 1)
        optimizer.state[model.head.weight]["own"] = make()
        with pytest.raises(acc.CheckpointError, match=r"'own' of head.weight.*rank_states"):
            acc.save(tmp_path / f"{i}", model, optimizer)
        acc.save(tmp_path / f"{i}", model, optimizer, rank_states=True)
        other, its = built(mesh, "adamw", 1)
        acc.load(tmp_path / f"{i}", other, its)
        assert its.state[other.head.weight]["own"] == make(), (i, its.state[other.head.weight]["own"])
    for only in (0, 1):
        model, optimizer = trained(mesh, "adamw", 1)
        if rank == only:
            optimizer.state[model.head.weight]["mine"] = 3
        with pytest.raises(acc.CheckpointError, match=r"'mine' of head.weight.*rank_states"):
            acc.save(tmp_path / "key", model, optimizer)
        acc.save(tmp_path / "key", model, optimizer, rank_states=True)
        other, its = built(mesh, "adamw", 1)
        acc.load(tmp_path / "key", other, its)
        assert ("mine" in its.state[other.head.weight]) == (rank == only)
        assert "exp_avg" in its.state[other.head.weight]


@on_world(2)
def test_differences_between_optimizers_are_named(mesh, tmp_path):
    path = tmp_path / "ckpt"
    rank = dist.get_rank()
    model = acc.shard(models.seeded(0), mesh=mesh)
    one_loss(model).backward()

    def says(words, optimizer):
        with pytest.raises(acc.CheckpointError, match=words):
            acc.save(path, model, optimizer, rank_states=True)

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
