"""FullyShardedDataParallel of compat.fsdp1 has the losses, states, units and dtypes of torch's own class."""

from __future__ import annotations

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

from accordion.compat.fsdp1 import FullyShardedDataParallel as FSDP  # noqa: N817
from accordion.compat.fsdp1 import (
    MixedPrecision,
    StateDictType,
)
from accordion.compat.fsdp1 import wrap as wrapping
from tests.compat.test_fsdp1 import BF16, POLICIES, Net, WithNorm, batch, seeded, train
from tests.devices import device
from tests.support.checks import assert_close
from tests.support.ranked import on_world


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


def reads(folder: str, model: Any, optimizer: Any, again: Any) -> None:
    """Training resumes from a checkpoint of the other class with equal losses."""
    rank, (cls, its_cls) = dist.get_rank(), (type(model), type(again))
    with warnings.catch_warnings(action="ignore"):
        weights, state = states_of(cls, model, optimizer, "SHARDED_STATE_DICT")
        dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
        its_optimizer = torch.optim.AdamW(again.parameters(), lr=0.05)
        train(again, rank, 1, optimizer=its_optimizer)
        with its_cls.state_dict_type(again, StateDictType.SHARDED_STATE_DICT):
            found = {"model": again.state_dict(), "optim": its_cls.optim_state_dict(again, its_optimizer)}
            dcp.load(found, checkpoint_id=folder)
            again.load_state_dict(found["model"])
            loadable = its_cls.optim_state_dict_to_load(again, its_optimizer, found["optim"])
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
