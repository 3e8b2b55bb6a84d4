"""Train one model sharded and unsharded on the same batches, and compare outputs, gradients, parameters and buffers of each step.

A `Case` describes such a training. `Scenario` and `programs.Program` are plain data from which a `Case` is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import accordion as acc
from tests.devices import device, here
from tests.inside import engine_in, units_of
from tests.support import models
from tests.support.checks import assert_at_rest, sums_over_ranks
from tests.support.ranked import on_num_ranks
from tests.support.reference import adamw, assert_close, grads_of, params_of
from tests.support.sample import sampled

NamedParams = Iterable[tuple[str, nn.Parameter]]


def sgd(named: NamedParams) -> torch.optim.Optimizer:
    """SGD whose learning rate is a power of two, so that multiplying by it does not round."""
    return torch.optim.SGD([p for _, p in named if p.is_floating_point()], lr=1 / 128)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the steps in which it is trained, unsharded and sharded.

    Args:
        build: make the model, the same on every rank
        run: forward and backward of one step of a model on this rank's batch, whose random numbers are seeded before.
            Return what a caller sees: tensors in containers
        reference: make the unsharded model, if it is not that of `build`
        units: argument of `shard`
        options: other arguments of `shard`
        optimizer: make the optimizer of named parameters
        is_wrapped: the sharded run uses `wrap_optimizer`
        set_to_none: argument of `zero_grad`
        scale: initial scale of a gradient scaler; `run` multiplies its loss by it. None: no scaler
        steps: number of steps
        exact: on two ranks both runs agree bit for bit, because each weight gets one gradient in a step
        tolerance: largest error of a gradient or buffer, relative to the largest gradient of a rank
        narrow_tolerance: the same for parameters of two bytes; None: `tolerance`
        output_tolerance: largest error of an output, relative to its largest value
    """

    build: Callable[[], nn.Module]
    run: Callable[[nn.Module, int], Any]
    reference: Callable[[], nn.Module] | None = None
    units: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[NamedParams], torch.optim.Optimizer] = sgd
    is_wrapped: bool = False
    set_to_none: bool = True
    scale: float | None = None
    steps: int = 2
    exact: bool = True
    tolerance: float = 1e-6
    narrow_tolerance: float | None = None
    output_tolerance: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Training steps of a model of the module `models`, as plain data that can be sent to ranks; `case` makes a `Case`.

    Args:
        build: name of a function of `models`
        micros: micro-batches of a step
        skip_last: blocks that the last micro-batch leaves out
        no_sync: the sharded run communicates in the last micro-batch only
        compute: dtype of the weights in forward and backward, over float32 masters
        scale: initial scale of a gradient scaler
        sometimes: rank 0 alone uses `Block.sometimes`
    """

    build: str = "plain"
    steps: int = 3  # the first learns in which order units run, the second uses it, and the third finds it as it was
    micros: int = 1
    skip_last: tuple[int, ...] = ()
    no_sync: bool = False
    compute: torch.dtype | None = None
    scale: float | None = None
    sometimes: bool = False

    def case(self, *, is_wrapped: bool = False, exact: bool = False, units: Any = None, **options: Any) -> Case:
        """Return the `Case` of these steps. `options`: arguments of `shard`; the other arguments: as in `Case`."""
        return Case(
            build=lambda: getattr(models, self.build)().cpu(),  # `shard` moves it, block by block
            run=self._run,
            units=units,
            options={"precision": acc.Precision(params=self.compute), **options},
            optimizer=lambda named: adamw([p for _, p in named]),
            is_wrapped=is_wrapped,
            scale=self.scale,
            steps=self.steps,
            exact=exact,
            tolerance=5e-7,  # of the largest gradient of a rank; that of the mean may be half of it
        )

    def _run(self, model: nn.Module, step: int) -> list[Tensor]:
        losses, rank = [], dist.get_rank()
        options: dict[str, Any] = {"use_sometimes": rank == 0} if self.sometimes else {}
        for micro in range(self.micros):
            is_last = micro == self.micros - 1
            tokens, targets = models.batch(step, micro, rank, vocab=model.embed.num_embeddings)
            with no_sync(model) if self.no_sync and not is_last else nullcontext():
                loss = models.loss_of(model(tokens, **options, skip=self.skip_last if is_last else ()), targets)
                (loss / self.micros * (self.scale or 1.0)).backward()
            losses.append(loss.detach())
        return losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Results of a training on one rank: outputs of each step, full gradients of the first step, full parameters at the end."""

    outputs: list[Any]
    grads: dict[str, Tensor | None]
    params: dict[str, Tensor]


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    return here(_seeded(build, seed))


def _seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def seed_of(step: int) -> int:
    return 1000 * step + dist.get_rank()


def no_sync(model: nn.Module) -> AbstractContextManager[Any]:
    """Return `acc.no_sync` of a sharded model, or a context that does nothing for an unsharded one."""
    is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
    return acc.no_sync(model) if is_sharded else nullcontext()


class Sharded:
    """The sharded run of a `Case` on this rank: the model, its optimizer and the gradient scaler. `run(step)` does forward and
    backward and returns the outputs; `step()` steps the optimizer and clears gradients."""

    def __init__(self, mesh: Any, case: Case) -> None:
        self.case = case
        self.model = acc.shard(_seeded(case.build), mesh=mesh, units=case.units, **case.options)
        self.optimizer = case.optimizer(self.model.named_parameters())
        if case.is_wrapped:
            self.optimizer = acc.wrap_optimizer(self.optimizer)
        self.scaler = torch.amp.GradScaler(device().type, init_scale=case.scale or 1.0, enabled=case.scale is not None)
        self.scaler.scale(torch.ones(1, device=device()))  # initializes the scale, by which `run` multiplies the loss

    def run(self, step: int) -> Any:
        torch.manual_seed(seed_of(step))
        outputs = self.case.run(self.model, step)
        self.scaler.unscale_(self.optimizer)
        return outputs

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=self.case.set_to_none)


class Unsharded:
    """The unsharded run of a `Case`: this rank's batches on a whole model, with gradients summed over ranks in rank order.

    `run(step)` does forward and backward, `reduce` sums the gradients, `step` steps the optimizer. `masters`: the parameters that
    the optimizer steps. A parameter is its own master, unless the sharded run stores it in a wider dtype than it computes in.
    """

    def __init__(self, mesh: Any, case: Case) -> None:
        self.mesh, self.case = mesh, case
        self.model = seeded(case.reference or case.build)
        self.params = dict(self.model.named_parameters())
        self.precision = case.options.get("precision") or acc.Precision()
        self.masters = {name: self._master(p) for name, p in self.params.items()}
        self.optimizer = case.optimizer(self.masters.items())
        self._sums: dict[str, Tensor] = {}
        for name, p in self.params.items():
            if self.masters[name] is not p and p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p, name=name: self._add(name, p))

    def _master(self, p: nn.Parameter) -> nn.Parameter:
        wanted = self.precision.master
        is_narrow = p.requires_grad and wanted is not None and p.itemsize < wanted.itemsize
        dtype = wanted if is_narrow else p.dtype
        if dtype == p.dtype and self.precision.params is None:
            return p
        return nn.Parameter(p.detach().to(dtype, copy=True), requires_grad=p.requires_grad)

    def _add(self, name: str, p: Tensor) -> None:
        """Add `p.grad` to the sum for parameter `name`, in at least four bytes, and clear it. Autograd would add in `p.dtype`."""
        grad = p.grad.float() if p.grad.itemsize < 4 else p.grad
        self._sums[name] = self._sums[name] + grad if name in self._sums else grad
        p.grad = None

    def run(self, step: int) -> Any:
        for name, p in self.params.items():  # in each step: a router may cast its own weight in its forward
            master = self.masters[name]
            if master is not p:
                p.data = master.detach().to(self.precision.params or p.dtype, copy=True)
        torch.manual_seed(seed_of(step))
        return self.case.run(self.model, step)

    def reduce(self) -> tuple[dict[str, Tensor | None], dict[str, float]]:
        """Reduce gradients over ranks, to the mean or as `reduce_op` asks, into `.grad` of the masters. Return (name ->
        gradient or None, name -> largest absolute value that a rank contributed). Collective."""
        local = {name: p.grad if self.masters[name] is p else self._sums.get(name) for name, p in self.params.items()}
        self._sums = {}
        scale = self.case.scale or 1.0
        sums, largest = sums_over_ranks(self.mesh, {n: None if g is None else g / scale for n, g in local.items()})
        divisor = 1 if self.case.options.get("reduce_op") == "sum" else self.mesh.size()
        for name, total in sums.items():
            master = self.masters[name]
            if total is not None:
                grad = (total / divisor).to(master.dtype)
                adds = master is not self.params[name] and master.grad is not None
                master.grad = master.grad + grad if adds else grad
        return {name: master.grad for name, master in self.masters.items()}, largest

    def take(self, grads: Mapping[str, Tensor | None]) -> None:
        for name, grad in grads.items():
            self.masters[name].grad = grad

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.case.set_to_none)


class Twins:
    """Both runs of a `Case` on this rank, sharded and unsharded, which are compared step by step."""

    def __init__(self, mesh: Any, case: Case) -> None:
        self.case, self.exact = case, case.exact and mesh.size() <= 2
        self.unsharded, self.sharded = Unsharded(mesh, case), Sharded(mesh, case)

    def run(self, step: int) -> tuple[Any, Any]:
        """Run forward and backward of both models; return (outputs of the sharded one, outputs of the unsharded one)."""
        outputs = self.unsharded.run(step)
        return self.sharded.run(step), outputs

    def check_backward(self, step: int) -> None:
        """Run forward and backward of both models; compare outputs and gradients."""
        found, wanted = self.run(step)
        assert_alike(found, wanted, 0.0 if self.exact else self.case.output_tolerance)
        self.check_grads()

    def check_step(self) -> None:
        """Step both optimizers, then compare parameters and buffers."""
        self.unsharded.step()
        self.sharded.step()
        self.check_state()

    def check_grads(self) -> None:
        """Compare gradients. The unsharded run then takes those of the sharded one, so that `check_step` compares only steps."""
        found, (wanted, largest) = grads_of(self.sharded.model), self.unsharded.reduce()
        assert found.keys() == wanted.keys()
        dtypes = [{name: g.dtype for name, g in grads.items() if g is not None} for grads in (found, wanted)]
        assert dtypes[0] == dtypes[1]
        narrow = {name for name, p in self.unsharded.params.items() if p.itemsize < 4}
        limit = self.case.tolerance
        narrow_limit = limit if self.case.narrow_tolerance is None else self.case.narrow_tolerance
        for names, tolerance in ((found.keys() - narrow, limit), (narrow, narrow_limit)):
            some = [{name: grads[name] for name in sorted(names)} for grads in (found, wanted)]
            assert_close(*some, 0.0 if self.exact else tolerance, largest)
        self.unsharded.take(found)

    def check_state(self) -> None:
        """Compare parameters and buffers. The unsharded run then takes the sharded parameters, so that no rounding adds up."""
        model, plain = self.sharded.model, self.unsharded
        found = params_of(model)
        assert {n: p.dtype for n, p in found.items()} == {n: p.dtype for n, p in plain.masters.items()}
        # A step may bring a weight close to zero: `least`.
        assert_close(found, plain.masters, 0.0 if self.exact else 1e-6, least=1.0)
        with torch.no_grad():
            for name, master in plain.masters.items():
                master.copy_(found[name])
        limit = 0.0 if self.exact else self.case.tolerance
        assert_close(dict(model.named_buffers()), dict(plain.model.named_buffers()), limit)


def compare(mesh: Any, case: Case) -> nn.Module:
    """Train the model of `case` sharded and unsharded, compare each step, and return the sharded model."""
    twins = Twins(mesh, case)
    for step in range(case.steps):
        twins.check_backward(step)
        twins.check_step()
        rest(twins.sharded.model)
    return twins.sharded.model


def compare_poisoned(mesh: Any, case: Case) -> nn.Module:
    """Do as `compare`; on three ranks with `debug="streams"`, which fills freed memory with NaN to reveal a use after free."""
    return compare(mesh, replace(case, options={"debug": "streams", **case.options}) if mesh.size() == 3 else case)


def train(mesh: Any, case: Case) -> Trace:
    """Train the model of `case` sharded, and return its `Trace`. Waits for the last optimizer step only, so that other steps may
    still run during the next forward."""
    run, outputs = Sharded(mesh, case), list[Any]()
    grads: dict[str, Tensor | None] = {}
    for step in range(case.steps):
        outputs.append(run.run(step))
        grads = grads if step else grads_of(run.model)
        run.step()
    acc.synchronize(run.model)
    return Trace(outputs=outputs, grads=grads, params=params_of(run.model))


def assert_same(found: Trace, wanted: Trace) -> None:
    """Fail unless two traces are equal bit for bit."""
    assert_alike(found.outputs, wanted.outputs)
    assert_close(found.grads, wanted.grads, 0.0)
    assert_close(found.params, wanted.params, 0.0)


def check_grads(mesh: Any, model: nn.Module, plain: nn.Module, *, exact: bool, tolerance: float = 1e-6) -> None:
    """Compare the gradients of the sharded `model` with the means over ranks of the gradients of the unsharded `plain`, whose
    `.grad` become these means. `exact`: bit for bit, without `tolerance`. Collective."""
    found = grads_of(model)
    sums, largest = sums_over_ranks(mesh, {name: p.grad for name, p in plain.named_parameters()})
    wanted: dict[str, Tensor | None] = {}
    for name, p in plain.named_parameters():
        mean = None if sums[name] is None else sums[name] / mesh.size()
        wanted[name] = None if mean is None else mean.to(p.dtype if found[name] is None else found[name].dtype)
        p.grad = None if mean is None else wanted[name].to(p.dtype)
    assert_close(found, wanted, 0.0 if exact else tolerance, largest)


def check_step(
    mesh: Any,
    model: nn.Module,
    plain: nn.Module,
    run: Callable[[nn.Module, int], Any],
    step: int = 0,
    *,
    exact: bool | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Clear gradients, run forward and backward of both models, and compare outputs and gradients. `plain`: the unsharded model.

    `run(model, step)`: runs forward and backward, and returns outputs. `exact`: compare bit for bit; None: only on two ranks.
    """
    exact = mesh.size() == 2 if exact is None else exact
    outputs = []
    for m in (plain, model):
        m.zero_grad()
        torch.manual_seed(seed_of(step))
        outputs.append(run(m, step))
    assert_alike(outputs[1], outputs[0], 0.0 if exact else tolerance)
    check_grads(mesh, model, plain, exact=exact, tolerance=tolerance)


def assert_alike(found: Any, wanted: Any, tolerance: float = 0.0) -> None:
    """Fail unless two outputs have equal types, containers and values. Tensors may differ by `tolerance` x the largest value."""
    assert type(found) is type(wanted), (type(found), type(wanted))
    if isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype
        assert found.requires_grad == wanted.requires_grad
        assert_close({"output": found}, {"output": wanted}, tolerance)
    elif isinstance(wanted, Mapping):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_alike(found[key], value, tolerance)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_alike(one, other, tolerance)
    elif hasattr(wanted, "__dict__"):
        assert_alike(vars(found), vars(wanted), tolerance)
    else:
        assert found == wanted


def rest(model: nn.Module) -> None:
    """Assert that no unit is in use, modules have sharded parameters, and full parameters use no memory."""
    assert_at_rest(model)
    opened = open_full_buffers(model)
    assert not opened, f"full parameters in memory between steps: {opened}"
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            assert all(
                getattr(module, n) is w for n, w in zip(module._flat_weights_names, module._flat_weights, strict=True)
            )


def open_full_buffers(model: nn.Module) -> list[str]:
    """Return names of units whose full parameters use memory between steps. Memory that debug="streams" has filled with NaN is
    left out. If the engine keeps full parameters, return []."""
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


def on_its_ranks(cases: Mapping[str, Case]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a test of `program(mesh, name)`, for each name in `cases` on two, three and four ranks. `make
    test` runs exact cases on two ranks and others on three; `make test-all` runs all."""
    rows = [(name, num_ranks) for name in cases for num_ranks in (2, 3, 4)]
    usual = sampled(rows, lambda name, num_ranks: num_ranks == (2 if cases[name].exact else 3))
    return lambda program: pytest.mark.parametrize(("name", "num_ranks"), usual)(on_num_ranks(program))


class Pair(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))
