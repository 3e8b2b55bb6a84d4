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
from torch.func import functional_call

from tests.devices import device
from tests.support import models
from tests.support.gathered import gathered

LR = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
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

    def model(self) -> models.Tiny:
        return getattr(models, self.build)()

    def call(self, step: int, micro: int, rank: int, vocab: int) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        """Tokens, targets and keyword arguments of one forward."""
        options: dict[str, Any] = {}
        if self.skip_last and micro == self.micros - 1:
            options["skip"] = self.skip_last
        if self.sometimes:
            options["use_sometimes"] = rank == 0
        tokens, targets = models.batch(step, micro, rank, vocab=vocab)
        return tokens, targets, options


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a run left. `losses`: [step][micro] of one rank; `grads`: of step 1, unscaled, None where unused."""

    losses: list[list[float]]
    grads: dict[str, Tensor | None]
    params: dict[str, Tensor]


@functools.cache
def unsharded(scenario: Scenario, num_ranks: int) -> list[Trace]:
    """Train one model on the batches of all ranks, gradients summed in float32 in rank order; a trace for each rank."""
    model = scenario.model()
    vocab = model.embed.num_embeddings
    params = dict(model.named_parameters())  # a tied parameter once
    optimizer = adamw(params.values())
    losses: list[list[list[float]]] = [[] for _ in range(num_ranks)]
    first: dict[str, Tensor | None] = {}
    for step in range(scenario.steps):
        total: dict[str, Tensor] = {}
        for rank in range(num_ranks):
            losses[rank].append([])
            for micro in range(scenario.micros):
                tokens, targets, options = scenario.call(step, micro, rank, vocab)
                weights = {n: p.detach().to(scenario.compute or p.dtype, copy=True) for n, p in params.items()}
                for name, p in params.items():
                    weights[name].requires_grad_(p.requires_grad)
                loss = models.loss_of(functional_call(model, weights, (tokens,), dict(options)), targets)
                (loss / scenario.micros * (scenario.scale or 1.0)).backward()
                losses[rank][-1].append(loss.item())
                for name, weight in weights.items():
                    if weight.grad is not None:
                        total[name] = total.get(name, 0.0) + weight.grad.float()
        for name, p in params.items():
            p.grad = (
                None if name not in total else total[name] * (1 / num_ranks if scenario.reduce_op == "mean" else 1.0)
            )
            if p.grad is not None and scenario.scale:
                p.grad /= scenario.scale
        if step == 0:
            first = {name: None if p.grad is None else p.grad.clone() for name, p in params.items()}
        optimizer.step()
    final = {name: p.detach().clone() for name, p in params.items()}
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
    vocab = scenario.model().embed.num_embeddings
    optimizer = wrap(adamw(model.parameters()))
    scaler = torch.amp.GradScaler(device().type, init_scale=scenario.scale or 1.0, enabled=scenario.scale is not None)
    losses: list[list[float]] = []
    first: dict[str, Tensor | None] = {}
    for step in range(scenario.steps):
        losses.append([])
        for micro in range(scenario.micros):
            tokens, targets, options = scenario.call(step, micro, rank, vocab)
            with no_sync(model) if scenario.no_sync and micro < scenario.micros - 1 else nullcontext():
                loss = models.loss_of(model(tokens, **options), targets)
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


def assert_same(found: Trace, wanted: Trace, *, grads: float = 1e-6, losses: float = 1e-6) -> None:
    """Per tensor, gradients differ by at most `grads` of their largest absolute value, losses by `losses` of theirs."""
    assert found.grads.keys() == wanted.grads.keys()
    problems = []
    for name, expected in wanted.grads.items():
        grad = found.grads[name]
        if expected is None or grad is None:
            if grad is not expected:
                problems.append(f"{name}: gradient is {grad}, should be {expected}")
            continue
        if grad.shape != expected.shape or grad.dtype != expected.dtype:
            problems.append(
                f"{name}: gradient is {grad.shape} {grad.dtype}, should be {expected.shape} {expected.dtype}"
            )
            continue
        error, largest = (grad - expected).abs().max().item(), expected.abs().max().item()
        if not error <= grads * largest:
            problems.append(f"{name}: gradient differs by {error:.3g}, the largest is {largest:.3g}")
    assert not problems, "\n".join(problems)
    for step, (some, others) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        for micro, (loss, expected_loss) in enumerate(zip(some, others, strict=True)):
            assert abs(loss - expected_loss) <= losses * max(1.0, abs(expected_loss)), (
                f"loss of step {step}, micro-batch {micro} is {loss!r}, should be {expected_loss!r}"
            )
