"""Secondary shards: from a forward to its backward full parameters stay sharded over fewer ranks, which gather these alone."""

from __future__ import annotations

from tempfile import gettempdir
from typing import Any

import pytest
import torch

import accordion as acc
from accordion.engine.layout import aligned, cut, full_offsets
from tests.inside import units_of
from tests.support import checks, models
from tests.support.compare import Scenario, assert_same, train
from tests.support.meters import Wire
from tests.support.ranked import on_world
from tests.support.sample import sampled

RANKS, NEAR = 4, 2

TRAINED: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "plain": (Scenario(), {}),
    "wide": (Scenario(build="wide"), {}),
    "uneven": (Scenario(build="uneven"), {}),
    "tied, frozen": (Scenario(build="tied"), {}),
    "frozen": (Scenario(build="frozen"), {}),
    "bf16": (Scenario(build="wide", compute=torch.bfloat16), {}),
    "recomputed": (Scenario(), {"checkpoint_activations": "full"}),
    "accumulated": (Scenario(micros=3, no_sync=True), {}),
    "reduced each time": (Scenario(micros=2), {}),
    "late and filled": (Scenario(build="wide"), {"debug": "streams"}),
    "agreed on": (Scenario(), {"debug": "order"}),
    "on disk": (
        Scenario(build="wide"),
        {"offload": acc.Offload(params=f"disk:{gettempdir()}", optimizer="host"), "is_wrapped": True},
    ),
    "on the host": (Scenario(), {"offload": acc.Offload(params="host"), "is_wrapped": True}),
}
USUAL = ("uneven", "late and filled")


@pytest.mark.parametrize("case", sampled(TRAINED, lambda case: case in USUAL))
@on_world(RANKS)
def test_training_is_bit_for_bit_that_without_it(mesh: Any, case: str) -> None:
    """With and without: the same losses, gradients and parameters, bit for bit."""
    scenario, options = TRAINED[case]

    with_it, without = (
        train(mesh, scenario.case(strategy=acc.FULL_SHARD, secondary=secondary, **options))
        for secondary in (NEAR, None)
    )
    assert_same(with_it, without)


def sent(mesh: Any, secondary: int | None, micros: int, no_sync: bool) -> dict[str, dict[str, int]]:
    """Bytes gathered in the second step, by phase and by the ranks that take part."""
    model = acc.shard(models.wide(), mesh=mesh, secondary=secondary, units={models.Block})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, dict[str, int]] = {}
    for step in range(2):
        found = {"forward": {}, "backward": {}}
        for micro in range(micros):
            model_syncs = not no_sync or micro == micros - 1
            with Wire() as forward, acc.no_sync(model) if not model_syncs else torch.enable_grad():
                loss = checks.one_loss(model, step)
            with Wire() as backward:
                loss.backward()
            for phase, wire in (("forward", forward), ("backward", backward)):
                for call in wire.of("gather"):
                    found[phase][call.group] = found[phase].get(call.group, 0) + call.num_bytes
        optimizer.step()
        optimizer.zero_grad()
    return found


def block_bytes(num_ranks: int) -> list[int]:
    """What a full buffer of each block takes, in equal aligned parts for so many ranks."""
    found = []
    for block in models.wide().blocks:
        cuts = [cut(p.shape, RANKS, 4) for p in block.parameters()]
        share = aligned(-(-full_offsets(cuts, 4)[1] // num_ranks), 4)
        found.append(share * num_ranks * 4)
    return found


def test_the_backward_gathers_from_the_near_ranks_alone(world: Any) -> None:
    """All but the last block and the root are gathered again, over two ranks, in one message each with a tag of each rank.

    Micro-batches that only add up gather from them too: under no_sync shards stay as they were, and so do the parts.
    """
    all_ranks, near, again = str(RANKS), str(NEAR), block_bytes(NEAR)[:-1]
    runs = [world.run(RANKS, sent, *options) for options in ((None, 1, False), (NEAR, 1, False), (NEAR, 3, True))]
    for without, once, several in zip(*runs, strict=True):
        assert set(once["forward"]) == set(without["backward"]) == {all_ranks}
        assert once["forward"] == without["forward"], "the forward is what it was"
        assert set(once["backward"]) == {near}, "the backward gathers from these ranks alone"
        assert once["backward"][near] == sum(again) + len(again) * NEAR * 4
        assert several["forward"][near] >= 2 * sum(again)
        assert several["forward"][all_ranks] < 3 * once["forward"][all_ranks]


@on_world(RANKS)
def test_parts_take_what_describe_says_and_go_with_the_backward(mesh: Any) -> None:
    """The parts stand from the forward to the end of the backward, have the bytes that `describe` says, and then go."""
    model = acc.shard(models.wide(), mesh=mesh, secondary=NEAR, units={models.Block})
    first = mesh.get_rank() - mesh.get_rank() % NEAR
    assert all(group.over.ranks == [first, first + 1] for unit in units_of(model) for group in unit.groups)
    sizes = [num_bytes // NEAR for num_bytes in block_bytes(NEAR)]
    _, *described = acc.describe(model).units  # the first is the root
    assert [unit.secondary_bytes for unit in described] == sizes

    def parts() -> list[int]:
        buffers = [[group.full_buffer for group in unit.groups] for unit in units_of(model) if unit.name]
        return [sum(b.part.untyped_storage().nbytes() for b in unit if b.part is not None) for unit in buffers]

    for step in range(3):
        assert not any(parts())
        loss = checks.one_loss(model, step)
        *others, last = parts()
        assert others == sizes[:-1]
        assert last in (0, sizes[-1]), "the last block may stay full"
        loss.backward()
        model.zero_grad()
        assert not any(parts()), "they go with the end of the backward"
    with torch.no_grad():
        checks.one_loss(model)
    assert not any(parts()), "no backward follows"


@on_world(RANKS)
def test_a_write_makes_parts_stale(mesh: Any) -> None:
    """What is written between a forward and the next is seen by it."""
    model = acc.shard(models.plain(), mesh=mesh, secondary=NEAR)
    wanted = models.plain()
    first = checks.one_loss(model)  # no backward follows: the parts stay
    with acc.full_params(model, write=True):
        for p in model.parameters():
            p.data.mul_(0.5)
    with torch.no_grad():
        for p in wanted.parameters():
            p.mul_(0.5)
    tokens, targets = checks.batch(model)
    assert models.loss_of(model(tokens), targets).item() == models.loss_of(wanted(tokens), targets).item()
    with pytest.raises(acc.UsageError, match="were changed between this forward and its backward"):
        first.backward()


@on_world(RANKS)
def test_what_it_cannot_be_is_one_sentence(mesh: Any) -> None:
    for wrong in (0, 1, 3, 5, 8, True, 2.0, "2"):
        with pytest.raises(acc.UsageError, match="a divisor of 4 above 1"):
            acc.shard(models.plain(), mesh=mesh, secondary=wrong)  # type: ignore[arg-type]
    for strategy in (acc.SHARD_GRAD_OP, acc.SHARD_OPTIM, acc.NO_SHARD):
        with pytest.raises(acc.UsageError, match="keeps copies of its own; take full_shard"):
            acc.shard(models.plain(), mesh=mesh, strategy=strategy, secondary=2)


@on_world(RANKS)
def test_steps_after_an_error_are_those_of_a_fresh_model(mesh: Any) -> None:
    """A backward that raises leaves nothing behind that the next step would compute with."""
    model = acc.shard(models.plain(), mesh=mesh, secondary=NEAR)
    loss = checks.one_loss(model)
    loss.register_hook(lambda grad: (_ for _ in ()).throw(checks.PlantedError()))
    with pytest.raises(checks.PlantedError):
        loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checks.go_on(model, optimizer, range(3))
    wanted = acc.shard(models.plain(), mesh=mesh)
    checks.go_on(wanted, torch.optim.SGD(wanted.parameters(), lr=0.1), range(3))
    checks.assert_equal(checks.full(model), checks.full(wanted))
