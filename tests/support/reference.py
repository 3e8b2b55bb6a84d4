"""The two runs that the contract compares: one model without any sharding, and the sharded one on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from tests.devices import device
from tests.support import models
from tests.support.gathered import gathered

LR = 1e-2


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What both runs do.

    `build`: name of a function of `models`. `micros`: micro-batches of a step. `skip_last`: blocks that the last one
    leaves out. `no_sync`: the sharded run communicates in the last one only. `compute`: dtype of the weights in forward
    and backward, over float32 masters. `scale`: of the loss, as a gradient scaler does. `sometimes`: rank 0 alone uses
    `Block.sometimes`.
    """

    build: str = "plain"
    steps: int = 3  # the first learns in which order units run, the second uses it, and the third finds it as it was
    micros: int = 1
    skip_last: tuple[int, ...] = ()
    no_sync: bool = False
    compute: torch.dtype | None = None
    scale: float | None = None
    sometimes: bool = False
    reduce_op: str = "mean"

    def model(self) -> nn.Module:
        return getattr(models, self.build)()

    def unsharded_model(self) -> nn.Module:
        """The model of the unsharded run."""
        return self.model()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return adamw(params)

    def loss(self, model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
        """One forward."""
        options: dict[str, Any] = {}
        if self.skip_last and micro == self.micros - 1:
            options["skip"] = self.skip_last
        if self.sometimes:
            options["use_sometimes"] = rank == 0
        tokens, targets = models.batch(step, micro, rank, vocab=model.embed.num_embeddings)
        return models.loss_of(model(tokens, **options), targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a run left. `losses`: [step][micro] of one rank; `grads`: of step 1, unscaled, None where unused."""

    losses: list[list[float]]
    grads: dict[str, Tensor | None]
    params: dict[str, Tensor]


@functools.cache
def unsharded(scenario: Scenario, num_ranks: int) -> list[Trace]:
    """Train one model on the batches of all ranks, gradients summed in float32 in rank order; a trace for each rank."""
    model = scenario.unsharded_model()
    params = dict(model.named_parameters())  # a tied parameter once
    masters = {n: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for n, p in params.items()}
    optimizer = scenario.optimizer(masters.values())
    losses: list[list[list[float]]] = [[] for _ in range(num_ranks)]
    first: dict[str, Tensor | None] = {}
    for step in range(scenario.steps):
        total: dict[str, Tensor] = {}
        for rank in range(num_ranks):
            losses[rank].append([])
            for micro in range(scenario.micros):
                for name, p in params.items():  # anew for each call: a router may cast its own weight in its forward
                    p.grad, p.data = None, masters[name].detach().to(scenario.compute or p.dtype, copy=True)
                loss = scenario.loss(model, step, micro, rank)
                (loss / scenario.micros * (scenario.scale or 1.0)).backward()
                losses[rank][-1].append(loss.item())
                for name, p in params.items():
                    if p.grad is not None:
                        total[name] = total.get(name, 0.0) + p.grad.float()
        for name, master in masters.items():
            share = 1 / num_ranks if scenario.reduce_op == "mean" else 1.0
            master.grad = total[name] * share if name in total else None
            if master.grad is not None and scenario.scale:
                master.grad /= scenario.scale
        if step == 0:
            first = {name: None if m.grad is None else m.grad.clone() for name, m in masters.items()}
        optimizer.step()
    final = {name: master.detach().clone() for name, master in masters.items()}
    return [Trace(losses=losses[rank], grads=first, params=final) for rank in range(num_ranks)]


def sharded(
    model: nn.Module,
    scenario: Scenario,
    rank: int,
    *,
    no_sync: Callable[[nn.Module], AbstractContextManager[Any]] = lambda model: nullcontext(),
    wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda optimizer: optimizer,
    after_step: Callable[[], None] = lambda: None,
) -> Trace:
    """Train an already sharded model on the batches of `rank`; gradients and parameters come back in full."""
    optimizer = wrap(scenario.optimizer(model.parameters()))
    scaler = torch.amp.GradScaler(device().type, init_scale=scenario.scale or 1.0, enabled=scenario.scale is not None)
    losses: list[list[float]] = []
    first: dict[str, Tensor | None] = {}
    for step in range(scenario.steps):
        losses.append([])
        for micro in range(scenario.micros):
            with no_sync(model) if scenario.no_sync and micro < scenario.micros - 1 else nullcontext():
                loss = scenario.loss(model, step, micro, rank)
                scaler.scale(loss / scenario.micros).backward()
            losses[-1].append(loss.item())
        scaler.unscale_(optimizer)
        if step == 0:
            first = grads_of(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after_step()
    return Trace(losses=losses, grads=first, params=params_of(model))


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.1)


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies with all rows, joined here because `full_tensor` knows no uneven strided shards; a collective.

    Replicated values must be equal on all ranks. The last mesh axis cuts first, so the first one is joined first.
    """
    parts = {name: local_of(t).detach().clone() for name, t in tensors.items()}
    cut = {name: t for name, t in tensors.items() if isinstance(t, DTensor)}
    if not cut:
        return parts
    mesh = next(iter(cut.values())).device_mesh
    for axis in range(mesh.ndim):
        all_sent = gathered({name: parts[name] for name in cut}, mesh.get_group(axis))
        for name, t in cut.items():
            pieces, placement = [part[name] for part in all_sent], t.placements[axis]
            if isinstance(placement, Replicate):
                assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"{name} differs over {placement}"
            else:
                parts[name] = torch.cat(pieces, dim=placement.dim)
    for name, t in cut.items():
        assert parts[name].shape == t.shape, f"{name}: the shards join to {parts[name].shape}, it should be {t.shape}"
    return parts


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradient of every parameter with all its rows; a collective."""
    found = {name: p.grad for name, p in model.named_parameters()}
    full = whole({name: grad for name, grad in found.items() if grad is not None})
    return {name: full.get(name) for name in found}


def params_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter with all its rows; a collective."""
    return whole(dict(model.named_parameters()))


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_close(
    found: Mapping[str, Tensor | None],
    wanted: Mapping[str, Tensor | None],
    tolerance: float = 1e-6,
    least: Mapping[str, float] | float = 0.0,
) -> None:
    """Each tensor's largest error is at most `tolerance` of the largest value wanted, or of `least` if that is more."""
    assert found.keys() == wanted.keys()
    problems = []
    for name, expected in wanted.items():
        value = found[name]
        if expected is None or value is None:
            problems += [] if value is expected else [f"{name} is {value}, should be {expected}"]
            continue
        assert value.shape == expected.shape, (name, value.shape, expected.shape)
        value, expected = value.detach().cpu(), expected.detach().cpu()
        if torch.equal(value, expected):
            continue
        error, largest = (value.double() - expected.double()).abs().max().item(), expected.double().abs().max().item()
        largest = max(largest, least.get(name, 0.0) if isinstance(least, Mapping) else least)
        if not error <= tolerance * largest:  # a NaN is no match
            problems.append(f"{name} differs by {error:.3g}, the largest is {largest:.3g}")
    assert not problems, "\n".join(problems)


def assert_same(found: Trace, wanted: Trace, tolerance: float = 1e-6) -> None:
    dtypes = [{name: g.dtype for name, g in trace.grads.items() if g is not None} for trace in (found, wanted)]
    assert dtypes[0] == dtypes[1]
    assert_close(found.grads, wanted.grads, tolerance)
    assert_close(losses_of(found), losses_of(wanted), tolerance, least=1.0)


def losses_of(trace: Trace) -> dict[str, Tensor]:
    """The losses of a run by step, in float64."""
    return {f"loss of step {step}": torch.tensor(some, dtype=torch.float64) for step, some in enumerate(trace.losses)}
