"""If only some ranks call a unit, losses and gradients equal those without sharding, in any order, from any step on."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import accordion as acc
import accordion.compat.fsdp2 as compat
from accordion.config import STRATEGIES
from accordion.safety.agreement import CatchUp, UnitCall, choose
from accordion.safety.pass_history import PassHistory
from tests.devices import device
from tests.inside import engine_in
from tests.safety.test_divergence import IN_STREAMS, impatient
from tests.support import models
from tests.support.checks import assert_at_rest, assert_close, logged, mean_grads, mesh_of
from tests.support.compare import seeded
from tests.support.ranked import on_mesh, on_world
from tests.support.sample import sampled

WIDTH = 16
# A call: the number of a block, or of a tower with the calls inside of it.
Way = Sequence[int | tuple[int, Sequence[int]]]
WHOLE: Way = (0, 1, 2, (3, (0, 1)))


class Tower(nn.Module):
    """Unit with inner units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block(WIDTH, 24) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, way: Iterable[int]) -> Tensor:
        for i in way:
            x = self.blocks[i](x)
        return self.out(x)


class Paths(nn.Module):
    """Blocks and a tower, which each rank calls in its own order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            [models.Block(WIDTH, 24), models.Block(WIDTH, 40), models.Block(WIDTH, 24), Tower()]
        )

    def forward(self, x: Tensor, way: Way) -> Tensor:
        x = self.first(x)
        for call in way:
            x = self.blocks[call](x) if isinstance(call, int) else self.blocks[call[0]](x, call[1])
        return x.square().mean()


def paths(mesh, **options: Any) -> tuple[nn.Module, Paths]:
    """Return (sharded model, equal model without sharding)."""
    plain, model = seeded(Paths), seeded(Paths)
    return acc.shard(model, mesh=mesh, units={models.Block, Tower}, **options), plain


def numbers(step: int) -> Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank())).to(device())


def check_step(mesh, model: nn.Module, plain: Paths, way: Way, step: int, no_sync: int = 0) -> None:
    """Run a step of several backwards, all but the last under no_sync; compare loss and gradients with the unsharded model."""
    for m in (model, plain):
        m.zero_grad()
    for part in range(no_sync + 1):
        x, losses = numbers(step + 1000 * part), []
        for m in (model, plain):
            with acc.no_sync(model) if part < no_sync and m is model else nullcontext():
                losses.append(m(x, way))
                losses[-1].backward()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    found = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}
    assert_close(found, mean_grads(mesh, plain), tolerance=2e-6)
    assert_at_rest(model)


def run_ways(mesh, strategy: acc.Strategy, ways: Sequence[Sequence[Way]], **options: Any) -> list[str]:
    """Run steps in which rank r takes way r; return the log's warnings of different units."""
    no_sync = options.pop("no_sync", 0)
    model, plain = paths(mesh, strategy=strategy, **options)
    with logged() as messages:
        for step, of_ranks in enumerate(ways):
            check_step(mesh, model, plain, of_ranks[dist.get_rank() % len(of_ranks)], step, no_sync)
            with torch.no_grad():
                way = of_ranks[(dist.get_rank() + 1) % len(of_ranks)]
                torch.testing.assert_close(model(numbers(step), way), plain(numbers(step), way), rtol=1e-6, atol=0)
    return [message for message in messages if "call different units" in message]


# The calls of ranks 0 and 1; further ranks take these in turn.
BY_RANK: dict[str, tuple[Way, Way]] = {
    "leaves_one_out": (WHOLE, (0, 2, (3, (0, 1)))),
    "leaves_the_first_out": (WHOLE, (1, 2, (3, (0, 1)))),
    "ends_early": (WHOLE, (0,)),
    "calls_none": (WHOLE, ()),
    "nothing_in_common": ((0, 1), (2, (3, (1,)))),
    "swaps": (WHOLE, (1, 0, 2, (3, (1, 0)))),
    "leaves_a_tower_out": (WHOLE, (0, 1, 2)),
    "leaves_one_in_a_tower_out": (WHOLE, (0, 1, 2, (3, (1,)))),
    "a_tower_of_its_own": ((0, (3, (0, 1)), 2), (0, (3, ()), 1, 2)),
}


@pytest.mark.parametrize("how", sampled(BY_RANK, {"swaps", "a_tower_of_its_own"}.__contains__))
@on_world(3)
def test_ranks_may_skip_units_from_the_first_step_on(mesh, how: str) -> None:
    assert len(run_ways(mesh, acc.FULL_SHARD, [BY_RANK[how]] * 2)) == 1


@IN_STREAMS
@pytest.mark.parametrize("how", sampled(BY_RANK, {"leaves_one_out", "nothing_in_common", "calls_none"}.__contains__))
@on_world(2)
def test_ranks_may_skip_units_from_a_later_step_on(mesh, how: str) -> None:
    """Ranks skip units when the others wait in a collective, where they poll for meetings."""
    assert len(run_ways(mesh, acc.FULL_SHARD, [(WHOLE,)] * 2 + [BY_RANK[how]] * 2 + [(WHOLE,)])) == 1


# A checkpointed tower is recomputed with the units inside it: which of them is the same on all ranks there.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("leaves_a_tower_out", {"strategy": strategy}) for name, strategy in STRATEGIES.items()},
    "no_sync": ("leaves_a_tower_out", {"no_sync": 2}),
    "no_sync, no_shard": ("leaves_a_tower_out", {"no_sync": 2, "strategy": acc.NO_SHARD}),
    "no_sync, shard_optim": ("leaves_a_tower_out", {"no_sync": 2, "strategy": acc.SHARD_OPTIM}),
    "full": ("leaves_one_out", {"checkpoint_activations": "full"}),
    "selective": ("leaves_one_out", {"checkpoint_activations": "selective"}),
    "prefetch": ("leaves_a_tower_out", {"prefetch": acc.Prefetch(budget_bytes=1 << 20)}),
    "debug": ("leaves_a_tower_out", {"debug": ("streams", "order", "finite")}),
    "offload": ("leaves_a_tower_out", {"offload": acc.Offload(params="host", optimizer="host")}),
}


def run_with(
    world: Any, ways: Sequence[Sequence[Way]], strategy: acc.Strategy = acc.FULL_SHARD, **options: Any
) -> None:
    world.run_mesh(*mesh_of(strategy), run_ways, strategy, ways, **options)


@pytest.mark.parametrize(
    "name", sampled(OPTIONS, {"debug", "selective", "shard_grad_op", "hybrid_shard_optim"}.__contains__)
)
def test_ranks_may_skip_units_with_each_option(world, name):
    how, options = OPTIONS[name]
    run_with(world, [BY_RANK["leaves_the_first_out"], BY_RANK[how], (WHOLE,)], **options)


@IN_STREAMS
@pytest.mark.parametrize(
    "name", sampled(OPTIONS, {"offload", "full", "no_sync, shard_optim", "no_shard", "hybrid_shard"}.__contains__)
)
def test_ranks_may_skip_units_with_each_option_from_a_later_step_on(world, name):
    how, options = OPTIONS[name]
    run_with(world, [(WHOLE,), BY_RANK[how]], **options)


def drawn(seed: int, num_ranks: int) -> list[list[Way]]:
    """Return random steps: layers are skipped, called again or reordered; in some steps all ranks take one way.

    In the first step that differs, ranks only skip units: a unit after the end of the last forward would be refused.
    """
    rng = random.Random(seed)

    def way() -> Way:
        calls: list[Any] = [i for i in range(3) if rng.random() < 0.7]
        if rng.random() < 0.3:
            rng.shuffle(calls)
        if calls and rng.random() < 0.3:
            calls.append(rng.choice(calls))
        if rng.random() < 0.7:
            calls.insert(rng.randint(0, len(calls)), (3, [i for i in range(2) if rng.random() < 0.7]))
        return calls

    steps = [[way()] if rng.random() < 0.3 else [way() for _ in range(num_ranks)] for _ in range(5)]
    first = BY_RANK[rng.choice(("leaves_one_out", "leaves_the_first_out", "leaves_a_tower_out", "calls_none"))]
    return [[WHOLE], first, *steps] if rng.random() < 0.3 else [first, *steps]


def run_drawn(mesh, seeds: Sequence[int]) -> None:
    for seed in seeds:
        strategy = list(STRATEGIES.values())[seed % 4]
        rng = random.Random(seed)
        run_ways(
            mesh,
            strategy if not strategy.hybrid else acc.FULL_SHARD,
            drawn(seed, mesh.size()),
            no_sync=rng.choice((0, 0, 1)),
            debug=rng.choice(((), (), ("order",))),  # in the first step ranks are together, or always
        )


@IN_STREAMS
@pytest.mark.parametrize(
    ("num_ranks", "seeds"),
    sampled([(2, range(2)), *((n, range(100, 160)) for n in (2, 3, 4))], lambda n, seeds: len(seeds) < 3),
)
def test_ranks_may_drop_layers_at_random(world, num_ranks, seeds):
    world.run(num_ranks, run_drawn, seeds, timeout_s=600)


@on_world(3)
def test_ranks_may_call_frozen_blocks_in_different_ways(mesh) -> None:
    """One rank calls a frozen block with an input that requires a gradient, another one without, and a third one never."""
    model, plain = paths(mesh)
    for m in (model, plain):
        m.blocks[1].requires_grad_(False)
    for step, ways in enumerate([[(0, 1), (1, 0), (0,)], [(0, 1, 2), (1,), ((3, (0,)), 1)]]):
        check_step(mesh, model, plain, ways[dist.get_rank() % 3], step)


@on_world(2)
def test_equal_steps_hold_no_meetings(mesh) -> None:
    """With gradient accumulation the next pass depends on several last passes, at most 32."""
    no_sync, settled = 1, 10
    model, plain = paths(mesh)
    watch = engine_in(model).context.waiter
    for step in range(settled):
        check_step(mesh, model, plain, WHOLE, step, no_sync)
    before = watch._num_met
    for step in range(3):
        check_step(mesh, model, plain, WHOLE, step, no_sync)
    assert watch._num_met == before, "ranks that repeat their steps send no reports"
    assert before > 0


@IN_STREAMS
@on_world(2)
def test_ranks_may_skip_units_in_evaluations(mesh) -> None:
    """Rank 1 skips a unit in forwards without a backward, when the other rank may be in the next one."""
    model, plain = paths(mesh)
    check_step(mesh, model, plain, WHOLE, 0)
    with torch.no_grad():
        for step in range(6):
            way = WHOLE[:-1] if step >= 3 and dist.get_rank() == 1 else WHOLE
            torch.testing.assert_close(model(numbers(step), way), plain(numbers(step), way), rtol=1e-6, atol=0)
    check_step(mesh, model, plain, WHOLE, 1)


@IN_STREAMS
@on_world(2)
def test_one_rank_may_evaluate_more_batches_if_full_parameters_are_resident(mesh) -> None:
    """Rank 0 evaluates in different ways, and training continues."""
    model, plain = paths(mesh, strategy=acc.SHARD_OPTIM)
    for step in range(3):
        check_step(mesh, model, plain, WHOLE, step)
        with torch.no_grad():
            assert model(numbers(0), WHOLE).isfinite()
            for way in (WHOLE, (0, 2), (2,))[: 3 * (dist.get_rank() == 0)]:
                assert model(numbers(0), way).isfinite()


@on_world(2)
def test_ranks_may_skip_a_unit_inside_a_unit_of_two_modules(mesh) -> None:
    """One rank skips a unit inside the second module of a unit of two modules."""
    plain, model = seeded(Paths), seeded(Paths)
    compat.fully_shard(model.blocks[3].blocks[0], mesh=mesh)
    compat.fully_shard([model.blocks[0], model.blocks[3]], mesh=mesh)
    compat.fully_shard(model, mesh=mesh)
    for step in range(2):
        check_step(mesh, model, plain, (0, (3, (0, 1) if dist.get_rank() else (1,))), step)


@IN_STREAMS
@on_mesh((2,), pool="alone")
def test_a_unit_that_one_rank_calls_too_late_is_named_on_every_rank(mesh) -> None:
    """Rank 1 calls one more unit when the other rank waits in its backward."""
    model, _ = paths(mesh)
    for step in range(2):
        model(numbers(step), WHOLE).backward()
    start, way = time.monotonic(), (*WHOLE, 2) if dist.get_rank() == 1 else WHOLE
    with impatient(), pytest.raises(acc.DivergenceError, match=r"unit 3 \(blocks\.2\)"):
        model(numbers(0), way).backward()
    assert time.monotonic() - start < 30


# -- what is chosen


def report(step: UnitCall | None, *, root: int = 1, num_done: int | None = 2, **more: Any) -> dict[str, Any]:
    return {"what": "", "step": step, "root": root, "num_done": num_done, **more}


def enter(unit: int, depth: int = 1, trained: tuple[int, ...] = (0,)) -> UnitCall:
    return UnitCall(unit, True, depth, trained)


LEAVE = UnitCall(0, False, 1, (), leaves=True)


@pytest.mark.parametrize(
    ("statements", "chosen"),
    [
        ([report(enter(3)), report(enter(2)), report(LEAVE)], enter(2)),
        ([report(enter(2)), report(enter(3, depth=2))], enter(3, depth=2)),
        ([report(enter(2)), report(LEAVE._replace(unit=1, depth=2))], LEAVE._replace(unit=1, depth=2)),
        ([report(enter(2)), report(enter(2, trained=()))], None),
        ([report(enter(0, depth=0)), report(enter(1, depth=0))], None),
        ([report(enter(2)), report(None, num_done=4), report(None, num_done=3)], CatchUp(1, 4)),
        ([report(enter(2)), report(None, num_done=None), report(None, num_done=3)], CatchUp(1, None)),
        ([report(enter(2)), report(None, root=0, num_done=None)], CatchUp(1, 2)),
        ([report(enter(2)), report(enter(2), root=2)], CatchUp(1, None)),
        ([report(None, num_done=None), report(None, root=2, num_done=0, must="begins a forward")], CatchUp(0, 0)),
        ([report(enter(2)), report(enter(1), num_done=5)], CatchUp(1, 5)),
        ([report(enter(2)), report(None, num_done=None, must="begins a backward")], CatchUp(1, None)),
        ([report(enter(2)), report(None, num_done=0, must="begins a forward")], None),
        ([report(None, num_done=None), report(None, num_done=None, must="begins a backward")], CatchUp(0, 0)),
        ([report(None, num_done=None, must="a"), report(None, num_done=None, must="b")], None),
    ],
)
def test_choose_takes_inner_steps_first_then_the_order_of_the_model(statements, chosen):
    assert choose(statements) == chosen
    assert choose(statements[::-1]) == chosen


def test_pass_history_predicts_the_next_event() -> None:
    expected = PassHistory()
    for events in ("abc", "abc"):
        expected.begin(0, "kind")
        for event in events:
            expected.note(0, event)
        expected.end(0)
    expected.begin(0, "kind")
    assert expected.matches(0, "a")
    assert not expected.matches(0, "c")
    assert (expected.following(0), expected.num_done(0)) == ("b", 1)
    expected.note(0, "c")
    assert (expected.following(0), expected.num_done(0)) == (None, 2)
    assert expected.end(0)
    assert expected.num_done(0) is None
