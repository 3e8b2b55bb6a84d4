"""torch.distributed.checkpoint on models of `shard`: equal to FSDP2's, and readable in both directions."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import accordion as acc
from accordion.config import STRATEGIES
from tests.support import models
from tests.support.checks import assert_close, assert_equal, mesh_of, one_loss
from tests.support.sample import sampled

OPTIONS: list[dict[str, Any]] = [
    {},
    {"cpu_offload": True},
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
]
USUAL = {("full_shard", "ours"), ("hybrid_shard_optim", "torch's")}
Pair = tuple[nn.Module, torch.optim.Optimizer]


def made(mesh: Any, strategy: str | None, step: int = 0) -> Pair:
    """Return a trained model and its optimizer, sharded with `strategy`, or by torch's FSDP2 if that is None."""
    model = models.seeded(vocab=19, width=10, hidden=7)
    if strategy is None:
        for block in (*model.blocks, model):
            fully_shard(block, mesh=over_all(mesh))
    else:
        acc.shard(model, mesh, strategy=STRATEGIES[strategy])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if strategy is not None:
        acc.wrap_optimizer(optimizer)
    one_loss(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def over_all(mesh: Any) -> Any:
    """Return a mesh with one axis over all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh
    return mesh["replicate"] if mesh.size(1) == 1 else mesh._flatten("all")


def flat(state: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(state, (dict, list, tuple)):
        return {name: state}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {key: v for k, value in items for key, v in flat(value, f"{name} {k}").items()}


def whole(state: Any) -> dict[str, Tensor]:
    """Return the full tensors and numbers in a state dict."""
    result = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in flat(state).items()}
    numbers = {name: v for name, v in result.items() if isinstance(v, (Tensor, float, int))}
    return {name: torch.as_tensor(v, dtype=torch.float32).cpu() for name, v in numbers.items()}


def of_every_kind(mesh: Any, strategy: str) -> None:
    pair = made(mesh, None), made(mesh, strategy)
    for options in OPTIONS:
        wanted, result = [flat(get_state_dict(m, o, options=StateDictOptions(**options))) for m, o in pair]
        assert list(result) == list(wanted), options
        assert {n: type(v) for n, v in result.items()} == {n: type(v) for n, v in wanted.items()}, options
        devices = [{n: v.device for n, v in each.items() if isinstance(v, Tensor)} for each in (result, wanted)]
        assert devices[0] == devices[1], options
        assert_close(whole(result), whole(wanted), 1e-4)
    for (source, its), target in zip(pair, (strategy, None), strict=True):
        full, moments = get_state_dict(source, its, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        assert bool(full) == bool(moments["state"] if moments else {}) == (dist.get_rank() == 0)
        model, optimizer = made(mesh, target, step=5)
        how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, full, options=how)
        set_optimizer_state_dict(model, optimizer, moments, options=how)
        assert_equal(whole(get_state_dict(model, optimizer)), whole(get_state_dict(source, its)))


@pytest.mark.parametrize("strategy", sampled(STRATEGIES, {"full_shard"}.__contains__))
def test_state_dicts_equal_those_of_fsdp2(world: Any, strategy: str) -> None:
    """Runs on all ranks of the job, as torch's functions require."""
    world.run_mesh(*mesh_of(STRATEGIES[strategy], 4), of_every_kind, strategy)


def stored(mesh: Any, strategy: str, writer: str, folder: str, reads: bool) -> dict[str, Tensor]:
    """Save sharded state dicts and the bare parameters by name with one library, and load them with the other."""
    ours = (writer == "ours") != reads
    model, optimizer = made(mesh, strategy if ours else None, step=5 if reads else 0)
    group = over_all(mesh).get_group()
    bare = {name: p.detach() for name, p in model.named_parameters()}
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments, "bare": bare}
    if not reads:
        dcp.save(state, checkpoint_id=folder, process_group=group)
        return whole({"model": weights, "optim": moments})
    dcp.load({"bare": bare}, checkpoint_id=folder, process_group=group)
    loaded = whole(get_model_state_dict(model))
    dcp.load({"model": weights, "optim": moments}, checkpoint_id=folder, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    weights, moments = get_state_dict(model, optimizer)
    assert_equal(loaded, whole(weights))
    one_loss(model, 1).backward()
    return whole({"model": weights, "optim": moments})


@pytest.mark.parametrize(
    ("strategy", "writer"), sampled(product(STRATEGIES, ["ours", "torch's"]), lambda *case: case in USUAL)
)
def test_fsdp2_and_accordion_read_each_others_dcp_folders(
    world: Any, tmp_path: Any, strategy: str, writer: str
) -> None:
    """The reader has another number of ranks."""
    names = ("replicate", "shard") if strategy.startswith("hybrid") else ("shard",)
    shapes = ((2, 2), (2, 1)) if len(names) == 2 else ((3,), (2,))
    wanted = world.run_mesh(shapes[0], names, stored, strategy, writer, str(tmp_path / "c"), False)[0]
    result = world.run_mesh(shapes[1], names, stored, strategy, writer, str(tmp_path / "c"), True)[0]
    assert_equal(result, wanted)
