"""Programs that do unusual things while a step is under way have the same result in every tier as without offload."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import accordion as acc
from tests.devices import device
from tests.support import models
from tests.support.checks import PlantedError, assert_at_rest, go_on, one_loss
from tests.support.offloads import HOST, MIXED, disk, disk_of_all
from tests.support.reference import local_of, params_of

Program = Callable[..., list[Any]]
PROGRAMS: dict[str, tuple[Program, int, tuple[str, ...]]] = {}


def program(*tiers: str, num_ranks: int = 1) -> Callable[[Program], None]:
    """Register a program, and the `tiers` and `num_ranks` with which `make test` runs it."""
    return lambda run: PROGRAMS.update({run.__name__: (run, num_ranks, tiers)})


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2], "lr": 3e-3}]
    return acc.wrap_optimizer(torch.optim.AdamW(groups, lr=1e-2, **options))


def end_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[Tensor]:
    """Return copies of all parameters and states."""
    acc.synchronize(model)
    found = [value.clone() for _, value in sorted(params_of(model).items())]
    for optimizer in optimizers:
        for _, entry in sorted(optimizer.state_dict()["state"].items()):
            found += [local_of(value).clone() for _, value in sorted(entry.items())]
    return found


@program("all on disk")
def unscales_and_clips(mesh, shard: Callable[..., nn.Module], path: Path) -> list[Any]:
    """Use a scaler that writes into the gradients, gradient accumulation, an overflow, and torch's own clipping."""
    model = shard(models.plain())
    optimizer, scaler = adamw(model), torch.amp.GradScaler(device().type, init_scale=2.0**10, growth_interval=2)
    found = []
    for step in range(5):
        for micro in range(2):
            loss = one_loss(model, step + 7 * micro) * (float("inf") if (step, micro) == (2, 1) else 1.0)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if step % 2:
            found.append(acc.clip_grad_norm_(model, 0.1))
        else:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found + end_of(model, optimizer)


def fail(grad: Tensor) -> None:
    raise PlantedError("in the middle of a backward")


@program("mixed", "host", num_ranks=2)
def raises_in_a_backward(mesh, shard: Callable[..., nn.Module], path: Path) -> list[Any]:
    """Raise in the middle of a backward right after a step; then set the gradients it left to zero, or add to them."""
    model = shard(models.plain())
    optimizer = adamw(model)
    for step in range(5):
        one_loss(model, step).backward()
        if step % 2:
            handle = model.blocks[1].register_forward_hook(lambda m, args, out: out.register_hook(fail) and None)
            loss = one_loss(model, step + 9)
            handle.remove()
            with pytest.raises(PlantedError):
                loss.backward()
            del loss
            if step == 1:
                optimizer.zero_grad(set_to_none=False)
                one_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return end_of(model, optimizer)


@program("disk")
def two_optimizers(mesh, shard: Callable[..., nn.Module], path: Path) -> list[Any]:
    """Use two optimizers with some parameters of every unit each, of which one steps every second time."""
    model = shard(models.plain())
    params = list(model.parameters())
    first = acc.wrap_optimizer(torch.optim.AdamW(params[::2], lr=1e-2, fused=True))
    second = acc.wrap_optimizer(torch.optim.SGD(params[1::2], lr=1e-2, momentum=0.9))
    for step in range(5):
        go_on(model, first, [step])
        if step % 2:
            second.step()
            second.zero_grad()
    return end_of(model, first, second)


@program("host")
def freezes_and_thaws(mesh, shard: Callable[..., nn.Module], path: Path) -> list[Any]:
    model = shard(models.plain())
    optimizer = adamw(model)
    for step in range(6):
        model.blocks[1].requires_grad_(step in (0, 1, 4, 5))
        model.embed.requires_grad_(step != 3)
        go_on(model, optimizer, [step])
    return end_of(model, optimizer)


@program("streamed")
def looks_between_steps(mesh, shard: Callable[..., nn.Module], path: Path) -> list[Any]:
    """Change hyperparameters and evaluate right after a step."""
    model = shard(models.plain())
    optimizer = adamw(model)
    found = []
    for step in range(5):
        one_loss(model, step).backward()
        optimizer.step()
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 1e9  # this step has its own already
        if step == 0:
            model.eval()
            with torch.no_grad():
                found.append(one_loss(model, 50))
            model.train()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate / 2
        optimizer.zero_grad()
    return found + end_of(model, optimizer)


@program("budgets", num_ranks=2)
def saves_behind(mesh, shard: Callable[..., nn.Module], path: Path) -> list[Any]:
    """Save in the background right after a step and before others: the checkpoint has the result of that step."""
    model = shard(models.plain())
    optimizer = adamw(model)
    go_on(model, optimizer, range(2))
    saving = acc.save(path / "ckpt", model, optimizer, background=True)
    go_on(model, optimizer, range(2, 5))
    saving.wait()
    found = end_of(model, optimizer)
    model = shard(models.seeded(7))
    optimizer = adamw(model)
    go_on(model, optimizer, [3])
    acc.load(path / "ckpt", model, optimizer)
    found += end_of(model, optimizer)
    go_on(model, optimizer, [2])
    return found + end_of(model, optimizer)


@program("all on disk")
def two_models(mesh, shard: Callable[..., nn.Module], path: Path) -> list[Any]:
    """Train two models in turn, and with one optimizer for both; then delete one while its step is under way."""
    a, b = shard(models.plain()), shard(models.seeded(3, tied=True))
    first, second = adamw(a), adamw(b)
    both = acc.wrap_optimizer(torch.optim.SGD([*a.parameters(), *b.parameters()], lr=1e-2, momentum=0.9))
    for step in range(3):
        (one_loss(a, step) + one_loss(b, step)).backward()
        first.step()
        second.step()
        both.step()
        both.zero_grad()
    found = end_of(a, first) + end_of(b, second, both)
    one_loss(a, 4).backward()
    first.step()
    del a, first, both
    gc.collect()
    b.zero_grad()
    go_on(b, second, [5])
    return found + end_of(b, second)


@program("mixed")
def adds_a_group(mesh, shard: Callable[..., nn.Module], path: Path) -> list[Any]:
    """Add parameters after a step; step without any gradient; step with a closure."""
    model = shard(models.plain())
    params = list(model.parameters())
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(params[:5], lr=1e-2, amsgrad=True))
    optimizer.step()
    found = []
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = one_loss(model, step)
            loss.backward()
            return loss.detach()

        found.append(optimizer.step(closure))
        if step == 1:
            optimizer.add_param_group({"params": params[5:], "lr": 1e-3})
    return found + end_of(model, optimizer)


@program("disk")
def goes_on_from_a_state_dict(mesh, shard: Callable[..., nn.Module], path: Path) -> list[Any]:
    """Take a state dict right after a step, step twice more, and load it into the same and a new optimizer."""
    model = shard(models.tied())
    optimizer = adamw(model)
    one_loss(model).backward()
    optimizer.step()
    kept = torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, optimizer.state_dict())
    for step in (1, 2):
        one_loss(model, step).backward()
        optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(kept))  # torch steps what it was given in place
    one_loss(model, 3).backward()
    optimizer.step()
    found = end_of(model, optimizer)
    other = adamw(model)
    other.load_state_dict(kept)
    one_loss(model, 4).backward()
    other.step()
    return found + end_of(model, other)


@program("host", "disk", "streamed", num_ranks=2)
def scales_a_fused_step(mesh, shard: Callable[..., nn.Module], path: Path) -> list[Any]:
    """A scaler sets the scale and overflow as attributes of a fused optimizer, and removes them before units are stepped."""
    model = shard(models.plain(), precision=acc.Precision(params=torch.float16))
    lr = torch.tensor(1e-2, device=device())
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=lr, fused=True))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    scaler = torch.amp.GradScaler(device().type, init_scale=2.0**10, growth_interval=2)
    found: list[Any] = []
    for step in range(5):
        loss = one_loss(model, step) * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        found.append(loss.item())
    return [*found, scaler.get_scale(), *acc.full_state_dict(model, rank0_only=False).values()]


@program("disk", num_ranks=2)
def steps_without_states(mesh, shard: Callable[..., nn.Module], path: Path) -> list[Any]:
    model = shard(models.plain())
    optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    go_on(model, optimizer, range(2))
    return end_of(model, optimizer)


@program("all on disk", num_ranks=2)
def writes_between_steps(mesh, shard: Callable[..., nn.Module], path: Path) -> list[Any]:
    """Write into a parameter, a gradient and a state, which counts; a gradient that is kept does not change."""
    model = shard(models.plain())
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    kept = []
    for step in range(3):
        one_loss(model, step).backward()
        one_loss(model, step + 5).backward()
        acc.clip_grad_norm_(model, 0.05)
        local_of(model.head.weight.grad).mul_(2)
        kept.append(model.norm.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        acc.synchronize(model)
        with torch.no_grad():
            local_of(model.norm.weight).mul_(1.25)
        optimizer.state_dict()["state"][0]["exp_avg"].mul_(0.5)
    return [*end_of(model), *(local_of(grad).clone() for grad in kept)]


@program("all on disk")
def writes_without_a_version(mesh, shard: Callable[..., nn.Module], path: Path) -> list[Any]:
    """Clip by foreach operators on DTensors, which increment no tensor version: the step reads the new values."""
    model = shard(models.plain())
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(2):
        one_loss(model, step).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        acc.synchronize(model)
        optimizer.zero_grad()
    return end_of(model)


class Blocks(nn.Module):
    """A model with weights tied between units and inside one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
        self.blocks[2].weight = self.blocks[0].weight
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


@program("host", "all on disk", "streamed", num_ranks=2)
def looks_at_everything(mesh, shard: Callable[..., nn.Module], path: Path) -> list[Any]:
    """Use hooks, autograd.grad, clipping, writes, state dicts and a load, with weights tied in and across units."""
    with torch.device("meta"):
        model = Blocks()
    model = shard(model, precision=acc.Precision(params=torch.bfloat16))
    torch.manual_seed(3)
    acc.initialise(model)
    assert model.last.weight is model.first.weight
    seen: list[Any] = []
    model.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(local_of(p.grad).clone()))
    model.blocks[0].weight.register_hook(lambda g: seen.append(local_of(g).clone()))
    x = torch.full((3, 8), 0.5 + dist.get_rank(), device=device())
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
    seen += end_of(model, optimizer)
    assert_at_rest(model)
    return seen


TIERS = ("all on disk", "mixed", "disk", "host", "streamed", "budgets")


def in_tiers(mesh, path: Path, programs: dict[str, Iterable[str]]) -> None:
    """Run each program in its tiers; the budgets of ranks differ."""
    rank = dist.get_rank()
    offloads = {
        "host": HOST,
        "mixed": MIXED,
        "disk": disk(path),
        "all on disk": disk_of_all(path),
        "streamed": disk_of_all(path, step="device"),
        "budgets": disk_of_all(path, host_bytes=150_000 + 20_000 * rank, device_bytes=30_000 * rank + 3),
    }
    for name, tiers in programs.items():
        run, *_ = PROGRAMS[name]
        wanted = run(mesh, partial(acc.shard, mesh=mesh), path / name)
        for tier in tiers:
            shard = partial(acc.shard, mesh=mesh, offload=offloads[tier])
            found = run(mesh, shard, path / f"{name} {tier}")
            pairs = enumerate(zip(found, wanted, strict=True))
            wrong = [
                i for i, (a, b) in pairs if not (torch.equal(a.cpu(), b.cpu()) if isinstance(a, Tensor) else a == b)
            ]
            assert not wrong, (name, tier, wrong)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_programs_in_some_tiers(world, num_ranks, tmp_path):
    usual = {name: tiers for name, (_, ranks, tiers) in PROGRAMS.items() if ranks == num_ranks}
    world.run(num_ranks, in_tiers, tmp_path, usual)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_in_every_tier(world, name, tmp_path):
    # "mixed" names units of a model that this program does not have.
    tiers = [tier for tier in TIERS if (name, tier) != ("looks_at_everything", "mixed")]
    world.run(2, in_tiers, tmp_path, {name: tiers}, timeout_s=600)
