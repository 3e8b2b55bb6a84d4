"""torch.distributed.checkpoint on models of `shard` and of compat.fsdp2: equal to FSDP2's, and readable in both directions."""

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
from accordion.compat import fsdp2
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
COMPAT = "compat.fsdp2"
KINDS = [*STRATEGIES, COMPAT]  # of models of this library
USUAL = {("full_shard", "ours"), ("hybrid_shard_optim", "torch's"), (COMPAT, "torch's")}
Pair = tuple[nn.Module, torch.optim.Optimizer]


def made(mesh: Any, kind: str | None, step: int = 0) -> Pair:
    """Return a trained model and its optimizer, of the row `kind` of `KINDS`, or of torch's FSDP2 if that is None."""
    model = models.seeded(vocab=19, width=10, hidden=7)
    if kind in STRATEGIES:
        acc.shard(model, mesh, strategy=STRATEGIES[kind])
    else:
        for block in (*model.blocks, model):
            (fully_shard if kind is None else fsdp2.fully_shard)(block, mesh=over_all(mesh))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind in STRATEGIES:
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


def of_every_kind(mesh: Any, kind: str) -> None:
    pair = made(mesh, None), made(mesh, kind)
    for options in OPTIONS:
        wanted, result = [flat(get_state_dict(m, o, options=StateDictOptions(**options))) for m, o in pair]
        assert list(result) == list(wanted), options
        assert {n: type(v) for n, v in result.items()} == {n: type(v) for n, v in wanted.items()}, options
        devices = [{n: v.device for n, v in each.items() if isinstance(v, Tensor)} for each in (result, wanted)]
        assert devices[0] == devices[1], options
        assert_close(whole(result), whole(wanted), 1e-4)
    # Each loads the other's. Without a broadcast, torch cannot split tensors that have strided placements.
    ways = [(*pair[0], kind, True), (*pair[1], None, True)]
    ways += [(*pair[0], kind, False), (*pair[1], None, False)] if kind == COMPAT else []
    for source, its, target, broadcasts in ways:
        how = StateDictOptions(full_state_dict=True, cpu_offload=broadcasts)
        full, moments = get_state_dict(source, its, options=how)
        assert bool(full) == bool(moments.get("state")) == (dist.get_rank() == 0 or not broadcasts)
        model, optimizer = made(mesh, target, step=5)
        how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcasts)
        # Not `set_state_dict`: if those of a rank are empty, torch's takes the model to be left out, and waits for good.
        set_model_state_dict(model, full, options=how)
        set_optimizer_state_dict(model, optimizer, moments, options=how)
        assert_equal(whole(get_state_dict(model, optimizer)), whole(get_state_dict(source, its)))


@pytest.mark.parametrize("kind", sampled(KINDS, {"full_shard", COMPAT}.__contains__))
def test_state_dicts_equal_those_of_fsdp2(world: Any, kind: str) -> None:
    """Runs on all ranks of the job, as torch's functions require."""
    world.run_mesh(*mesh_of(STRATEGIES.get(kind, acc.FULL_SHARD), 4), of_every_kind, kind)


def stored(mesh: Any, kind: str, writer: str, folder: str, reads: bool) -> dict[str, Tensor]:
    """Save sharded state dicts and the bare parameters by name with one library, and load them with the other."""
    ours = (writer == "ours") != reads
    model, optimizer = made(mesh, kind if ours else None, step=5 if reads else 0)
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
    unlike = set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert (unlike.missing_keys, unlike.unexpected_keys) == ([], [])
    weights, moments = get_state_dict(model, optimizer)
    assert_equal(loaded, whole(weights))
    one_loss(model, 1).backward()
    return whole({"model": weights, "optim": moments})


@pytest.mark.parametrize(("kind", "writer"), sampled(product(KINDS, ["ours", "torch's"]), lambda *row: row in USUAL))
def test_fsdp2_and_accordion_read_each_others_dcp_folders(world: Any, tmp_path: Any, kind: str, writer: str) -> None:
    """The reader has another number of ranks."""
    names = ("replicate", "shard") if kind.startswith("hybrid") else ("shard",)
    shapes = ((2, 2), (2, 1)) if len(names) == 2 else ((3,), (2,))
    wanted, result = (
        world.run_mesh(shape, names, stored, kind, writer, str(tmp_path / "c"), reads)[0]
        for shape, reads in zip(shapes, (False, True), strict=True)
    )
    assert_equal(result, wanted)
