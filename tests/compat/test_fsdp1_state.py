"""FullyShardedDataParallel of compat.fsdp1: state dicts of models and optimizers, full and sharded."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import accordion as acc
from accordion.compat.fsdp1 import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from accordion.compat.fsdp1 import FullyShardedDataParallel as FSDP  # noqa: N817
from tests.compat.test_fsdp1 import (
    POLICIES,
    SIZE,
    assert_same_state,
    batch,
    seeded,
    train,
    unsharded_steps,
    without_counters,
)
from tests.compat.test_fsdp1_beside_torch import assert_same_tensors
from tests.devices import here
from tests.support.ranked import on_world


def full_state_dicts(mesh: DeviceMesh) -> Any:
    rank = dist.get_rank()
    model = FSDP(seeded(), auto_wrap_policy=SIZE, device_mesh=mesh)
    expected, _, plain = unsharded_steps(mesh.size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, rank, optimizer=optimizer)
    configs = (FullStateDictConfig(offload_to_cpu=True, rank0_only=True), FullOptimStateDictConfig(rank0_only=True))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        assert FSDP.get_state_dict_type(model).state_dict_config == configs[0]
        weights, state = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    assert FSDP.get_state_dict_type(model).state_dict_config == FullStateDictConfig()
    if rank:
        assert (weights, state) == ({}, {})
    else:
        assert_same_state({k: v for k, v in weights.items() if k != "seen"}, without_counters(expected), 1e-5)
        named = {n: plain.state[p] for n, p in expected.named_parameters()}
        assert list(state["state"]) == list(named)
        for name, entry in named.items():
            torch.testing.assert_close(
                state["state"][name]["exp_avg"].cpu(), entry["exp_avg"].cpu(), rtol=1e-4, atol=1e-6
            )
    return weights, state


def loads_full(mesh: DeviceMesh, weights: dict[str, Any], state: dict[str, Any]) -> None:
    """Load weights on every rank, and the optimizer's state from the first one, on another number of ranks than saved."""
    rank = dist.get_rank()
    model = FSDP(seeded(seed=7), auto_wrap_policy=POLICIES["module"], device_mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    assert model.load_state_dict(weights).missing_keys == []
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True)
    ):
        found = FSDP.optim_state_dict_to_load(model, optimizer, state if rank == 0 else {}, load_directly=True)
    assert found["param_groups"][0]["params"] == list(range(16))
    again = model.state_dict()
    assert_same_state(again, weights, 0.0)
    older = FSDP.full_optim_state_dict(model, optimizer)
    if rank == 0:
        assert_same_tensors(older, state)
    whole = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    for by_older_name in (
        FSDP.shard_full_optim_state_dict(whole, model, optim=optimizer),
        FSDP.scatter_full_optim_state_dict(state if rank == 0 else None, model, optim=optimizer),
        FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer),
    ):
        assert_same_tensors(by_older_name, found)
    with pytest.raises(acc.UsageError, match="as optim="):
        FSDP.shard_full_optim_state_dict(whole, model)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({k: v for k, v in weights.items() if k != "last.bias"})


def test_full_state_dicts_on_the_first_rank(world):
    weights, state = world.run(2, full_state_dicts)[0]
    world.run(4, loads_full, weights, state)


def loads_apart(mesh: DeviceMesh, weights: dict[str, Any], state: dict[str, Any]) -> None:
    """Rank 1 loads other values than rank 0, of weights or of the optimizer's state."""
    model = FSDP(seeded(seed=7), auto_wrap_policy=POLICIES["module"], device_mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    rank, name = dist.get_rank(), "last.bias"
    before = {n: p.to_local().clone() for n, p in model.named_parameters()}
    with pytest.raises(acc.DivergenceError, match=rf"nothing was loaded|rank 1 has '{name}'"):
        model.load_state_dict({**weights, name: weights[name] + rank})
    assert all(torch.equal(p.to_local(), before[n]) for n, p in model.named_parameters())
    of_it = state["state"][name]
    grown = {**state, "state": {**state["state"], name: {**of_it, "exp_avg": of_it["exp_avg"] + rank}}}
    later = {**state, "state": {**state["state"], name: {**of_it, "step": of_it["step"] + rank}}}
    faster = {**state, "param_groups": [{**group, "lr": 0.1 * (rank + 1)} for group in state["param_groups"]]}
    fewer = {**state, "state": {n: entry for n, entry in state["state"].items() if n != name or not rank}}
    for given, told in (
        (grown, rf"rank 1 has 'exp_avg' of '{name}' float32 \(\d+,\) with checksum \S+ \(rank 0: float32"),
        (later, rf"rank 1 has 'step' of '{name}' float32 \(\) with checksum"),
        (faster, r"rank 1 has 'lr' of group 0 0\.2 \(rank 0: 0\.1\)"),
        (fewer, rf"rank 1 has 'step' of '{name}' not at all"),
        ({} if rank else state, r"rank 1 has .* not at all"),
    ):
        for load in (
            lambda given=given: FSDP.optim_state_dict_to_load(model, optimizer, given, load_directly=True),
            lambda given=given: FSDP.shard_full_optim_state_dict(given, model, optim=optimizer),
        ):
            with pytest.raises(acc.DivergenceError, match=r"optimizer's state .* nothing was loaded") as caught:
                load()
            assert re.search(told, str(caught.value)), str(caught.value)
            assert not optimizer.state
    FSDP.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    assert optimizer.state
    rows = FSDP.sharded_optim_state_dict(model, optimizer)
    if rank == 0:  # rows are each rank's own affair
        FSDP.flatten_sharded_optim_state_dict(rows, model, optimizer)


def test_full_state_dicts_that_differ_are_refused_on_every_rank(world):
    weights, state = world.run(2, full_state_dicts)[0]
    world.run(2, loads_apart, weights, state)


@on_world(2)
def test_optimizer_states_with_foreign_and_missing_keys(mesh: DeviceMesh) -> None:
    """As with torch's class, entries of no parameter are copied, parameters may lack entries, and dicts may lack groups."""
    model = FSDP(seeded(), auto_wrap_policy=SIZE, device_mesh=mesh)
    rank, optimizer = dist.get_rank(), torch.optim.AdamW(model.parameters(), lr=0.05)
    assert FSDP.optim_state_dict(model, optimizer)["state"] == {}
    train(model, rank, optimizer=optimizer)
    optimizer.state.update(count=7, own={"mean": torch.ones(3)})
    numbered = optimizer.state_dict()
    first_rank = FullOptimStateDictConfig(rank0_only=True)
    for kind, config in (("FULL_STATE_DICT", None), ("FULL_STATE_DICT", first_rank), ("SHARDED_STATE_DICT", None)):
        with FSDP.state_dict_type(model, StateDictType[kind], None, config):
            state = FSDP.optim_state_dict(model, optimizer)
            partial = FSDP.optim_state_dict(model, optimizer, {"state": numbered["state"]})
            assert (state, partial) == ({}, {}) if rank and config else partial.keys() == {"state"}
            moved = {name.replace("last.bias", "old"): entry for name, entry in partial.get("state", {}).items()}
            load = functools.partial(FSDP.optim_state_dict_to_load, model, optimizer)
            assert_same_tensors(load(state), numbered)
            assert_same_tensors(load(partial), {"state": numbered["state"]})
            assert load({"state": moved})["state"].keys() == {*range(15), "count", "own", "old"}
            for lacking in ({}, {"param_groups": state.get("param_groups")}):
                with pytest.raises(acc.UsageError, match="lacks 'state'"):
                    load(lacking)


@on_world(2)
def test_sharded_state_dicts_and_checkpoints_of_this_package(mesh: DeviceMesh, tmp_path: Path) -> None:
    rank = dist.get_rank()
    model = FSDP(seeded(), auto_wrap_policy=SIZE, device_mesh=mesh)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    train(model, rank, optimizer=optimizer)
    before = FSDP.set_state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)
    )
    assert before.state_dict_type is StateDictType.FULL_STATE_DICT
    sharded = model.state_dict()
    assert all(isinstance(value, DTensor) for name, value in sharded.items() if name != "seen")
    assert list(sharded) == list(seeded().state_dict())
    acc.save(f"{tmp_path}/checkpoint", model, optimizer)
    other = acc.shard(seeded(seed=3), mesh)
    its_optimizer = acc.wrap_optimizer(torch.optim.AdamW(other.parameters(), lr=0.05))
    acc.load(f"{tmp_path}/checkpoint", other, its_optimizer)
    assert train(other, rank, optimizer=its_optimizer) == train(model, rank, optimizer=optimizer)
    kept = model.state_dict(keep_vars=True)
    assert {id(p) for p in model.parameters()} <= {id(v) for v in kept.values()}


class Two(nn.Module):
    """A plain module with two wrapped modules, which have an engine each."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = FSDP(nn.Linear(4, 8), device_mesh=mesh), FSDP(nn.Linear(8, 3), device_mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


@on_world(2)
def test_wrapped_modules_in_a_plain_one(mesh: DeviceMesh) -> None:
    model = Two(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert [w.check_is_root() for w in FSDP.fsdp_modules(model, root_only=True)] == [True, True]
    plain = here(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    full = model.state_dict(prefix="net.")
    plain_names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert list(full) == [f"net.{name}" for name in plain_names]
    plain.load_state_dict(dict(zip(plain.state_dict(), full.values(), strict=True)))
    its = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        its.zero_grad()
        model(batch(step, dist.get_rank())).pow(2).mean().backward()
        sum(plain(batch(step, r)).pow(2).mean() / 2 for r in range(2)).backward()
        optimizer.step()
        its.step()
    assert FSDP.optim_state_dict(model, optimizer)["param_groups"][0]["params"] == plain_names
    with FSDP.summon_full_params(model):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.data, theirs.data, rtol=1e-5, atol=1e-6)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    model.load_state_dict(state)
    with torch.no_grad():
        before = model(batch(0, 0))
        model.load_state_dict({name.removeprefix("net."): value for name, value in full.items()})
        assert not torch.equal(model(batch(0, 0)), before)
