"""How peers failed their users: a test for each complaint, named by its number and words in the collection of them.

Each is short; what it is about has longer tests of its own elsewhere. Not here yet, for what they need is not: 7 (quantised
weights that are subclasses), 9, 10 and 19 (offload), 18 (NVMe), 22's planned arena, 25 with offload; torn checkpoints (24)
are in test_checkpoint.py, and the many device streams of 9 to 14 need devices: tests/gpu.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import accordion as acc
from accordion.config import STRATEGIES
from accordion.engine.engine import Engine
from accordion.engine.unit import Unit
from tests.devices import device, here
from tests.engine.test_grid import train
from tests.engine.test_precision import saved_copies
from tests.engine.test_streams import FAULTS, step
from tests.inside import engine_in, units_of
from tests.support import models, reference
from tests.support.checks import assert_at_rest, assert_close, batch, logged, mean_grads, mesh_of, one_loss
from tests.support.meters import Wire
from tests.support.models import Block
from tests.support.reference import Scenario, grads_of, local_of, params_of
from tests.weights.test_pretrained import Anonymous, write

BF16 = torch.bfloat16
ONE_AXIS = [strategy for strategy in STRATEGIES.values() if not strategy.hybrid]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=lr))


# -- tied weights, loading


def tied_step(mesh) -> None:
    with logged() as said:
        model = acc.shard(models.tied(), mesh=mesh, units={Block, nn.Embedding, nn.Linear})
    assert model.head.weight is model.embed.weight
    assert dist.get_rank() or any("embed.weight, head.weight are one" in text for text in said), said
    plain = models.tied()
    for m in (plain, model):
        one_loss(m).backward()
    assert_close(grads_of(model), mean_grads(mesh, plain), 2e-6)


def test_01_tied_weights_crash(world):
    world.run(2, tied_step)


def tied_uneven(mesh) -> None:
    """The head's gradient reaches every row, so every row must move, also those of the last rank."""
    model = acc.shard(models.tied(), mesh=mesh)
    assert model.embed.num_embeddings % mesh.size()
    before = params_of(model)["embed.weight"]
    one_loss(model).backward()
    sgd(model).step()
    after = params_of(model)["embed.weight"]
    assert (before != after).any(1).all()


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_02_silent_non_update_of_tied_and_uneven_shard(world, num_ranks):
    world.run(num_ranks, tied_uneven)


class TiedStack(nn.Module):
    ROWS, COLUMNS = 2048, 1024  # 8 MiB a tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.ROWS, self.COLUMNS)
        self.layers = nn.ModuleList(nn.Linear(self.COLUMNS, self.ROWS, bias=False) for _ in range(6))
        self.head = nn.Linear(self.COLUMNS, self.ROWS, bias=False)
        self.head.weight = self.embed.weight


def load_tied(mesh, folder: str) -> tuple[int, int, int]:
    """Bytes that a rank took at most to shard and load, on the host and on a device, and its shard.

    A simulated device's memory is the host's, and counts as the device's.
    """
    memory, on_device = torch.accelerator.memory, device().type != "cpu"
    torch.zeros(1, device=device()).add_(1)  # what the first kernel takes
    if on_device:
        memory.reset_peak_memory_stats()
        before = memory.memory_allocated(), memory.memory_reserved()
    watch = Anonymous()
    watch.start()
    with torch.device("meta"):
        model = TiedStack()
    model = acc.shard(model, mesh)
    acc.load_pretrained(model, folder)
    taken, device_bytes = watch.finish(), 0
    if on_device:
        taken -= memory.memory_reserved() - before[1]
        device_bytes = memory.max_memory_allocated() - before[0]
    assert model.head.weight is model.embed.weight
    rows = TiedStack.ROWS // mesh.size()
    for value, p in enumerate(model.parameters()):
        assert (local_of(p)[:, 0] == value).all()
        assert torch.equal(
            local_of(p)[:, 1], mesh.get_local_rank() * rows + torch.arange(rows, device=device()).float()
        )
    return taken, device_bytes, sum(local_of(p).nbytes for p in model.parameters())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is counted where Linux tells it")
def test_03_04_05_loading_takes_the_full_model_on_every_rank(world, tmp_path):
    """Tied weights, no efficient loading, twice the memory: a rank takes its shard, and less than one tensor beside it.

    On a device the places of full parameters are laid out as well, those of the largest unit at once as a forward has them;
    here that is the whole model. Memory that nobody writes to is none on a host.
    """
    tensors = {}
    for i, name in enumerate(["embed.weight", *(f"layers.{i}.weight" for i in range(6))]):
        tensors[name] = torch.zeros(TiedStack.ROWS, TiedStack.COLUMNS)
        tensors[name][:, 0], tensors[name][:, 1] = i, torch.arange(TiedStack.ROWS)
    folder = write(tmp_path, tensors)
    whole, one = sum(t.nbytes for t in tensors.values()), tensors["embed.weight"].nbytes
    for taken, on_device, shard in world.run(4, load_tied, folder):
        assert shard == whole // 4
        assert taken <= shard + one
        assert on_device <= shard + whole + 4096


# -- kinds of parameters


class Adapted(nn.Module):
    """A frozen two-byte weight and a trained float32 adapter of rank 2."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).to(BF16).requires_grad_(False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x.to(BF16)).float() + self.b(self.a(x))


def lora(mesh) -> None:
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = here(nn.Sequential(Adapted(), Adapted()))
        if sharded:
            model = acc.shard(model, mesh=mesh, units={Adapted})
        model(torch.linspace(-1, 1, 32, device=device()).view(2, 16)).square().sum().backward()
        found.append(grads_of(model) if sharded else mean_grads(mesh, model))
    assert found[1]["0.base.weight"] is None
    assert model[0].base.weight.dtype == BF16
    assert_close(found[1], found[0], 1e-6)


def test_06_lora_and_bf16_base_fails(world):
    world.run(3, lora)


def reads_outside(mesh) -> None:
    """A fused kernel that takes `.weight` outside of the unit gets no shard in silence."""
    plain, model = models.plain(), acc.shard(models.plain(), mesh=mesh)
    x = torch.ones(2, 32, device=device())
    weight = model.blocks[0].up.weight
    assert isinstance(weight, DTensor)
    for kernel in (lambda: F.linear(x, weight), lambda: torch.mm(x, weight.t())):
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            kernel()
    with acc.full_params(model):
        assert torch.equal(F.linear(x, model.blocks[0].up.weight), F.linear(x, plain.blocks[0].up.weight))


def test_08_fused_kernels_read_shard_views(world):
    world.run(2, reads_outside)


# -- streams and lifetimes


def drained(mesh) -> None:
    """The last unit is left out, and every reduce has been waited for when the backward returns."""
    model = acc.shard(models.plain(), mesh=mesh)
    tokens, targets = batch(model)
    for skip in ((), (2,), (0, 2)):
        models.loss_of(model(tokens, skip=skip), targets).backward()
        assert not engine_in(model).reduces_under_way
        assert_at_rest(model)
        assert all(not unit.is_launched for unit in units_of(model))


def test_11_reduces_are_drained_by_the_last_group_only(world):
    world.run(2, drained)


def chunked(mesh) -> None:
    plain = models.plain()
    model = acc.shard(models.plain(), mesh=mesh, debug="streams")
    tokens, targets = batch(plain)
    for m in (plain, model):
        logits = m(tokens)
        for part, wanted in zip(logits.chunk(2, 1), targets.chunk(2, 1), strict=True):
            models.loss_of(part, wanted).backward(retain_graph=True)
    assert_close(grads_of(model), mean_grads(mesh, plain), 2e-6)


def test_12_chunked_loss_race(world):
    world.run(2, chunked)


@pytest.mark.parametrize(
    "name",
    [
        "13_use_after_free",
        pytest.param("14_overlap_nan", marks=pytest.mark.cpu("a device that has asserted runs nothing")),
    ],
)
def test_13_14_reads_after_the_release_or_before_the_wait(world, name):
    """Silent in peers; here the debug mode shows them, and finds none."""
    fault = {"13_use_after_free": "released_too_early", "14_overlap_nan": "gather_without_wait"}[name]
    assert fault in FAULTS
    for _, good in world.run(2, step, acc.FULL_SHARD, ""):
        assert good
    for _, good in world.run(2, step, acc.FULL_SHARD, fault):
        assert not good


# -- equal results whatever is chosen


def losses(mesh, strategy: acc.Strategy, options: dict[str, Any]) -> list[list[float]]:
    return train(mesh, Scenario(steps=4), strategy, **options).losses


def test_15_stages_and_bucket_sizes_change_the_loss(world):
    options = [
        {},
        {"units": {Block, nn.Linear}},
        {"units": acc.min_params(1000)},
        {"prefetch": acc.Prefetch(budget_bytes=1 << 30)},
    ]
    runs = [(strategy, {}) for strategy in ONE_AXIS] + [(acc.FULL_SHARD, option) for option in options]
    first = world.run(2, losses, *runs[0])
    for strategy, option in runs[1:]:
        assert world.run(2, losses, strategy, option) == first, (strategy.name, option)


def surprised(mesh) -> list[set[str]]:
    """The units of each forward that were not gathered ahead."""
    model = acc.shard(models.seeded(num_blocks=5), mesh=mesh)
    plain, late = Engine.acquire, set()

    def acquire(engine: Engine, unit: Unit) -> int:
        if unit.name and not unit.is_launched:
            late.add(unit.name)
        return plain(engine, unit)

    found = []
    for skip in ((), (), (1,), (), ()):
        tokens, targets = batch(model)
        late.clear()
        with mock.patch.object(Engine, "acquire", acquire):
            out = model(tokens, skip=skip)
        found.append(set(late))
        models.loss_of(out, targets).backward()
    return found


def test_16_trace_invalidation_turns_prefetch_off(world):
    """A unit left out, and one that comes back, is one wrong guess each; the rest of that forward is gathered ahead."""
    for first, second, left_out, back, last in world.run(2, surprised):
        assert first == {f"blocks.{i}" for i in range(5)}, "nothing is known before the first"
        assert second == last == set()
        assert left_out == {"blocks.2"}
        assert back == {"blocks.1"}


def saves(mesh, path: str) -> dict[str, Tensor]:
    model = acc.shard(models.uneven(), mesh=mesh)
    optimizer = acc.wrap_optimizer(reference.adamw(model.parameters()))
    one_loss(model).backward()
    optimizer.step()
    acc.save(path, model, optimizer)
    return resumed_step(model, optimizer)


def resumes(mesh, path: str) -> dict[str, Tensor]:
    model = acc.shard(models.seeded(1, vocab=19, width=10, hidden=7, scalar=True), mesh=mesh)
    optimizer = acc.wrap_optimizer(reference.adamw(model.parameters()))
    acc.load(path, model, optimizer)
    return resumed_step(model, optimizer)


def resumed_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A step on the same gradients, whatever the number of ranks."""
    optimizer.zero_grad()
    tokens, targets = models.batch(7, 0, 0, vocab=19)
    models.loss_of(model(tokens), targets).backward()
    optimizer.step()
    return params_of(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_17_cannot_resume_at_another_world_size(world, tmp_path, num_ranks):
    wanted = world.run(3, saves, str(tmp_path / "step-1"))[0]
    found = world.run(num_ranks, resumes, str(tmp_path / "step-1"))[0]
    assert_close(found, wanted, 1e-6)


# -- clipping, memory


def clip(mesh, strategy: acc.Strategy) -> tuple[float, int]:
    """The norm, and how many collectives it took."""
    model = acc.shard(models.uneven(), mesh=mesh, strategy=strategy)
    one_loss(model).backward()
    with Wire() as wire:
        norm = acc.clip_grad_norm_(model, 1e-3)
    assert type(norm) is Tensor
    assert norm.dim() == 0
    assert all(call.kind == "all_reduce" and call.num_bytes <= 8 for call in wire.calls), "one number at a time"
    squares = sum(float(grad.square().sum()) for grad in grads_of(model).values())
    assert squares**0.5 == pytest.approx(1e-3, rel=1e-4)
    return norm.item(), len(wire.calls)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_20_clip_grad_norm_gathers_or_is_wrong(world, strategy):
    policy = STRATEGIES[strategy]
    found = world.run_mesh(*mesh_of(policy, 3), clip, policy)
    assert len({norm for norm, _ in found}) == 1
    num_axes_cut = {"no_shard": 0, "hybrid_shard_optim": 2}.get(strategy, 1)
    assert {calls for _, calls in found} == {num_axes_cut}


def most_open(mesh, budget_bytes: int | None) -> int:
    """How many blocks stood gathered, or were being, at any time of some steps."""
    model = acc.shard(models.seeded(num_blocks=6), mesh=mesh, prefetch=acc.Prefetch(budget_bytes=budget_bytes))
    plain, most = Unit.launch, [0]

    def launch(unit: Unit) -> None:
        plain(unit)
        is_open = [any(g.full_buffer._storage.nbytes() for g in u.groups) for u in units_of(model) if u.name]
        most[0] = max(most[0], sum(is_open))

    with mock.patch.object(Unit, "launch", launch):
        for i in range(3):
            one_loss(model, i).backward()
    return most[0]


def block_bytes(mesh) -> int:
    return acc.describe(acc.shard(models.plain(), mesh=mesh)).units[1].full_bytes


def test_21_22_memory_of_gathered_units_is_not_bounded(world):
    size = world.run(2, block_bytes)[0]
    for budget, most in ((0, 1), (None, 2), (size, 2), (2 * size, 3)):
        assert set(world.run(2, most_open, budget)) == {most}, budget


def precision_contract(mesh) -> None:
    model = models.plain().to(BF16)
    model.embed.requires_grad_(False)
    with logged() as said:
        model = acc.shard(model, mesh=mesh, precision=acc.Precision(params=BF16))
    assert dist.get_rank() or any("params=torch.bfloat16" in text and "master=torch.float32" in text for text in said)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes.pop("embed.weight") == BF16, "what is not trained needs no master"
    assert set(dtypes.values()) == {torch.float32}
    before = params_of(model)
    one_loss(model).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    sgd(model, lr=1e-3).step()
    after = params_of(model)
    assert [name for name, p in after.items() if not torch.equal(p, before[name])] == list(dtypes)
    ones = after["norm.weight"]
    assert torch.equal(ones.to(BF16), before["norm.weight"].to(BF16)), "the step is below the resolution of bfloat16"


def test_23_master_weights_silently_wrong(world):
    world.run(2, precision_contract)


# -- inference, autocast, optimizers


def generate(mesh) -> None:
    """Ranks make sequences of different lengths from full weights, and say nothing to each other."""
    plain, model = models.plain(), acc.shard(models.plain(), mesh=mesh)
    found = []
    for m in (plain, model):
        tokens = torch.tensor([[1 + mesh.get_local_rank()]], device=device())
        with torch.no_grad(), acc.full_params(model), Wire() as wire:
            for _ in range(2 + 3 * mesh.get_local_rank()):
                tokens = torch.cat([tokens, m(tokens)[:, -1:].argmax(-1)], 1)
        assert not wire.calls
        found.append(tokens)
    assert torch.equal(*found)
    one_loss(model).backward()
    assert_at_rest(model)


def test_25_generate_is_slow_or_hangs(world):
    world.run(3, generate)


def test_26_autocast_keeps_full_copies_of_weights(world):
    for copies, _ in world.run(2, saved_copies, acc.Precision(params=BF16)):
        assert copies == 0


def optimizer_before(mesh) -> None:
    model = models.plain()
    optimizer = reference.adamw(model.parameters())
    acc.shard(model, mesh=mesh)
    one_loss(model).backward()
    with pytest.raises(acc.UsageError, match=r"made before shard"):
        optimizer.step()


def test_27_an_optimizer_built_before_sharding(world):
    world.run(2, optimizer_before)


# -- also notable


def few_rows(mesh) -> bool:
    """Whether this rank has no row of some parameter, in a step that is right anyway."""
    plain, model = models.uneven(), acc.shard(models.uneven(), mesh=mesh)
    for m in (plain, model):
        one_loss(m).backward()
    assert_close(grads_of(model), mean_grads(mesh, plain), 2e-6)
    for optimizer in (acc.wrap_optimizer(reference.adamw(model.parameters())), reference.adamw(model.parameters())):
        optimizer.step()
    acc.clip_grad_norm_(model, 1.0)
    return any(local_of(p).numel() == 0 for p in model.parameters())


def test_notable_dim_0_too_small_leaves_ranks_empty(world):
    assert any(world.run(4, few_rows)), "no rank lacked a row"


def large_and_few(mesh) -> int:
    """Bytes of a rank, of a parameter whose rows are fewer than ranks but large: another dim is cut."""
    model = nn.Module()
    model.experts = nn.Parameter(torch.zeros(2, 300, 400, device=device()))
    return local_of(acc.shard(model, mesh=mesh).experts).untyped_storage().nbytes()


def test_notable_few_large_rows_pad_little(world):
    assert max(world.run(4, large_and_few)) <= 1.02 * 2 * 300 * 400 * 4 / 4


def inference(mesh, strategy: acc.Strategy) -> None:
    model = acc.shard(models.plain(), mesh=mesh, strategy=strategy)
    with torch.no_grad():
        for _ in range(2):
            model(batch(model)[0])
    assert not [unit.name for unit in units_of(model) if unit.is_launched]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard"])
def test_notable_full_parameters_stay_after_inference(world, strategy):
    world.run_mesh(*mesh_of(STRATEGIES[strategy]), inference, STRATEGIES[strategy])


def flattened(mesh) -> None:
    model = acc.shard(here(nn.Linear(5, 3)), mesh=mesh)
    model(torch.ones(2, 5, device=device())).sum().backward()
    weight = model.weight
    shapes = (
        Tensor.flatten,
        Tensor.ravel,
        lambda t: t.view(-1),
        lambda t: t.reshape(15),
        lambda t: t.detach().view(-1),
    )
    for change in (*shapes, flat_gradient, lambda t: parameters_to_vector(model.parameters())):
        with pytest.raises(
            acc.UsageError, match=r"sharded tensor of shape \(3, 5\).*do not divide.*full_params\(model\)"
        ):
            change(weight)
    with pytest.raises(RuntimeError, match="invalid for input of size 15"):
        weight.view(7)
    before = acc.full_state_dict(model, rank0_only=False)
    with acc.full_params(model, write=True):
        vector_to_parameters(parameters_to_vector(model.parameters()) / 2, model.parameters())
    assert_close(acc.full_state_dict(model, rank0_only=False), {name: value / 2 for name, value in before.items()})


def flat_gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad.flatten()


def test_flattening_rows_that_do_not_divide_says_what_to_do(world):
    world.run(2, flattened)


def on_cpu(mesh) -> list[float]:
    model = acc.shard(models.plain(), mesh=mesh)
    assert {local_of(p).device.type for p in model.parameters()} == {"cpu"}
    optimizer, found = sgd(model, lr=1.0), []
    for _ in range(4):
        loss = one_loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.cpu("it asks whether the parameters lie there")
def test_notable_fsdp_on_cpu(world):
    for found in world.run(4, on_cpu):
        assert found == sorted(found, reverse=True)
        assert found[-1] < found[0] - 0.1
