"""After an exception or a refusal a model is usable, and after its end its memory is freed."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import itertools
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from accordion.config import STRATEGIES
from accordion.engine.streams import SideStream
from tests.devices import device
from tests.inside import units_of
from tests.support import models
from tests.support.chains import FEW, Chain, around_each, chain, numbers, plain_run, steps_again
from tests.support.checks import PlantedError, batch, mesh_of
from tests.support.compare import Pair, rest, seed_of, seeded
from tests.support.ranked import on_mesh, on_world
from tests.support.sample import sampled

# -- exceptions


class Fails(Pair):
    """Module that raises a given error at a given point."""

    where: str | None = None
    error: type[BaseException] = PlantedError

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        recomputing = torch._C._current_graph_task_id() != -1
        if self.where == "forward" or (self.where == "recomputation" and recomputing):
            raise self.error
        if self.where == "backward":
            y.register_hook(functools.partial(raises, error=self.error))
        return x + self.b(y)


def raises(*_: Any, error: type[BaseException] = PlantedError) -> None:
    raise error


def planted(model: Chain, name: str) -> list[Any]:
    """Make the second of three units fail; return the handles of the hooks."""
    unit = model.units[1]
    kind, _, what = name.partition(": ")
    if kind != "hook":
        unit.where = what or kind
        unit.error = KeyboardInterrupt if kind == "interrupt" else PlantedError
        return []
    return [
        {
            "before a unit": lambda: unit.register_forward_pre_hook(raises),
            "after a unit": lambda: unit.register_forward_hook(raises),
            "inside a unit": lambda: unit.a.register_forward_hook(raises),
            "of a module's backward": lambda: unit.register_full_backward_hook(raises),
            "of a gradient": lambda: unit.a.weight.register_hook(raises),
            "of an accumulated gradient": lambda: unit.b.bias.register_post_accumulate_grad_hook(raises),
            "of the root": lambda: model.register_forward_hook(raises),
            "of an activation": lambda: unit.register_forward_hook(
                lambda m, a, out: out.register_hook(raises) and None
            ),
        }[what]()
    ]


FAILURES = [
    "forward", "backward", "recomputation", "recomputation, reentrant", "recomputation, activations",
    "interrupt: forward", "interrupt: backward", "hook: before a unit", "hook: after a unit", "hook: inside a unit",
    "hook: of a module's backward", "hook: of a gradient", "hook: of an accumulated gradient", "hook: of the root",
    "hook: of an activation",
]  # fmt: skip


def failing(name: str) -> tuple[Callable[[], Chain], dict[str, Any], str]:
    """Return a function that builds the model, options of `shard`, and the failure to plant."""
    what, _, how = name.partition(", ")
    call = None
    if what == "recomputation" and how != "activations":
        call = functools.partial(around_each, reentrant=how == "reentrant")
    build = functools.partial(Chain, Fails, count=3, call=call)
    return build, {"checkpoint_activations": "full" if how == "activations" else "none"}, what


def run_failing(model: Chain) -> None:
    """Run a step that fails, and keep no reference to it outside of the engine."""
    with pytest.raises((PlantedError, KeyboardInterrupt)):
        plain_run(model, 0)


def failure(mesh, strategy: acc.Strategy, name: str) -> None:
    build, options, what = failing(name)
    plain, model = seeded(build), acc.shard(seeded(build), mesh=mesh, units={Fails}, strategy=strategy, **options)
    for times in (2, 1):  # before any good step, and after some
        for _ in range(times):
            handles = planted(model, what)
            run_failing(model)
            for handle in handles:
                handle.remove()
            model.units[1].where = None
            with torch.no_grad(), warnings.catch_warnings():  # usable at once
                warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")  # reentrant, without
                torch.manual_seed(seed_of(5))
                found = model(numbers())
                torch.manual_seed(seed_of(5))
                assert torch.equal(found, plain(numbers()))
        steps_again(mesh, model, plain)
    with acc.full_params(model):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)


# On three ranks, where rows do not divide.
ON_THREE = {"backward", "recomputation, activations"}


BY_STRATEGY = [(name, 2, strategy) for name in ("forward", "backward") for strategy in STRATEGIES]
SHOWN = [("forward", 2, "shard_grad_op"), ("backward", 2, "shard_grad_op")]


@pytest.mark.parametrize(
    ("name", "num_ranks", "strategy"),
    sampled(
        dict.fromkeys([*((name, num_ranks, "full_shard") for name in FAILURES for num_ranks in FEW), *BY_STRATEGY]),
        lambda *row: row in SHOWN or (row[2] == "full_shard" and (row[1] == 3) == (row[0] in ON_THREE)),
    ),
)
def test_after_an_exception_the_model_is_as_before(world, name, num_ranks, strategy):
    world.run_mesh(*mesh_of(STRATEGIES[strategy], num_ranks), failure, STRATEGIES[strategy], name)


# -- the end of a model


def watched(model: Chain) -> list[weakref.ref[Any]]:
    """Return weak references to all that must be freed with the model: modules, units, memory of shards and full parameters."""
    found: list[Any] = [model, *model.units, model.first]
    for unit in units_of(model):
        found += [unit, *unit.groups, *(g.shard_buffer for g in unit.groups)]
        found += [t for g in unit.groups for t in (*g.shard_buffer.locals, *g.views)]
    return [weakref.ref(o) for o in found]


def deleted(mesh, when: str) -> None:
    build, options, _ = failing("recomputation, activations" if when == "after recomputation failed" else "forward")
    model = acc.shard(seeded(build), mesh=mesh, units={Fails}, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    gc.collect()
    gc.disable()
    try:
        if when != "unused":
            for step in range(3):
                plain_run(model, step)
                optimizer.step()
                optimizer.zero_grad()
        if when == "after inference":
            with torch.no_grad():
                model(numbers())
        if when == "after a forward that nothing walks back":
            model(numbers())
        if "failed" in when:
            planted(model, when.split()[1])
            run_failing(model)
        references = watched(model)
        assert all(r() is not None for r in references)
        del model, optimizer
        # Without sharding too, autograd's queue holds nodes, and frames of checkpoint() are in cycles.
        if when in ("after backward failed", "after recomputation failed"):
            torch.ones((), requires_grad=True, device=device()).backward()
        if when == "after recomputation failed":
            gc.collect()
        left = [r() for r in references if r() is not None]
        assert not left, f"{len(left)} of {len(references)} live on, {[type(o).__name__ for o in left][:8]}"
    finally:
        gc.enable()


ENDS = [
    "unused", "after steps", "after inference", "after a forward that nothing walks back", "after forward failed",
    "after backward failed", "after recomputation failed",
]  # fmt: skip


@pytest.mark.parametrize(
    ("when", "num_ranks"),
    sampled([(when, n) for when in ENDS for n in (1, 2, 3)], lambda when, num_ranks: num_ranks == 2),
)
def test_a_deleted_model_frees_its_memory_at_once(world, when, num_ranks):
    world.run(num_ranks, deleted, when)


@on_world(2)
def test_a_backward_after_the_model_was_deleted_raises(mesh) -> None:
    model = acc.shard(seeded(chain(Pair).build), mesh=mesh, units={Pair})
    out = model(numbers())
    del model
    with pytest.raises(acc.UsageError, match="deleted between this forward and its backward"):
        out.sum().backward()


@on_world(2)
def test_copies_and_pickles_are_refused_with_advice(mesh) -> None:
    model = acc.shard(seeded(Chain), mesh=mesh, units={Pair})
    plain_run(model, 0)
    for target in (model, model.units[0], nn.Sequential(model)):
        with pytest.raises(acc.UsageError, match=r"copied.*load_state_dict"):
            copy.deepcopy(target)
        for dump in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(acc.UsageError, match=r"pickled.*accordion\.save.*full_state_dict"):
                dump(target)
    with pytest.raises(acc.UsageError):
        copy.copy(model)


@pytest.mark.parametrize("strategy", [acc.FULL_SHARD, acc.SHARD_GRAD_OP, acc.SHARD_OPTIM], ids=lambda s: s.name)
@on_world(2)
def test_the_backward_of_a_graph_older_than_the_weights_is_refused(mesh, strategy: acc.Strategy) -> None:
    """Forward, step, backward of the old graph: torch refuses modified weights, and so must a sharded model."""
    plain = seeded(Chain)
    model = acc.shard(seeded(Chain), mesh=mesh, units={Pair}, strategy=strategy)
    for m in (plain, model):
        # Torch counts no write of its multi-tensor kernels to DTensors, which on accelerators are the default.
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, foreach=False)
        torch.manual_seed(seed_of(0))
        loss = m(numbers()).square().mean()
        plain_run(m, 0)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises((RuntimeError, acc.UsageError), match=r"modified|changed"):
            loss.backward()
        m.zero_grad()
        del loss
    if strategy == acc.FULL_SHARD:
        for _ in range(2):  # and training continues
            plain_run(model, 1)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        rest(model)


@pytest.mark.parametrize("how", ["a module", "a parameter", "a list that grows", "a frozen one", "another model"])
@on_world(2)
def test_parameters_added_after_shard_are_refused(mesh, how: str) -> None:
    model = acc.shard(models.plain(), mesh=mesh)
    tokens, _ = batch(model)
    model(tokens)
    if how == "a module":
        model.blocks[1].new = nn.Linear(4, 4)
    elif how == "a parameter":
        model.blocks[1].new = nn.Parameter(torch.zeros(4, device=device()))
    elif how == "a list that grows":
        model.blocks.append(models.Block(32, 64))
    elif how == "a frozen one":
        model.blocks[1].new = nn.Linear(4, 4).requires_grad_(False)
    else:
        models.plain()
    if how in ("a frozen one", "another model"):
        model(tokens)
        return
    with pytest.raises(acc.UsageError, match=r"'blocks\.[13]\.\S+' was added to the model after shard\(\)"):
        model(tokens)
    with acc.full_params(model):
        model.blocks[0](torch.zeros(1, 2, 32, device=device()))  # full parameters in the registry are no additions
    with pytest.raises(acc.UsageError, match="freeze it with"):
        model(tokens)


# -- communications that do not begin


def starts_refused(at: int) -> contextlib.AbstractContextManager[Any]:
    """Have the side streams run out of memory at the start of communication number `at`."""
    plain, count = SideStream.start, itertools.count()

    def start(side_stream: SideStream, *args: Any) -> Any:
        if next(count) == at:
            raise torch.OutOfMemoryError("planted")
        return plain(side_stream, *args)

    return mock.patch.object(SideStream, "start", start)


def two_dtypes() -> nn.Module:
    """Return a model whose units are gathered in two dtypes: batch norms stay in float32."""
    parts = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*parts, nn.Linear(16, 16))


@on_mesh((2, 2), ("replicate", "shard"))
def test_a_gather_that_could_not_begin_is_begun_anew(mesh) -> None:
    """A loop catches the error and continues with a batch that fits."""
    x, found = torch.randn(4, 16).to(device()), []
    for at in (-1, 0, 1, 2, 5):
        torch.manual_seed(0)
        options = {"strategy": acc.HYBRID_SHARD_OPTIM, "precision": acc.Precision(params=torch.bfloat16)}
        model = acc.shard(two_dtypes(), mesh, units={nn.Sequential}, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with starts_refused(at), contextlib.suppress(torch.OutOfMemoryError):
            model.eval()(x)  # statistics are left alone
        for _ in range(2):
            model.train()(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().to_local().clone() for p in model.parameters()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
