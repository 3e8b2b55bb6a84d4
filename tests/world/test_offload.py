"""Offload changes where states rest and no bit of what is trained: under every strategy, for every kind of model and use."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import accordion as acc
from accordion.config import STRATEGIES
from accordion.memory import states
from accordion.memory.disk import SwapFile, aligned_buffer
from tests.world import models, reference
from tests.world.checks import assert_at_rest, assert_equal, logged, mesh_of, one_loss, units_of
from tests.world.reference import Recipe, Trace, grads_of, local_of, params_of
from tests.world.test_optimizers import OPTIMIZERS

HOST = acc.Offload(params="host", optimizer="host")
OPTIMIZER = acc.Offload(optimizer="host")
MIXED = acc.Offload(params="host", optimizer="host", overrides={models.Block: OPTIMIZER, "blocks.1": acc.Offload()})


def disk(path: Path, **options: Any) -> acc.Offload:
    return acc.Offload(params="host", optimizer=f"disk:{path}", checksums=True, **options)


BF16, FP16 = {"compute": torch.bfloat16}, {"compute": torch.float16, "scale": 1024.0}
RECIPES = [
    Recipe(build="wide", micros=2, **BF16),
    Recipe(build="tied", micros=3, no_sync=True),
    Recipe(build="frozen", **BF16),
    Recipe(build="uneven", skip_last=(1,), micros=2, **FP16),
    Recipe(build="spare", sometimes=True),
    Recipe(build="experts", **BF16),
]


def trained(mesh, recipe: Recipe, strategy: acc.Strategy, **options: Any) -> Trace:
    precision = acc.Precision(params=recipe.compute)
    model = acc.shard(recipe.model(), mesh=mesh, strategy=strategy, precision=precision, **options)
    return reference.sharded(
        model,
        recipe,
        dist.get_rank(),
        no_sync=acc.no_sync,
        wrap=acc.wrap_optimizer,
        after_step=after_last(recipe.steps, model),
    )


def after_last(num_steps: int, model: nn.Module) -> Callable[[], None]:
    """Waits after the last of so many steps, whose parameters are read directly; the others go on behind the next forward."""
    left = list(range(num_steps))

    def after_step() -> None:
        left.pop()
        if not left:
            acc.synchronize(model)

    return after_step


def same_as_without(mesh, strategy: acc.Strategy, recipes: list[Recipe], offloads: list[acc.Offload]) -> None:
    for i, recipe in enumerate(recipes):
        recipe = dataclasses.replace(recipe, steps=3)
        wanted = trained(mesh, recipe, strategy)
        debug = ("streams",) if i % 2 else ()
        for offload in offloads:
            found = trained(mesh, recipe, strategy, offload=offload, debug=debug)
            assert found.losses == wanted.losses, (recipe.build, offload)
            assert found.grads.keys() == wanted.grads.keys()
            for name, grad in wanted.grads.items():
                assert grad is found.grads[name] is None or torch.equal(found.grads[name], grad), (recipe.build, name)
            assert_equal(found.params, wanted.params)


SAMPLE = ("full_shard", "no_shard", "hybrid_shard_optim")


@pytest.mark.parametrize(
    "strategy", [s if s in SAMPLE else pytest.param(s, marks=pytest.mark.slow) for s in STRATEGIES]
)
def test_no_bit_differs(world, strategy, tmp_path):
    policy = STRATEGIES[strategy]
    which = list(STRATEGIES).index(strategy)
    chosen = [RECIPES[which % len(RECIPES)], RECIPES[(which + 3) % len(RECIPES)]]
    world.run_mesh(*mesh_of(policy), same_as_without, policy, chosen, [HOST, disk(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_bit_differs_for_any_model(world, strategy, num_ranks, tmp_path):
    policy = STRATEGIES[strategy]
    world.run_mesh(
        *mesh_of(policy, num_ranks),
        same_as_without,
        policy,
        RECIPES,
        [HOST, OPTIMIZER, MIXED, disk(tmp_path)],
        timeout_s=300,
    )


# -- where things are


def places(mesh) -> None:
    """Shards and gradients lie in the arena, one piece of memory; the unit with an override of its own has them outside."""
    with logged() as messages:
        model = acc.shard(models.wide(), mesh=mesh, precision=acc.Precision(params=torch.bfloat16), offload=MIXED)
    arena = units_of(model)[0].engine.wiring.home.arena
    assert any(f"offload: {arena.num_bytes} bytes of ordinary host memory for 2 of 3 units, the" in m for m in messages)
    low, high = arena._memory.data_ptr(), arena._memory.data_ptr() + arena.num_bytes
    one_loss(model).backward()
    first = {name: local_of(p.grad).data_ptr() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for address in (local_of(p).data_ptr(), local_of(p.grad).data_ptr()):
            assert (low <= address < high) != name.startswith("blocks.1"), name
    kept = model.head.weight.grad
    value = local_of(kept).clone()
    model.zero_grad()
    one_loss(model, 1).backward()
    assert torch.equal(local_of(kept), value), "a gradient that the caller holds is the caller's"
    assert not torch.equal(local_of(model.head.weight.grad), value)
    again = {name: local_of(p.grad).data_ptr() for name, p in model.named_parameters()}
    assert again["head.weight"] != first["head.weight"]
    assert again["norm.weight"] == first["norm.weight"]


def budgets(mesh, path: Path) -> None:
    """From the first unit on: on the device, then with states on the host, then on disk; and no bit differs."""
    found = []
    for offload in (None, disk(path, device_bytes=50_000, host_bytes=140_000)):
        model = acc.shard(models.plain(), mesh=mesh, offload=offload)
        optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        for step in range(2):
            one_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(acc.full_state_dict(model, rank0_only=False))
    assert_equal(found[0], found[1])
    tiers = units_of(model)[0].engine.wiring.home
    places = [(o.offloads, o.folder is not None) for o in tiers._offloads]
    assert places == [(False, False), (True, False), (True, False), (True, True)], places
    assert tiers.arena.num_bytes < 140_000
    for options, message in (
        ({"host_bytes": 1000}, "host_bytes=1000 is less than the"),
        ({"device_bytes": 5, "overrides": {"blocks.0": acc.Offload()}}, "device_bytes=5 is less than the"),
    ):
        with pytest.raises(acc.UsageError, match=message):
            acc.shard(models.plain(), mesh=mesh, offload=disk(path, **options))


def test_budgets_are_kept(world, tmp_path):
    world.run(2, budgets, tmp_path)


# -- what callers do


def uses(mesh) -> None:
    """Hooks, autograd.grad, clipping, writes, state dicts and checkpoints, of tied weights in and across units."""
    found = []
    for options in ({}, {"offload": HOST}):
        with torch.device("meta"):
            model = Blocks()
        model = acc.shard(model, mesh=mesh, precision=acc.Precision(params=torch.bfloat16), **options)
        torch.manual_seed(3)
        acc.initialise(model)
        assert model.last.weight is model.first.weight
        seen: list[Any] = []
        model.first.weight.register_post_accumulate_grad_hook(
            lambda p, seen=seen: seen.append(local_of(p.grad).clone())
        )
        model.blocks[0].weight.register_hook(lambda g, seen=seen: seen.append(local_of(g).clone()))
        x = torch.full((3, 8), 0.5 + dist.get_rank())
        seen += [local_of(g).clone() for g in torch.autograd.grad(model(x).sum(), list(model.parameters()))]
        for _ in range(2):
            model(x).square().mean().backward()
        seen.append(acc.clip_grad_norm_(model, 0.1))
        optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            seen.append(model(x))
        with acc.full_params(model, write=True), torch.no_grad():
            model.blocks[1].weight.mul_(1.5)
        with torch.no_grad():
            seen.append(model(x))
        state = {name: value.clone() for name, value in acc.full_state_dict(model, rank0_only=False).items()}
        model(x).square().mean().backward()
        optimizer.step()
        model.load_state_dict(state)
        with torch.no_grad():
            seen.append(model(x))
        acc.synchronize(model)
        seen += [local_of(v).clone() for v in model.state_dict().values()]
        seen += [local_of(v) for entry in optimizer.state_dict()["state"].values() for v in entry.values()]
        assert_at_rest(model)
        found.append(seen)
    assert len(found[0]) == len(found[1])
    for i, (wanted, value) in enumerate(zip(*found, strict=True)):
        assert torch.equal(wanted, value), i


class Blocks(nn.Module):
    """Its first and last layer are one, and so are those of its two blocks: ties between units and in one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
        self.blocks[2].weight = self.blocks[0].weight
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


def saved(mesh, path: str) -> None:
    """What was trained with offload goes on without, and the other way round, bit for bit."""
    results = []
    swapped = {"offload": disk(Path(path))}
    for first, then in (({}, {}), ({"offload": HOST}, {}), ({}, {"offload": OPTIMIZER}), (swapped, {}), ({}, swapped)):
        model, optimizer = fresh(mesh, **first)
        for step in range(2):
            one_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        folder = f"{path}/{len(results)}"
        acc.save(folder, model, optimizer)
        model, optimizer = fresh(mesh, seed=7, **then)
        acc.load(folder, model, optimizer)
        one_loss(model, 2).backward()
        optimizer.step()
        results.append(acc.full_state_dict(model, rank0_only=False))
    for other in results[1:]:
        assert_equal(other, results[0])


def fresh(mesh, seed: int = 0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = acc.shard(models.seeded(seed, tied=True), mesh=mesh, **options)
    return model, acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


def test_callers_see_the_same_thing(world, tmp_path):
    world.run(2, places)
    world.run(2, uses)
    world.run(2, saved, str(tmp_path))


# -- the step behind the next forward


def deferred(mesh, kind: str, path: Path) -> None:
    """Bit for bit the same kernel stepping before `step` returns: groups, schedulers, hooks, frozen parts, kept gradients."""
    make, options = OPTIMIZERS[kind]
    results = []
    for way in ("plain", "waits", "deferred", "disk", "late", "late disk"):
        debug = ("streams",) if "late" in way else ()
        offload = None if way == "plain" else disk(path, overrides=MIXED.overrides) if "disk" in way else MIXED
        model = acc.shard(models.frozen(), mesh=mesh, offload=offload, debug=debug)
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2]}]
        optimizer = acc.wrap_optimizer(make(groups, **options))
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        losses = []
        for step in range(4):
            loss = one_loss(model, step)
            loss.backward()
            if step == 1:
                acc.clip_grad_norm_(model, 0.1)
            optimizer.step()
            if way == "waits":
                acc.synchronize(model)
            if "late" in way:
                assert local_of(model.head.weight).isnan().all(), "a read that does not wait is not a number"
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            schedule.step()
            losses.append(loss.item())
        assert calls == ["before", "after"] * 4
        state = optimizer.state_dict()["state"]
        results.append((losses, params_of(model), state))
    for losses, params, state in results[1:]:
        assert losses == results[0][0]
        assert_equal(params, results[0][1])
        assert list(state) == list(results[0][2])
        for index, entry in results[0][2].items():
            assert list(state[index]) == list(entry)
            assert all(torch.equal(local_of(state[index][key]), local_of(value)) for key, value in entry.items())


@pytest.mark.parametrize("kind", ["adamw_fused", *(pytest.param(k, marks=pytest.mark.slow) for k in OPTIMIZERS)])
def test_a_step_behind_the_next_forward_changes_no_bit(world, kind, tmp_path):
    world.run(2, deferred, kind, tmp_path)


def scaled(mesh, path: Path) -> None:
    """A fused optimizer is told of the scale and of overflows by attributes that are gone when its units are stepped."""
    results = []
    for offload in (None, HOST, disk(path)):
        model = acc.shard(models.plain(), mesh=mesh, offload=offload, precision=acc.Precision(params=torch.float16))
        optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        losses = []
        for step in range(5):
            loss = one_loss(model, step) * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
        results.append((losses, scaler.get_scale(), acc.full_state_dict(model, rank0_only=False)))
    for losses, scale, params in results[1:]:
        assert (losses, scale) == results[0][:2]
        assert_equal(params, results[0][2])


def test_a_gradient_scaler_is_exact_behind_the_next_forward(world, tmp_path):
    world.run(2, scaled, tmp_path)


@contextmanager
def pieces_of(numel: int) -> Iterator[None]:
    """States go through buffers of so many elements: most tensors are larger."""
    before, states.PIECE_NUMEL = states.PIECE_NUMEL, numel
    try:
        yield
    finally:
        states.PIECE_NUMEL = before


def in_pieces(mesh, path: Path) -> None:
    """States lie in the file, pass through small buffers, are read and written once a step, and are those of no offload."""
    found = []
    for options in ({}, {"offload": disk(path)}):
        with pieces_of(1024):
            model = acc.shard(models.wide(), mesh=mesh, **options)
            optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, amsgrad=True))
            for step in range(3):
                one_loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        state = [local_of(v) for entry in optimizer.state_dict()["state"].values() for v in entry.values()]
        acc.synchronize(model)
        found.append([*state, *params_of(model).values()])
        if options:
            (held,) = units_of(model)[0].engine.wiring.home.states.values()
            (file,) = held.files
            numel = sum(local_of(p).numel() for p in model.parameters())
            floor = 3 * 4 * numel  # three states of four bytes
            assert held.buffer_bytes == 4 * 3 * 4 * 1024
            assert floor <= file.traffic["written"] / 3 <= 1.25 * floor
            assert file.traffic["read"] * 3 == file.traffic["written"] * 2, "there is nothing to read in the first step"
            low = file._bytes.data_ptr()
            shaped = [v for v in state if v.dim()]
            assert all(low <= v.data_ptr() < low + file.num_bytes for v in shaped if v.numel())
            assert os.listdir(path) == []
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def disk_fails(mesh, path: Path) -> None:
    """The disk is full in the third step: the error names it, and the last checkpoint goes on as if nothing had been."""
    wanted = None
    for fails in (False, True):
        model, optimizer = fresh(mesh, offload=disk(path))
        for step in range(4):
            if step == 2:
                acc.save(path / "ckpt", model, optimizer)
            one_loss(model, step).backward()
            with failing_writes(fails and step == 2):
                optimizer.step()
                if fails and step == 2:
                    with pytest.raises(acc.OffloadError, match="could not be written: No space left on device"):
                        acc.synchronize(model)
                    break
            optimizer.zero_grad()
        if fails:
            model, optimizer = fresh(mesh, seed=5, offload=disk(path))
            acc.load(path / "ckpt", model, optimizer)
            for step in (2, 3):
                one_loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_equal(acc.full_state_dict(model, rank0_only=False), wanted)
        wanted = acc.full_state_dict(model, rank0_only=False)


@contextmanager
def failing_writes(fails: bool) -> Iterator[None]:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(os, "pwritev", full if fails else os.pwritev):
        yield


def killed(path: Path) -> None:
    """A job that is killed while states are on their way to the disk."""
    file = SwapFile(path, 1 << 22)
    for _ in range(3):
        threading.Thread(
            target=lambda: [file.write(0, aligned_buffer(1 << 22)) for _ in range(1000)], daemon=True
        ).start()
    while not file.traffic["written"]:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_job_leaves_nothing(world, tmp_path):
    world.run(1, at_rest)  # the pool's server of new processes has torch at hand
    job = mp.get_context("forkserver").Process(target=killed, args=(tmp_path,))
    job.start()
    job.join(60)
    assert job.exitcode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def at_rest(mesh) -> None:
    assert mesh.size() == 1


def test_states_on_disk(world, tmp_path):
    for name, fn in (("pieces", in_pieces), ("fails", disk_fails)):
        (tmp_path / name).mkdir()
        world.run(1 if name == "fails" else 2, fn, tmp_path / name)


def failing(mesh) -> None:
    """What a step raises on its thread is raised by whoever needs it next."""
    model = acc.shard(models.plain(), mesh=mesh, offload=HOST)
    optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    one_loss(model).backward()
    for group in optimizer.param_groups:
        group["lr"] = "fast"
    optimizer.step()
    with pytest.raises(TypeError):
        acc.synchronize(model)


def test_an_error_of_the_step_is_not_lost(world):
    world.run(1, failing)


# -- what is refused


def refused(mesh) -> None:
    with pytest.raises(acc.UsageError, match=r"overrides names blocks.9, which is no unit"):
        acc.shard(models.plain(), mesh=mesh, offload=acc.Offload(overrides={"blocks.9": HOST}))
    with pytest.raises(acc.OffloadError, match="cannot rest in /nowhere"):
        acc.shard(models.plain(), mesh=mesh, offload=acc.Offload(optimizer="disk:/nowhere"))
    if dist.get_rank() == 0:
        with pytest.raises(acc.UsageError, match=r"the machine refuses to pin 4096 bytes of host memory \(denied\)"):
            pin_on(FakeAccelerator(1))
    model = acc.shard(models.plain(), mesh=mesh, offload=HOST)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_equal(params_of(model), dict(models.plain().named_parameters()))
    one_loss(model).backward()
    assert grads_of(model)


def pin_on(module: Any) -> list[str]:
    from accordion.memory import arena

    class Owner:
        pass

    owner, memory = Owner(), torch.empty(4096, dtype=torch.uint8)
    arena.pin(owner, memory, module)
    del owner
    return module.calls


class FakeAccelerator:
    """The part of an accelerator's driver that pins memory. `answer`: 0 where it does."""

    def __init__(self, answer: int) -> None:
        self.answer, self.calls = answer, []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append(f"register {num_bytes}")
        return self.answer

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.calls.append("unregister")

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return "denied"


def test_memory_that_cannot_be_pinned_is_named(world):
    world.run(2, refused)
    assert pin_on(FakeAccelerator(0)) == ["register 4096", "unregister"]


def ranks_differ(mesh) -> None:
    offload = acc.Offload(optimizer="host") if mesh.get_rank() == 0 else None
    with pytest.raises(acc.DivergenceError, match="different models or settings"):
        acc.shard(models.plain(), mesh=mesh, offload=offload)
    tight = acc.Offload(optimizer="host", host_bytes=10 if mesh.get_rank() == 0 else 1 << 30)
    with pytest.raises(acc.UsageError, match=r"host_bytes=10 is less|other ranks"):
        acc.shard(models.plain(), mesh=mesh, offload=tight)


def test_ranks_that_offload_differently_are_an_error_on_all(world):
    world.run(2, ranks_differ)
