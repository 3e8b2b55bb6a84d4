"""`shard` compares arguments, models and values before it changes anything; errors name the rank and both values everywhere."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import accordion as acc
from accordion import _torch
from accordion.shard import same_mesh as meshes
from tests.safety.test_divergence import IN_STREAMS, impatient
from tests.support import models
from tests.support.checks import assert_equal, everyone, full, leave_together, one_loss
from tests.support.ranked import on_mesh, on_world, under_strategies
from tests.support.reference import local_of, params_of

BF16 = acc.Precision(params=torch.bfloat16)
Arguments = tuple[Callable[[], nn.Module], dict[str, Any]]


def passes(build: Callable[[], nn.Module] = models.plain, **options: Any) -> Arguments:
    """Return a model and arguments of `shard`."""
    return build, options


def layers(*widths: int, **options: Any) -> Callable[[], nn.Module]:
    """Return a function that builds linear layers of these widths, each with `options`."""
    return lambda: nn.Sequential(*(nn.Linear(*pair, **options) for pair in pairwise(widths)))


PLAIN = passes()
ONE = passes(layers(4, 5))
# What rank 1 passes to `shard`, what the others pass, and the difference in the error.
DIFFERENT: dict[str, tuple[Arguments, Arguments, str]] = {
    "reduce_op": (passes(reduce_op="sum"), PLAIN, "reduce_op 'sum' (rank 0: 'mean')"),
    "debug": (PLAIN, passes(debug="order"), "debug [] (rank 0: ['order'])"),
    "prefetch": (passes(prefetch=acc.Prefetch(budget_bytes=9)), PLAIN, "prefetch.budget_bytes 9 (rank 0: None)"),
    "activations": (passes(checkpoint_activations="full"), PLAIN, "checkpoint_activations 'full' (rank 0: 'none')"),
    "precision": (passes(precision=BF16), PLAIN, "precision.params bfloat16 (rank 0: None)"),
    "output": (passes(precision=acc.Precision(output=torch.float16)), PLAIN, "precision.output float16 (rank 0: None)"),
    "override": (
        passes(precision=acc.Precision(overrides={"blocks.1": BF16}), units={models.Block}),
        passes(units={models.Block}),
        "precision.params of unit 'blocks.1' bfloat16 (rank 0: not at all)",
    ),
    "offload": (passes(offload=acc.Offload(optimizer="host")), PLAIN, "offload.optimizer 'host' (rank 0: 'device')"),
    "strategy": (passes(strategy=acc.SHARD_OPTIM), PLAIN, "strategy shard_optim (rank 0: full_shard)"),
    "units": (passes(units=set()), passes(units={models.Block}), "unit 'blocks.0' not at all (rank 0: Block)"),
    "sync": (passes(sync=True), PLAIN, "sync True (rank 0: False)"),
    "secondary": (passes(secondary=3), PLAIN, "secondary 3 (rank 0: None)"),
    "width": (
        passes(layers(4, 6)),
        ONE,
        "parameter '0.weight' float32 (6, 4), trained, in unit '' (rank 0: float32 (5, 4), trained, in unit '')",
    ),
    "dtype": (passes(layers(4, 5, dtype=torch.float16)), ONE, "parameter '0.weight' float16 (5, 4), trained"),
    "depth": (passes(layers(4, 5, 5)), ONE, "parameter '1.weight' float32 (5, 5)"),
    "frozen": (passes(lambda: ONE[0]().requires_grad_(False)), ONE, "parameter '0.weight' float32 (5, 4), frozen"),
    "meta": (passes(layers(4, 5, device="meta")), ONE, "parameter '0.weight' float32 (5, 4) on meta, trained"),
    "many": (passes(layers(4, 5, 5, 5, 5)), ONE, " and 3 more"),
}


@pytest.mark.parametrize("name", DIFFERENT)
@on_world(3)
def test_different_arguments_and_models_are_named_with_both_values(mesh: Any, name: str) -> None:
    mine, others, words = DIFFERENT[name]
    build, options = mine if mesh.get_rank() == 1 else others
    model = build()
    with pytest.raises(acc.DivergenceError, match="ranks hold different models or settings: rank 1 has ") as caught:
        acc.shard(model, mesh=mesh, **options)
    error = str(caught.value)
    assert words in error
    assert "rank 2" not in error
    assert set(everyone(mesh, error)) == {error}
    assert all(type(p) is nn.Parameter and p.numel() for p in model.parameters())  # as it was


# -- meshes


@on_mesh((2, 2), ("replicate", "shard"), pool="alone")
def test_meshes_of_other_shapes_are_named_on_every_rank(mesh: Any) -> None:
    """Rank 0 gives a flat mesh of all ranks, the others give a mesh with two axes."""
    rank, flat = dist.get_rank(), init_device_mesh(mesh.device_type, (4,))
    given, strategy = (mesh, acc.HYBRID_SHARD) if rank else (flat, acc.FULL_SHARD)
    time.sleep(1.5 if rank == 3 else 0.0)  # the others have detected the difference by then
    began = time.monotonic()
    shapes = r"rank 0 gave \(4,\) of ranks \[0, 1, 2, 3\], rank \d gave \(2, 2\) of ranks \[0, 1, 2, 3\]"
    error = f"^ranks gave other meshes and wait for each other: {shapes}; pass the same mesh"
    with mock.patch.object(meshes, "POLL_S", 0.3), pytest.raises(acc.DivergenceError, match=error):
        acc.shard(models.plain(), mesh=given, strategy=strategy)
    assert time.monotonic() - began < 30.0
    leave_together(mesh)


@on_mesh((2, 2), ("replicate", "shard"))
def test_shard_waits_for_ranks_that_are_late_from_another_mesh(mesh: Any) -> None:
    """Some ranks shard over another mesh first: the others wait, and all continue."""
    rank, flat = dist.get_rank(), init_device_mesh(mesh.device_type, (4,))
    if rank == 3:
        time.sleep(1.5)
    for given in (mesh["replicate"], flat) if rank in (1, 3) else (flat,):
        with mock.patch.object(meshes, "POLL_S", 0.3):
            model = acc.shard(models.plain(), mesh=given)
        one_loss(model).backward()


@on_mesh((2, 1), ("replicate", "shard"))
def test_a_rank_with_a_mesh_of_its_own_is_named(mesh: Any) -> None:
    """Rank 1 passes another mesh than rank 0, which raises within the job's timeout."""
    both = mesh["replicate"].get_group()
    if dist.get_rank():
        acc.shard(models.plain(), mesh=mesh["shard"])
    else:
        with (
            mock.patch.object(_torch, "timeout_s_of_job", return_value=2.0),
            mock.patch.object(meshes, "MARGIN_S", 0.0),
            pytest.raises(acc.DivergenceError) as caught,
        ):
            acc.shard(models.plain(), mesh=mesh, strategy=acc.HYBRID_SHARD)
        error = str(caught.value)
        waits = "this rank gave a mesh of (2, 1) of ranks [0, 1] and waits for rank 1 (gave (1,) of ranks [1] last)"
        assert waits in error, error
        assert "None of them came in 2 s" in error
    dist.barrier(both)


@on_world(3)
def test_different_values_are_named_by_rank_and_parameter(mesh: Any) -> None:
    model = models.plain()
    if mesh.get_rank() == 2:
        with torch.no_grad():
            model.blocks[0].up.weight.copy_(model.blocks[0].up.weight.flip(0))  # the same numbers elsewhere
    error = "rank 2 has parameter 'blocks.0.up.weight' with checksum "
    with pytest.raises(acc.DivergenceError, match=error) as caught:
        acc.shard(model, mesh=mesh)
    assert "rank 1" not in str(caught.value)
    assert "and " not in str(caught.value).partition(";")[0]


# -- buffers


class Counts(nn.Module):
    """`shared` is in the state dict, `own` is not."""

    def __init__(self, shared: float = 0.0, own: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean.fill_(shared)
        self.register_buffer("own", torch.full((2,), own), persistent=False)


@on_world(2)
def test_buffers_of_the_state_dict_must_be_equal_and_others_may_differ(mesh: Any) -> None:
    rank = float(dist.get_rank())
    with pytest.raises(
        acc.DivergenceError, match=r"rank 1 has buffer 'norm.running_mean' with.*persistent=False"
    ) as caught:
        acc.shard(Counts(shared=rank), mesh=mesh)
    assert "parameter" not in str(caught.value).partition(";")[0]
    assert "'own'" not in str(caught.value)
    model = acc.shard(Counts(own=rank), mesh=mesh)
    assert model.own.tolist() == [rank, rank]
    model = acc.shard(Counts(shared=rank + 1, own=rank + 1), mesh=mesh, sync=True)
    assert model.own.tolist() == [1, 1]
    assert model.norm.running_mean.tolist() == [1, 1, 1, 1]


# -- the first rank's for all


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = models.plain()
        self.tied = nn.Linear(3, 3)
        self.again = self.tied
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.randn(4), persistent=False)
        self.register_buffer("same", self.table)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(tokens)


@under_strategies("hybrid_shard_optim")
def test_sync_copies_the_first_rank_to_ranks_on_meta(mesh: Any, strategy: acc.Strategy) -> None:
    torch.manual_seed(5)
    wanted = Whole()
    torch.manual_seed(5)
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        given = Whole()
    model = acc.shard(given, mesh=mesh, strategy=strategy, sync=True)
    assert_equal(params_of(model), dict(wanted.named_parameters()))
    assert_equal(dict(model.named_buffers()), dict(wanted.named_buffers()))
    assert model.table is model.same
    model(models.batch(0, 0, dist.get_rank(), vocab=model.body.embed.num_embeddings)[0]).sum().backward()


@on_world(2)
def test_sync_refuses_tensors_that_are_on_meta_on_the_first_rank_alone(mesh: Any) -> None:
    model = nn.Linear(8, 8, device="cpu" if mesh.get_rank() else "meta")
    with pytest.raises(
        acc.DivergenceError, match=r"2 tensors are on the meta device there .* the first is parameter 'weight'"
    ):
        acc.shard(model, mesh=mesh, sync=True)
    model = nn.BatchNorm1d(8, affine=False, device="cpu" if mesh.get_rank() else "meta")
    with pytest.raises(acc.DivergenceError, match=r"2 tensors|3 tensors"):
        acc.shard(nn.Sequential(nn.Linear(2, 2), model), mesh=mesh, sync=True)
    nowhere = acc.shard(nn.Linear(8, 8, device="meta"), mesh=mesh, sync=True)
    assert all(not p.to_local().any() for p in nowhere.parameters())


# -- full tensors loaded after `shard`


def held(model: nn.Module) -> dict[str, Tensor]:
    return {name: local_of(tensor).clone() for name, tensor in model.state_dict().items()}


@under_strategies("hybrid_shard_optim")
def test_loading_different_full_tensors_raises_before_anything_changes(mesh: Any, strategy: acc.Strategy) -> None:
    rank = dist.get_rank()
    model = acc.shard(models.plain(), mesh=mesh, strategy=strategy)
    before, right = held(model), models.seeded(9).state_dict()
    other = {**right, "blocks.1.up.weight": right["blocks.1.up.weight"] + rank}
    mixed = {**model.state_dict(), "embed.weight": right["embed.weight"]}  # some rows, some full
    wrong: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (other, right, r"rank 1 has 'blocks.1.up.weight' float32 \(\d+, \d+\) with checksum .* \(rank 0: float32"),
        ({}, right, "rank 1 has 'embed.weight' not at all .rank 0: float32"),
        ({**right, "embed.weight": right["embed.weight"].double()}, right, "rank 1 has 'embed.weight' float64"),
        (mixed, right, r"rank 1 has 'blocks.0\.\S+' float32 .* as \(.* \(rank 0: float32"),
    ]
    for mine, others, message in wrong:
        with pytest.raises(acc.DivergenceError, match="nothing was loaded") as caught:
            model.load_state_dict(mine if rank == 1 else others, strict=False)
        assert re.search(message, str(caught.value)), str(caught.value)
        assert_equal(held(model), before)
    model.load_state_dict(right)
    assert_equal(full(model), right)
    one_loss(model).backward()


def loads_its_shards(mesh: Any) -> None:
    model = acc.shard(models.plain(), mesh=mesh)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = held(model)
    with torch.no_grad():
        for param in model.parameters():
            local_of(param).zero_()
    if mesh.get_rank() == 1:
        model.load_state_dict(kept)
        assert_equal(held(model), before)
    dist.barrier(mesh.get_group())


def test_one_rank_alone_can_load_its_shards(world):
    """Loading a sharded state dict is no collective."""
    # In new processes: if a rank has computed with tensors from a file, DTensor's cache gives clones the mesh of that file, and
    # the load is then collective (docs/checkpoint.md).
    world.close()
    world.run(2, loads_its_shards)


TRAINS = ("rank 0 loads full tensors (load_state_dict)", "rank 1 ")
# The last part is the line of the other rank's program.
NEVER_JOINS = ("this rank loads full tensors (load_state_dict)", "rank 1 is outside of the model", "at checks.py:")


@pytest.mark.parametrize(
    ("num_steps", "expected"), [(0, TRAINS), pytest.param(2, TRAINS, marks=IN_STREAMS), (2, NEVER_JOINS)]
)
@on_mesh((2,), pool="alone")
def test_a_load_on_the_first_rank_alone_is_reported(mesh: Any, num_steps: int, expected: tuple[str, ...]) -> None:
    """Rank 1 trains, and joins the load in its next forward, or does something else."""
    model = acc.shard(models.plain(), mesh=mesh)
    for step in range(num_steps):
        one_loss(model, step).backward()
    state = models.plain().state_dict()
    if expected == TRAINS or not mesh.get_rank():
        with impatient(lost_s=2.5), pytest.raises(acc.DivergenceError) as caught:
            one_loss(model).backward() if mesh.get_rank() else model.load_state_dict(state)
        assert all(part in str(caught.value) for part in expected), str(caught.value)
    leave_together(mesh)
