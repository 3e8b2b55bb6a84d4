"""FullyShardedDataParallel of compat.fsdp1 trains as the unsharded model, with the options that torch's users write."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import accordion as acc
from accordion.compat.fsdp1 import (
    CPUOffload,
    MixedPrecision,
    ShardedGradScaler,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from accordion.compat.fsdp1 import FullyShardedDataParallel as FSDP  # noqa: N817
from accordion.compat.fsdp1 import wrap as wrapping
from accordion.errors import UsageError
from tests.devices import device, here
from tests.inside import units_of
from tests.support.checks import FLAT, HYBRID, assert_at_rest
from tests.support.models import Block
from tests.support.ranked import on_mesh, on_world
from tests.support.sample import sampled

BF16, FP16 = torch.bfloat16, torch.float16


class Net(nn.Module):
    """Blocks between two layers, and a buffer that training changes."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(8, 16) for _ in range(num_blocks))
        self.last = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def seeded(make: Any = Net, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return here(make())


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank)).to(device())


def unsharded_steps(num_ranks: int, clip: float | None = None) -> Any:
    """Train on the batches of all ranks; return the model, the losses of each step and rank, and the optimizer."""
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        each = [model(batch(step, rank)).pow(2).mean() for rank in range(num_ranks)]
        (sum(each) / num_ranks).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        losses.append([float(loss.detach()) for loss in each])
        optimizer.step()
    return model, losses, optimizer


def train(model: nn.Module, rank: int, steps: int = 3, clip: float | None = None, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step, rank)).pow(2).mean()
        loss.backward()
        if clip:
            model.clip_grad_norm_(clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value.cpu(), rtol=tolerance, atol=tolerance, msg=name)


def without_counters(model: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in model.state_dict().items() if name != "seen"}


SIZE = functools.partial(wrapping.size_based_auto_wrap_policy, min_num_params=200)
POLICIES: dict[str, Any] = {
    "none": None,
    "size": SIZE,
    "transformer": functools.partial(wrapping.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "always": wrapping.always_wrap_policy,
    "lambda": functools.partial(wrapping.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)),
    "module": wrapping.ModuleWrapPolicy({Block}),
    "custom": wrapping.CustomPolicy(lambda m: isinstance(m, (Block, nn.Linear))),
}


def assert_trains_as_unsharded(model: nn.Module, num_ranks: int = 2, clip: float | None = None) -> nn.Module:
    """Train; compare losses, weights and the names of parameters. Returns the model that was trained without sharding."""
    expected, losses, _ = unsharded_steps(num_ranks, clip)
    rank = dist.get_rank()
    assert train(model, rank, clip=clip) == pytest.approx([step[rank] for step in losses], abs=1e-5)
    assert_same_state(without_counters(model), without_counters(expected), 1e-5)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in expected.named_parameters()]
    return expected


@on_world(2)
def test_offloading_changes_no_bit(mesh: DeviceMesh) -> None:
    """With shards on the host results are equal bit for bit. torch's own needs an accelerator for this."""
    results = []
    for offload in (False, True):
        shared: dict[str, Any] = {"device_mesh": mesh, "cpu_offload": CPUOffload(offload_params=offload)}
        model = FSDP(seeded(), auto_wrap_policy=POLICIES["module"], **shared)
        losses = train(model, dist.get_rank(), clip=0.5)
        shard_buffers = {type(g.shard_buffer).__name__ for u in units_of(model) for g in u.groups}
        assert shard_buffers == {"HostShards" if offload else "FlatShards"}
        results.append((losses, model.state_dict()))
    assert results[0][0] == results[1][0]
    assert_same_state(results[1][1], results[0][1], 0.0)


@pytest.mark.parametrize(
    "strategy",
    sampled(
        ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"],
        {"NO_SHARD", "HYBRID_SHARD"}.__contains__,
    ),
)
@on_mesh(lambda given: ((2, 2), HYBRID) if "HYBRID" in given["strategy"] else ((2,), FLAT))
def test_strategies(mesh: DeviceMesh, strategy: str) -> None:
    shared: dict[str, Any] = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy[strategy]}
    model = FSDP(seeded(), auto_wrap_policy=POLICIES["transformer"], **shared)
    assert_trains_as_unsharded(model, mesh.size(), clip=0.5)
    assert [n for n, _ in model.named_buffers()] == ["seen"]
    assert len(FSDP.fsdp_modules(model)) == 3
    assert_at_rest(model)


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.dtypes: list[torch.dtype] = []
        self.norm.register_forward_pre_hook(lambda m, args: self.dtypes.append(args[0].dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        self.dtypes.append(x.dtype)
        return self.last(x)


@on_world(2)
def test_batch_norms_stay_in_float32(mesh: DeviceMesh) -> None:
    net = seeded(WithNorm)
    mixed = MixedPrecision(param_dtype=BF16, cast_forward_inputs=True)
    model = FSDP(net, auto_wrap_policy=wrapping.ModuleWrapPolicy({nn.Linear}), device_mesh=mesh, mixed_precision=mixed)
    model(batch(0, 0)).sum().backward()
    assert net.dtypes == [BF16, BF16], "a hook after this test's casts the norm's input, and another its output back"
    assert isinstance(net.norm, FSDP)
    assert net.norm.running_mean.dtype is torch.float32


# -- wrapping by hand, and what the constructor takes


class Annotated(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = wrapping.wrap(self.first)
        self.blocks = nn.ModuleList(wrapping.wrap(block) for block in self.blocks)


@on_world(2)
def test_wrappers_in_wrappers(mesh: DeviceMesh) -> None:
    assert not isinstance(Annotated().first, FSDP)
    with wrapping.enable_wrap(wrapper_cls=FSDP, device_mesh=mesh):
        torch.manual_seed(0)
        model = wrapping.wrap(Annotated())
    assert [type(m).__name__ for m in (model, model.first, model.blocks[0])] == ["FullyShardedDataParallel"] * 3
    assert not model.first.check_is_root()
    assert_trains_as_unsharded(model)
    units = [f"_fsdp_wrapped_module.{name}" for name in ("first", "blocks.0", "blocks.1")]
    assert [u.name for u in acc.describe(model).units][1:] == units
    with pytest.raises(UsageError, match="call it on the outermost"):
        model.first.clip_grad_norm_(1.0)
    with pytest.raises(UsageError, match="call it on the outermost"), model.first.no_sync():
        pass


@on_world(2)
def test_full_parameters_are_summoned(mesh: DeviceMesh) -> None:
    rank, reference = dist.get_rank(), seeded()
    model = FSDP(seeded(), auto_wrap_policy=SIZE, device_mesh=mesh)
    with FSDP.summon_full_params(model, writeback=False):
        assert_same_state(dict(model.named_parameters()), dict(reference.named_parameters()), 0.0)
        model.module.last.weight.data.zero_()
    assert model.state_dict()["last.weight"].any()
    with FSDP.summon_full_params(model), torch.no_grad():
        model.last.weight.fill_(2.0)
    assert (model.state_dict()["last.weight"] == 2).all()
    model.apply(lambda m: nn.init.constant_(m.weight, 3.0) if isinstance(m, nn.Linear) else None)
    assert (model.state_dict()["first.weight"] == 3).all()
    model(batch(0, rank)).pow(2).mean().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        model.last.bias.grad.fill_(5.0)
    assert (model.last.bias.grad.full_tensor() == 5).all()
    assert_at_rest(model)


@on_world(2)
def test_no_sync(mesh: DeviceMesh) -> None:
    rank, plain = dist.get_rank(), seeded()
    model = FSDP(seeded(), auto_wrap_policy=SIZE, device_mesh=mesh)
    with model.no_sync():
        model(batch(0, rank)).pow(2).mean().backward()
    model(batch(1, rank)).pow(2).mean().backward()
    sum(plain(batch(step, r)).pow(2).mean() / 2 for step in range(2) for r in range(2)).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6, msg=name)


@on_world(2)
def test_constructor_arguments(mesh: DeviceMesh) -> None:
    rank = dist.get_rank()
    first = seeded()
    unlike = seeded(seed=rank)
    model = FSDP(unlike, sync_module_states=True, auto_wrap_policy=SIZE, process_group=mesh.get_group())
    assert_same_state(model.state_dict(), first.state_dict(), 0.0)
    unlike = FSDP(seeded(seed=rank), auto_wrap_policy=SIZE, device_mesh=mesh)
    assert_same_state(unlike.state_dict(), first.state_dict(), 0.0)
    with pytest.raises(acc.DivergenceError, match="different models"):
        FSDP(Net(2 + rank), auto_wrap_policy=SIZE, device_mesh=mesh)
    with torch.device("meta"):
        empty = Net()
    calls = []

    def init(module: nn.Module) -> None:
        calls.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters() if hasattr(module, "reset_parameters") else module.seen.zero_()

    torch.manual_seed(0)
    FSDP(empty, param_init_fn=init, auto_wrap_policy=POLICIES["module"], device_mesh=mesh).state_dict()
    assert sorted(set(calls)) == ["LayerNorm", "Linear", "Net"]
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    torch.manual_seed(0)
    drawn = FSDP(empty, device_mesh=mesh).state_dict()
    torch.manual_seed(0)
    if device().type == "cpu":  # another device draws other numbers
        assert_same_state(drawn, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).state_dict(), 0.0)


@on_world(2)
def test_ignored_states(mesh: DeviceMesh) -> None:
    rank = dist.get_rank()
    for how in ({"ignored_modules": ["first"]}, {"ignored_states": ["first"]}, {"ignored_states": ["weight", "bias"]}):
        net, plain = seeded(), seeded()
        names = next(iter(how.values()))
        chosen = [net.first if n == "first" else getattr(net.first, n) for n in names]
        model = FSDP(net, auto_wrap_policy=POLICIES["module"], device_mesh=mesh, **{next(iter(how)): chosen})
        assert not isinstance(net.first.weight, DTensor)
        assert isinstance(net.last.weight, DTensor)
        assert list(model.state_dict()) == list(plain.state_dict())
        model(batch(0, 0)).pow(2).mean().backward()  # one batch on all ranks: gradients of ignored ones are not reduced
        plain(batch(0, 0)).pow(2).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(model.clip_grad_norm_(0.1), norm, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(net.first.weight.grad, plain.first.weight.grad, rtol=1e-5, atol=1e-6)
        # foreach=True does not mix DTensors and plain tensors.
        train(model, rank, optimizer=torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))


@pytest.mark.parametrize(
    "how", sampled(["inside before", "around", "applied after"], lambda how: how == "applied after")
)
@on_world(2)
def test_torchs_activation_checkpointing(mesh: DeviceMesh, how: str) -> None:
    net = seeded()
    if how == "inside before":
        net.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in net.blocks)
        model = FSDP(net, auto_wrap_policy=wrapping.ModuleWrapPolicy({CheckpointWrapper}), device_mesh=mesh)
    elif how == "around":
        net.blocks = nn.ModuleList(checkpoint_wrapper(FSDP(block, device_mesh=mesh)) for block in net.blocks)
        model = FSDP(net, device_mesh=mesh)
    else:
        model = FSDP(net, auto_wrap_policy=POLICIES["module"], device_mesh=mesh)
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        assert isinstance(net.blocks[0]._fsdp_wrapped_module, CheckpointWrapper)
        assert isinstance(net.blocks[0].module, Block)
    expected = assert_trains_as_unsharded(model)
    model.load_state_dict(expected.state_dict())
    assert_same_state(model.state_dict(), expected.state_dict(), 0.0)


@on_world(2)
def test_sharded_grad_scaler(mesh: DeviceMesh) -> None:
    rank = dist.get_rank()
    model = FSDP(
        seeded(),
        auto_wrap_policy=SIZE,
        device_mesh=mesh,
        mixed_precision=MixedPrecision(param_dtype=FP16, reduce_dtype=FP16),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device=device().type, init_scale=64.0, process_group=mesh.get_group())
    before = copy.deepcopy(model.state_dict())
    for step, factor in enumerate((1.0, 1e30 if rank == 0 else 1.0)):  # the second overflows on one rank alone
        scaler.scale(model(batch(step, rank)).float().pow(2).mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = copy.deepcopy(model.state_dict())
        assert torch.equal(after["last.weight"], before["last.weight"]) == (step == 1)
        before = after
    assert scaler.get_scale() == 32.0


@on_world(2)
def test_a_model_in_bfloat16_stays_so(mesh: DeviceMesh) -> None:
    model = FSDP(seeded().to(BF16), auto_wrap_policy=SIZE, device_mesh=mesh)
    assert {p.dtype for p in model.parameters()} == {BF16}
    model(batch(0, 0).to(BF16)).pow(2).mean().backward()
    assert {p.grad.dtype for p in model.parameters()} == {BF16}


# -- refusals


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


@on_world(2)
def test_bad_input_is_named_on_every_rank(mesh: DeviceMesh) -> None:
    net, kinds = seeded(), ShardingStrategy
    by_hand = {"device_mesh": mesh}

    def wrapped(**arguments: Any) -> Any:
        return FSDP(seeded(), **{**by_hand, **arguments})

    cuda = DeviceMesh("cuda", [0, 1], _init_backend=False)
    cases: dict[str, Callable[[], Any]] = {
        "not str": lambda: FSDP("net"),  # type: ignore[arg-type]
        "has no forward": lambda: FSDP(net.blocks),
        "it takes ShardingStrategy": lambda: FSDP(net, sharding_strategy="FULL_SHARD"),  # type: ignore[arg-type]
        "it takes CPUOffload": lambda: FSDP(net, cpu_offload=True),  # type: ignore[arg-type]
        "keep_low_precision_grads": lambda: FSDP(net, mixed_precision=MixedPrecision(keep_low_precision_grads=True)),
        "pass one of them": lambda: FSDP(net, process_group=mesh.get_group(), device_mesh=mesh),
        "contains a str": lambda: FSDP(net, ignored_states=["first"]),  # type: ignore[list-item]
        "pass everything in ignored_states": lambda: FSDP(net, ignored_states=[net.first], ignored_modules=[net.first]),
        "auto_wrap_policy is 3": lambda: FSDP(net, auto_wrap_policy=3),
        "has no parameters": lambda: FSDP(nn.ReLU(), **by_hand).state_dict(),
        "one of 'cuda' devices": lambda: wrapped(auto_wrap_policy=SIZE, device_mesh=cuda),
        "and this has 1, named": lambda: FSDP(net, sharding_strategy=kinds.HYBRID_SHARD, **by_hand).state_dict(),
        "takes two": lambda: FSDP(
            net, sharding_strategy=kinds.HYBRID_SHARD, process_group=mesh.get_group()
        ).state_dict(),
        "pass a policy, or wrap by hand": lambda: FSDP(
            nn.Sequential(FSDP(nn.Linear(2, 2)), nn.Linear(2, 2)), auto_wrap_policy=SIZE
        ),
        "has an engine already": lambda: FSDP(nn.Sequential(wrapped(auto_wrap_policy=SIZE))),
        "pass the same to all": lambda: FSDP(
            nn.Sequential(FSDP(nn.Linear(2, 2), sharding_strategy=kinds.NO_SHARD)), **by_hand
        ).state_dict(),
        "LOCAL_STATE_DICT is not supported": lambda: FSDP.set_state_dict_type(
            wrapped(), StateDictType.LOCAL_STATE_DICT
        ),
        "takes a FullStateDictConfig": lambda: FSDP.set_state_dict_type(
            wrapped(), StateDictType.FULL_STATE_DICT, ShardedStateDictConfig()
        ),
        "contains none": lambda: FSDP.get_state_dict_type(net),
        "writeback=False": lambda: FSDP.summon_full_params(wrapped(), rank0_only=True).__enter__(),
        "no flat gradient": lambda: wrapped().register_comm_hook(None, None),
        "qualified names": lambda: FSDP.rekey_optim_state_dict({}, None, None),
        "empty on this rank": lambda: FSDP.optim_state_dict_to_load(plain := wrapped(), sgd(plain), {}),
        "that is not in the model": lambda: FSDP.optim_state_dict(wrapped(), sgd(net)),
    }
    for words, case in cases.items():
        with pytest.raises(UsageError, match=words) as error:
            case()
        assert "\n" not in str(error.value)
