"""One model twice, sharded and not, on the same numbers: outputs, gradients, weights and buffers after each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import accordion as acc
from tests.devices import here
from tests.inside import engine_in, units_of
from tests.support.checks import assert_at_rest, grads_of_ranks, step_all
from tests.support.ranked import on_num_ranks
from tests.support.reference import assert_close, grads_of, params_of
from tests.support.sample import sampled

on_ranks = pytest.mark.parametrize("num_ranks", sampled([2, 3, 4], (3).__eq__))
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def on_its_ranks(cases: Mapping[str, Case]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`on_mesh` for each case by name on two, three and four ranks; usually on two if it is exact, and on three if not."""
    rows = [(name, num_ranks) for name in cases for num_ranks in (2, 3, 4)]
    usual = sampled(rows, lambda name, num_ranks: num_ranks == (2 if cases[name].exact else 3))
    return lambda program: pytest.mark.parametrize(("name", "num_ranks"), usual)(on_num_ranks(program))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [p for p in model.parameters() if p.is_floating_point()], lr=1 / 128
    )  # no rounding of what it multiplies


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what a step does with it.

    `run(model, step)`: forward and backward on this rank's numbers, which `torch.manual_seed` makes: it is set before.
    It returns what a caller sees, tensors in containers. `reference`: builds the unsharded model, where it is another.
    `options`: of `shard`. `exact`: on two ranks bit for bit, where each weight gets one gradient a step, so that the order
    of the sums is the same. `tolerance`: of the largest gradient of a rank.
    """

    build: Callable[[], nn.Module]
    run: Callable[[nn.Module, int], Any]
    reference: Callable[[], nn.Module] | None = None
    units: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Optimizer = sgd
    steps: int = 2
    exact: bool = True
    tolerance: float = 1e-6


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return here(build())


def seed_of(step: int) -> int:
    return 1000 * step + dist.get_rank()


def compare(mesh, case: Case) -> nn.Module:
    """Train the model of `case` sharded and not, and find no difference; returns the sharded one."""
    plain = seeded(case.reference or case.build)
    model = acc.shard(seeded(case.build), mesh=mesh, units=case.units, **case.options)
    optimizers = case.optimizer(plain), case.optimizer(model)
    exact = case.exact and mesh.size() <= 2
    for step in range(case.steps):
        seen = []
        for m in (plain, model):
            torch.manual_seed(seed_of(step))
            seen.append(case.run(m, step))
        assert_alike(seen[1], seen[0], exact=exact)
        del seen
        check_grads(mesh, model, plain, exact=exact, tolerance=case.tolerance)
        step_all(optimizers)
        wanted, found = dict(plain.named_parameters()), params_of(model)
        limit = 0.0 if exact else case.tolerance
        assert_close(found, wanted, limit, least=1.0)  # a step may bring a weight close to zero
        with torch.no_grad():  # rounding must not add up
            for name, p in wanted.items():
                p.copy_(found[name])
        assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), limit)
        rest(model)
    return model


def check_grads(mesh, model: nn.Module, plain: nn.Module, *, exact: bool, tolerance: float = 1e-6) -> None:
    """The gradients of the sharded model are the means of the unsharded ones over the ranks, which `plain` is given."""
    used, found = grads_of_ranks(mesh, plain), grads_of(model)
    wanted: dict[str, Tensor | None] = {}
    for name, p in plain.named_parameters():
        mean = sum(g.float() for g in used[name]) / mesh.size() if used[name] else None
        wanted[name] = None if mean is None else mean.to(p.dtype if found[name] is None else found[name].dtype)
        p.grad = None if mean is None else wanted[name].to(p.dtype)
    # What ranks have may cancel, and who sums them in another order is off by a bit of what was summed and not of the sum.
    summed = {
        name: max((g.double().abs().max().item() for g in some if g.numel()), default=0.0)
        for name, some in used.items()
    }
    assert_close(found, wanted, 0.0 if exact else tolerance, summed)


def assert_alike(found: Any, wanted: Any, *, exact: bool) -> None:
    """What two runs return: the same types and tensors, wherever they lie."""
    assert type(found) is type(wanted), (type(found), type(wanted))
    if isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype
        assert found.requires_grad == wanted.requires_grad
        assert_close({"output": found}, {"output": wanted}, 0.0 if exact else 1e-6)
    elif isinstance(wanted, Mapping):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_alike(found[key], value, exact=exact)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_alike(one, other, exact=exact)
    elif hasattr(wanted, "__dict__"):
        assert_alike(vars(found), vars(wanted), exact=exact)
    else:
        assert found == wanted


def rest(model: nn.Module) -> None:
    """No lease, shards in the registry, and no storage of full parameters that is open."""
    assert_at_rest(model)
    opened = open_full_buffers(model)
    assert not opened, f"full parameters stand at rest: {opened}"
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            assert all(
                getattr(module, n) is w for n, w in zip(module._flat_weights_names, module._flat_weights, strict=True)
            )


def open_full_buffers(model: nn.Module) -> list[str]:
    """Units whose full parameters have memory and should not. With debug="streams" it is filled with NaN and stays."""
    if engine_in(model).context.keeps_full:
        return []
    full_buffers = [
        (u, g.full_buffer)
        for u in units_of(model)
        for g in u.groups
        if g.full_buffer is not None and g.full_buffer.num_bytes
    ]
    return [
        unit.name or "(root)"
        for unit, full_buffer in full_buffers
        if full_buffer.flat.untyped_storage().nbytes()
        and not (full_buffer._poison and bool(full_buffer.flat.detach().isnan().all()))
    ]


def run_on_all(world, fn: Callable[..., Any], *args: Any, ranks: Sequence[int]) -> None:
    for num_ranks in ranks:
        world.run(num_ranks, fn, *args)


def compare_poisoned(mesh, case: Case) -> nn.Module:
    """`compare`; on three ranks what is let go is full of NaN instead, and stays, so that a use after free shows."""
    return compare(mesh, replace(case, options={"debug": "streams", **case.options}) if mesh.size() == 3 else case)


class Pair(nn.Module):
    """A unit of two layers."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))
