"""A parked model has no memory on its device, trains on bit for bit, and is saved and streamed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import accordion as acc
from tests.devices import device
from tests.optim import test_low_bit as low_bit
from tests.support import models
from tests.support.checks import one_loss
from tests.support.ranked import on_mesh, on_world, under_strategies

SMALL_BYTES = 2**15  # tags, expected sums and the like


def used_bytes() -> int:
    """Return the bytes that are allocated on this rank's device; 0 on the CPU."""
    if device().type == "cpu":
        return 0
    torch.get_device_module(device()).synchronize()
    return int(torch.get_device_module(device()).memory_allocated())


def made(mesh: Any, strategy: acc.Strategy, build: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, Any]:
    model = build()
    model.register_buffer("seen", torch.arange(3.0, device=device()))
    model = acc.shard(model, mesh=mesh, strategy=strategy, units={models.Block}, **options)
    return model, acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(model: nn.Module, optimizer: Any, to: str | None, path: Path) -> dict[str, torch.Tensor]:
    """Return the weights after four steps; `to`: park before each step and between backward and step."""
    for step in range(4):
        if to is not None:
            parked(model, optimizer, to, path / f"{to[:4]}{step}")
        model.seen.add_(1.5)
        one_loss(model, step).backward()
        if to is not None and step:
            acc.park(model, optimizer, to)
            assert all(param.grad is None for param in model.parameters())
            acc.unpark(model, optimizer)
        acc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return acc.full_state_dict(model, rank0_only=False)


def parked(model: nn.Module, optimizer: Any, to: str, path: Path) -> None:
    """Park the model, use it in the allowed ways and in those that are refused, and unpark it."""
    weights = acc.full_state_dict(model, rank0_only=False)
    moved = acc.park(model, optimizer, to)
    local_bytes = sum(p.to_local().nbytes for p in model.parameters())
    states = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    assert moved.num_bytes >= local_bytes + sum(v.to_local().nbytes for v in states) + model.seen.nbytes
    assert moved.seconds > 0
    assert all(p.to_local().device.type == "cpu" for p in model.parameters())
    for act in (
        lambda: one_loss(model),
        lambda: acc.clip_grad_norm_(model, 1.0),
        lambda: acc.park(model, optimizer),
        optimizer.step,
    ):
        with pytest.raises(acc.UsageError, match=r"is parked off the device; call accordion\.unpark"):
            act()
    with pytest.raises(acc.UsageError, match="the optimizer that was parked"):
        acc.unpark(model)
    if path.name[-1] == "2":
        acc.save(path, model, optimizer)
        with pytest.raises(acc.UsageError, match="is parked off the device"):
            acc.load(path, model, optimizer)
    assert all(torch.equal(tensor.cpu(), weights[name]) for name, tensor in acc.stream_weights(model))
    assert acc.unpark(model, optimizer).num_bytes >= local_bytes
    assert all(p.to_local().device.type == device().type for p in model.parameters())
    if path.name[-1] == "2":
        acc.load(path, model, optimizer)
    assert model.seen.device.type == device().type


@under_strategies("full_shard", "hybrid_shard_optim", "no_shard", num_ranks=3)
def test_training_goes_on_bit_for_bit(mesh: Any, strategy: acc.Strategy, tmp_path: Path) -> None:
    expected = train(*made(mesh, strategy, models.uneven), None, tmp_path)
    for to in ("host", f"disk:{tmp_path}"):
        weights = train(*made(mesh, strategy, models.uneven), to, tmp_path)
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("case", ["one rank", "mixed", "offloaded", "masters"])
@on_mesh(lambda given: ((1 if given["case"] == "one rank" else 2,), ("shard",)))
def test_other_memory_is_parked_too(mesh: Any, case: str, tmp_path: Path) -> None:
    """One rank computes with its shards themselves; offloaded shards stay where they are, and their copies are freed."""
    options: dict[str, dict[str, Any]] = {
        "offloaded": {"offload": acc.Offload(optimizer="host")},
        "masters": {"precision": acc.Precision(params=torch.bfloat16)},
    }
    weights = []
    for parks in (True, False):
        floor, build = used_bytes(), mixed if case == "mixed" else models.wide
        model, optimizer = made(mesh, acc.FULL_SHARD, build, **options.get(case, {}))
        for step in range(3):
            if parks:
                acc.park(model, optimizer)
                assert used_bytes() - floor <= SMALL_BYTES
                acc.unpark(model, optimizer)
            one_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(acc.full_state_dict(model, rank0_only=False))
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.parametrize(
    "kind",
    [
        *(
            pytest.param(
                kind, marks=pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")
            )
            for kind, library in (("8bit", "torchao"), ("bitsandbytes", "bitsandbytes"))
        ),
        "Muon",
    ],
)
@on_world(2)
def test_states_of_other_optimizers_come_back_and_are_saved_meanwhile(mesh: Any, kind: str, tmp_path: Path) -> None:
    results = []
    for case in ("parked", "as ever", "loaded from the save while parked"):
        model, optimizer = low_bit.sharded(mesh, kind) if kind != "Muon" else made_muon(mesh)
        if case == "loaded from the save while parked":
            acc.load(tmp_path / "parked", model, optimizer)
        else:
            low_bit.go_on(model, optimizer, [0, 1])
        if case == "parked":
            acc.park(model, optimizer)
            tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
            assert all(getattr(v, "_local_tensor", v).device.type == "cpu" for v in tensors)
            acc.save(tmp_path / "parked", model, optimizer)
            acc.unpark(model, optimizer)
        low_bit.go_on(model, optimizer, [2])
        results.append(acc.full_state_dict(model, rank0_only=False))
    assert all(torch.equal(tensor, other[name]) for other in results[1:] for name, tensor in results[0].items())


def made_muon(mesh: Any) -> tuple[nn.Module, Any]:
    model = acc.shard(low_bit.Net(), mesh=mesh, reduce_op="sum")
    return model, acc.wrap_optimizer(torch.optim.Muon([param for param in model.parameters() if param.dim() == 2]))


def mixed() -> nn.Module:
    """Parameters of two dtypes in one unit."""
    model = models.plain()
    model.blocks[1].up.to(torch.float64)
    model.blocks[1].up.forward = lambda x: nn.functional.linear(x, model.blocks[1].up.weight.float())
    return model


@on_world(2)
def test_wrong_uses_are_refused_in_a_sentence(mesh: Any, tmp_path: Path) -> None:
    model, optimizer = made(mesh, acc.FULL_SHARD, models.plain)
    for place in ("card", "disk:"):
        with pytest.raises(acc.UsageError, match=f"not '{place}'"):
            acc.park(model, optimizer, place)
    with pytest.raises(acc.UsageError, match="in /no/such/folder"):
        acc.park(model, optimizer, f"disk:{tmp_path}" if dist.get_rank() else "disk:/no/such/folder")
    with acc.no_sync(model):
        one_loss(model).backward()
    with pytest.raises(acc.UsageError, match="gradients of no_sync"):
        acc.park(model, optimizer)
    with pytest.raises(acc.UsageError, match="takes a model that is parked"):
        acc.unpark(model, optimizer)
    one_loss(model).backward()
    loss = one_loss(model)
    acc.park(model, optimizer)
    with pytest.raises(acc.UsageError, match="is parked"):
        loss.backward()
    acc.unpark(model, optimizer)
    one_loss(model).backward()
