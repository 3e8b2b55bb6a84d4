"""FullyShardedDataParallel of compat.fsdp1: state dicts of models and optimizers, and torch's own class next to it."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import accordion as acc
from accordion.compat.fsdp1 import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    StateDictType,
)
from accordion.compat.fsdp1 import FullyShardedDataParallel as FSDP  # noqa: N817
from accordion.compat.fsdp1 import wrap as wrapping
from tests.compat.test_fsdp1 import (
    BF16,
    POLICIES,
    SIZE,
    Net,
    WithNorm,
    assert_same_state,
    batch,
    seeded,
    train,
    unsharded_steps,
    without_counters,
)
from tests.devices import device, here
from tests.support.checks import assert_close
from tests.support.ranked import on_world


def assert_same_tensors(found: Any, expected: Any, name: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            assert_same_tensors(found[key], value, f"{name}.{key}")
    elif isinstance(expected, Tensor):
        assert isinstance(found, DTensor) == isinstance(expected, DTensor), name
        if isinstance(expected, DTensor):
            assert (found.shape, found.placements) == (expected.shape, expected.placements), name
            found, expected = found.to_local(), expected.to_local()
        torch.testing.assert_close(
            found.cpu(), expected.cpu(), rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}"
        )
    else:
        assert found == expected, name


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


@on_world(2)
def test_wrapped_modules_in_a_plain_one(mesh: DeviceMesh) -> None:
    """Each of the two wrapped modules has its own engine."""

    def stack() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)]

    model = nn.Sequential(*[FSDP(m, device_mesh=mesh) if isinstance(m, nn.Linear) else m for m in stack()])
    plain = here(nn.Sequential(*stack()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert [w.check_is_root() for w in FSDP.fsdp_modules(model, root_only=True)] == [True, True]
    full = model.state_dict(prefix="net.")
    assert_same_state(full, {f"net.{name}": value for name, value in plain.state_dict().items()}, 0.0)
    its = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        its.zero_grad()
        model(batch(step, dist.get_rank())).pow(2).mean().backward()
        sum(plain(batch(step, r)).pow(2).mean() / 2 for r in range(2)).backward()
        optimizer.step()
        its.step()
    assert FSDP.optim_state_dict(model, optimizer)["param_groups"][0]["params"] == list(plain.state_dict())
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


# -- torch's own class on the same ranks


def torchs(mesh: DeviceMesh, policy: Any = None, make: Any = Net, **arguments: Any) -> nn.Module:
    """Options for torch's class. On CPU it gathers full state dicts of optimizers, but crashes for models (2.13.0)."""
    with warnings.catch_warnings(action="ignore"):
        return torch_fsdp.FullyShardedDataParallel(
            seeded(make), auto_wrap_policy=policy, device_mesh=mesh, device_id=device(), use_orig_params=True,
            **arguments,
        )  # fmt: skip


def states_of(cls: Any, model: nn.Module, optimizer: Any, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    with warnings.catch_warnings(action="ignore"), cls.state_dict_type(model, StateDictType[kind]):
        weights = model.state_dict() if kind == "SHARDED_STATE_DICT" else {}
        return weights, cls.optim_state_dict(model, optimizer)


def reads(folder: str, model: Any, optimizer: Any, again: Any) -> None:
    """Training resumes from a checkpoint of the other class with equal losses."""
    rank, (cls, its_cls) = dist.get_rank(), (type(model), type(again))
    with warnings.catch_warnings(action="ignore"):
        weights, state = states_of(cls, model, optimizer, "SHARDED_STATE_DICT")
        dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
        its_optimizer = torch.optim.AdamW(again.parameters(), lr=0.05)
        train(again, rank, 1, optimizer=its_optimizer)
        with its_cls.state_dict_type(again, StateDictType.SHARDED_STATE_DICT):
            loaded = {"model": again.state_dict(), "optim": its_cls.optim_state_dict(again, its_optimizer)}
            dcp.load(loaded, checkpoint_id=folder)
            again.load_state_dict(loaded["model"])
            loadable = its_cls.optim_state_dict_to_load(again, its_optimizer, loaded["optim"])
            its_optimizer.load_state_dict(loadable)
        assert train(again, rank, optimizer=its_optimizer) == pytest.approx(
            train(model, rank, optimizer=optimizer), abs=1e-5
        )


@pytest.mark.parametrize("writer", ["torch", pytest.param("ours", marks=pytest.mark.slow)])
@on_world(4)  # all ranks: torch's class takes the default group here and there
def test_beside_torchs_own_class(mesh: DeviceMesh, tmp_path: Path, writer: str) -> None:
    rank = dist.get_rank()
    theirs, ours = (
        torchs(mesh, POLICIES["module"]),
        FSDP(seeded(), auto_wrap_policy=POLICIES["module"], device_mesh=mesh),
    )
    assert repr(ours) == repr(theirs)
    opt_theirs, opt_ours = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (theirs, ours))
    for step in range(3):
        found = []
        for model, optimizer in ((theirs, opt_theirs), (ours, opt_ours)):
            optimizer.zero_grad()
            loss = model(batch(step, rank)).pow(2).mean()
            loss.backward()
            norm = model.clip_grad_norm_(0.5)
            cls: Any = type(model)
            with cls.summon_full_params(model, with_grads=True):
                grads = {n: p.grad.clone() for n, p in model.named_parameters()}
            optimizer.step()
            found.append((loss.detach(), norm, grads))
        assert_close(found[1][2], found[0][2], 1e-6)
        torch.testing.assert_close(found[1][:2], found[0][:2], rtol=1e-6, atol=1e-6)
    weights, state = states_of(FSDP, ours, opt_ours, "SHARDED_STATE_DICT")
    their_weights, their_state = states_of(
        torch_fsdp.FullyShardedDataParallel, theirs, opt_theirs, "SHARDED_STATE_DICT"
    )
    assert list(weights) == list(their_weights)
    assert_same_tensors(weights, their_weights, "weights")
    assert_same_tensors(state["state"], their_state["state"], "optimizer")
    assert state["param_groups"] == their_state["param_groups"]
    # torch's full optimizer state on four CPU ranks is not what its sharded one adds up to (2.13.0), so that one is gathered.
    gathered = {
        name: {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in entry.items()}
        for name, entry in their_state["state"].items()
    }
    assert_same_tensors(FSDP.full_optim_state_dict(ours, opt_ours, rank0_only=False)["state"], gathered, "full")
    if writer == "torch":
        again = FSDP(seeded(seed=1), auto_wrap_policy=POLICIES["module"], device_mesh=mesh)
        reads(str(tmp_path), theirs, opt_theirs, again)
    else:
        reads(str(tmp_path), ours, opt_ours, torchs(mesh, POLICIES["module"]))


@on_world(2)
def test_policies_wrap_what_torchs_do(mesh: DeviceMesh) -> None:
    mixed = MixedPrecision(param_dtype=BF16)
    for name, policy in POLICIES.items():
        assert repr(FSDP(seeded(), auto_wrap_policy=policy, device_mesh=mesh)) == repr(torchs(mesh, policy)), name
    policy = wrapping.ModuleWrapPolicy({nn.Linear})
    theirs = torchs(mesh, policy, make=WithNorm, mixed_precision=mixed)
    assert repr(FSDP(seeded(WithNorm), auto_wrap_policy=policy, device_mesh=mesh, mixed_precision=mixed)) == repr(
        theirs
    )


@on_world(2)
def test_mixed_precision_beside_torch(mesh: DeviceMesh) -> None:
    mixed = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32, buffer_dtype=BF16)
    rank = dist.get_rank()
    theirs = torchs(mesh, POLICIES["module"], mixed_precision=mixed)
    ours = FSDP(seeded(), auto_wrap_policy=POLICIES["module"], device_mesh=mesh, mixed_precision=mixed)
    assert train(ours, rank) == train(theirs, rank)
    assert ours(batch(0, rank)).dtype is BF16
    assert ours.seen.dtype is BF16
    assert ours.state_dict()["seen"].dtype is torch.float32
    assert all(p.dtype is torch.float32 and p.grad.dtype is torch.float32 for p in ours.parameters())
