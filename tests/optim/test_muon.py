"""Muon on sharded matrices equals the unsharded optimizer, bit for bit, and its work is divided over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import accordion as acc
from accordion._torch import local_of
from accordion.config import STRATEGIES
from accordion.engine.communicator import Communicator
from accordion.optimizers.whole_matrices import MuonStep, from_owners, to_owners
from tests import devices
from tests.support.checks import mesh_of, step_all
from tests.support.meters import Wire
from tests.support.offloads import HOST
from tests.support.ranked import on_world
from tests.support.reference import assert_close, params_of
from tests.weights.test_stream import num_sent, recorded

SHAPES = [(12, 8), (8, 24), (5, 7), (16, 16), (1, 6), (3, 40), (9, 9)]  # not all divide by 2, 3 or 4


class Matrices(nn.Module):
    """A weight of each shape, and a bias; gradients are set by the tests."""

    def __init__(self, shapes: Sequence[tuple[int, int]] = SHAPES) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(columns, rows, bias=rows == 16) for rows, columns in shapes)
        self.to(devices.device())

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for layer in self.layers:
            total = total + layer(x[:, : layer.in_features]).square().sum(1)
        return total.mean()


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return (the matrices, the other parameters)."""
    params = list(model.parameters())
    return [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]


def muon(model: nn.Module, **options: Any) -> torch.optim.Muon:
    tall, rest = split(model)[0][:2], split(model)[0][2:]
    groups = [{"params": tall, "lr": 0.3, "adjust_lr_fn": "match_rms_adamw"}, {"params": rest, "ns_steps": 3}]
    return torch.optim.Muon(groups, **{"lr": 0.02, "weight_decay": 0.1, **options})


def inputs(step: int) -> Tensor:
    """Return the batch of a step, the same on every rank, so that the mean of gradients does not round."""
    return torch.randn(4, 40, generator=torch.Generator().manual_seed(step)).to(devices.device())


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: Iterable[int]) -> None:
    for step in steps:
        model(inputs(step)).backward()
        step_all(optimizers)


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no nesterov": {"nesterov": False, "lr": torch.tensor(0.05)},
}


def pair(mesh: Any, strategy: acc.Strategy, form: str) -> tuple[nn.Module, nn.Module, list[Any], list[Any]]:
    """Return (unsharded model, sharded model, their optimizers: [Muon, AdamW] of each, for the form "whole" [Shampoo])."""
    expected, model = Matrices(), acc.shard(Matrices(), mesh=mesh, strategy=strategy)
    if form == "whole":
        theirs, ours = [Shampoo(expected.parameters())], [Shampoo(model.parameters())]
    else:
        theirs, ours = ([muon(m, **FORMS[form]), torch.optim.AdamW(split(m)[1])] for m in (expected, model))
    for optimizer in ours:
        acc.wrap_optimizer(optimizer, whole_matrices=form == "whole")
    return expected, model, theirs, ours


@pytest.mark.parametrize(("num_ranks", "form"), [(2, "no nesterov"), (3, "plain"), (4, "plain")])
def test_it_equals_the_unsharded_optimizer(world, num_ranks: int, form: str) -> None:
    for strategy in STRATEGIES.values():
        shape, names = mesh_of(strategy, num_ranks)
        if strategy.hybrid == (num_ranks == 4):
            world.run_mesh(shape, names, _equals, strategy, form)


def _equals(mesh: Any, strategy: acc.Strategy, form: str) -> None:
    expected, model, theirs, ours = pair(mesh, strategy, form)
    with mock.patch("accordion.optimizers.whole_matrices.BUCKET_NUMEL", 200):
        train(expected, theirs, range(4))
        train(model, ours, range(4))
    assert_close(params_of(model), dict(expected.named_parameters()), 0.0)


@pytest.mark.parametrize(
    ("form", "strategy", "num_ranks", "background"),
    [
        ("plain", acc.HYBRID_SHARD_OPTIM, 1, False),
        ("plain", acc.HYBRID_SHARD_OPTIM, 3, True),
        ("whole", acc.FULL_SHARD, 4, False),  # the mean of four equal gradients does not round
        ("whole", acc.HYBRID_SHARD_OPTIM, 4, False),
    ],
)
def test_it_resumes_on_another_number_of_ranks(
    world, tmp_path: Path, form: str, strategy: acc.Strategy, num_ranks: int, background: bool
) -> None:
    world.run_mesh(*mesh_of(strategy), _save, form, strategy, tmp_path / "ckpt", background)
    world.run(num_ranks, _resume, form, tmp_path / "ckpt")


def _save(mesh: Any, form: str, strategy: acc.Strategy, path: Path, background: bool) -> None:
    expected, model, theirs, ours = pair(mesh, strategy, form)
    train(expected, theirs, range(2))
    train(model, ours, range(2))
    assert_close(params_of(model), dict(expected.named_parameters()), 0.0)
    if form == "whole":
        owned = [p for p in ours[0].state if ours[0].state[p]]
        assert 0 < len(owned) < len(list(model.parameters()))
        sums = [tensor for state in ours[0].state_dict()["state"].values() for tensor in state["sums"]]
        rows = sum(local_of(tensor).numel() for tensor in sums if isinstance(tensor, DTensor))
        assert 0 < rows < 0.75 * sum(tensor.numel() for tensor in sums), "no rank gets all states, also of other shapes"
    acc.save(path, model, ours, background=background).wait()


def _resume(mesh: Any, form: str, path: Path) -> None:
    expected, model, theirs, ours = pair(mesh, acc.SHARD_OPTIM if form == "whole" else acc.FULL_SHARD, form)
    train(expected, theirs, range(4))
    if form == "plain":
        with pytest.raises(acc.CheckpointError, match=r"saved with Muon \+ AdamW and the optimizer is AdamW \+ Muon"):
            acc.load(path, model, ours[::-1])
        with pytest.raises(acc.CheckpointError, match=r"saved with Muon \+ AdamW and the optimizer is Muon"):
            acc.load(path, model, ours[0])
    acc.load(path, model, ours)
    train(model, ours, range(2, 4))
    assert_close(params_of(model), dict(expected.named_parameters()), 0.0)
    if form == "whole":
        assert ours[0].param_groups[0]["steps"] == 4
        ours[0].state[next(iter(model.parameters()))]["object"] = mesh
        with pytest.raises(acc.UsageError, match="a value other than finite numbers, texts and tensors"):
            ours[0].state_dict()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_matrix_is_orthogonalised_once_and_its_rows_travel_twice(world, num_ranks: int) -> None:
    """All ranks do the same work, and send 2 (n - 1) / n of the elements of their rows, in bf16.

    Another optimizer of whole matrices also needs the parameter, so it sends 3 (n - 1) / n, in float32.
    """
    numel, shapes = 6 * 12 * 8, [(12, 8), (8, 12)] * 3
    if num_ranks == 3:
        shapes = [(12, 8)] * 6
    sent = (num_ranks - 1) / num_ranks * numel / num_ranks  # elements, one way
    for products, num_bytes, exchanges in world.run(num_ranks, _counted, shapes, torch.optim.Muon, False):
        assert products == 6 // num_ranks * 5 * 2  # five iterations of two products that add
        assert num_bytes == 2 * sent * 2
        assert exchanges == 2  # six matrices travel together, one way and back
    for _, num_bytes, _ in world.run(num_ranks, _counted, shapes, Shampoo, True):
        assert num_bytes == 3 * sent * 4


def _counted(mesh: Any, shapes: list[tuple[int, int]], kind: Any, whole_matrices: bool) -> tuple[int, int, int]:
    """Return (products of this rank in a step, bytes that it sends to others, exchanges)."""
    model = acc.shard(Matrices(shapes), mesh=mesh)
    optimizer = acc.wrap_optimizer(kind(split(model)[0]), whole_matrices=whole_matrices)
    model(inputs(0)).backward()
    with recorded() as messages, Wire() as wire:
        optimizer.step()
    return wire.seen["aten::addmm"], num_sent(messages), len(messages)  # the products of Newton-Schulz


@pytest.mark.parametrize("form", ["muon", "whole"])
@on_world(2)
def test_a_gradient_that_one_rank_lacks_is_named_on_all_ranks_and_lets_none_wait(mesh, form: str) -> None:
    """On CPU the next backward compares steps; on a device every eighth one does, and all steps go on meanwhile."""
    model = acc.shard(Matrices(), mesh=mesh)
    optimizer = acc.wrap_optimizer(
        muon(model) if form == "muon" else Shampoo(model.parameters()), whole_matrices=form == "whole"
    )
    model.layers[6].weight.requires_grad_(False)  # takes no part in any step
    train(model, [optimizer], [0])
    model(inputs(1)).backward()
    if mesh.get_rank() == 1:
        model.layers[3].weight.grad = None
    optimizer.step()
    optimizer.zero_grad()
    lacks = r"rank 1 has parameters without a gradient 'layers.3.weight', 'layers.6.weight' \(rank 0: 'layers.6"
    with pytest.raises(acc.DivergenceError, match=lacks):
        train(model, [optimizer], range(1 if devices.device().type == "cpu" else 40))


@on_world(2)
def test_buckets_travel_while_others_are_computed(mesh) -> None:
    """The exchange of the next bucket begins before a computation, and results are awaited after the next computation."""
    model, calls = acc.shard(Matrices(), mesh=mesh), list[str]()
    optimizer = acc.wrap_optimizer(torch.optim.Muon(split(model)[0]))

    def logged(name: str, function: Any) -> Any:
        return lambda *args: (calls.append(name), function(*args))[1]

    def sends(name: str, function: Any) -> Any:
        return lambda *args: logged(f"{name} lands", logged(name, function)(*args))

    model(inputs(0)).backward()
    with (
        mock.patch("accordion.optimizers.whole_matrices.BUCKET_NUMEL", 1),  # one matrix of each rank
        mock.patch("accordion.optimizers.whole_matrices.to_owners", sends("rows", to_owners)),
        mock.patch("accordion.optimizers.whole_matrices.from_owners", sends("results", from_owners)),
        mock.patch.object(Communicator, "exchange", logged("exchange", Communicator.exchange)),
        mock.patch.object(MuonStep, "_compute", logged("compute", MuonStep._compute)),
    ):
        optimizer.step()
    rows, work = ["rows", "exchange"], ["rows lands", "compute", "results", "exchange"]
    ends = "results lands"
    assert calls == [*rows, *rows, *work, *rows, *work, ends, *rows, *work, ends, *work, ends, ends]


@on_world(2)
def test_what_no_owner_can_step_is_refused_before_anything_changes(mesh) -> None:
    model = acc.shard(Matrices(), mesh=mesh)
    matrices, vectors = split(model)
    with pytest.raises(acc.UsageError, match="elementwise=True says the contrary"):
        acc.wrap_optimizer(torch.optim.Muon(matrices), elementwise=True)
    with pytest.raises(acc.UsageError, match="pass one of them"):
        acc.wrap_optimizer(Shampoo(matrices), elementwise=True, whole_matrices=True)
    optimizer = torch.optim.Muon(matrices)
    for late in (False, True):
        if late:
            optimizer = acc.wrap_optimizer(torch.optim.Muon(matrices))
        optimizer.add_param_group({"params": vectors})
        before = params_of(model)
        model(inputs(0)).backward()
        with pytest.raises(acc.UsageError, match=r"a parameter of shape \(16,\); give .* to a second optimizer"):
            optimizer.step() if late else acc.wrap_optimizer(optimizer)
        assert_close(params_of(model), before, 0.0)
    offloaded = acc.shard(Matrices(), mesh=mesh, offload=HOST)
    with pytest.raises(acc.UsageError, match="Muon steps whole matrices on the device, and the Offload of unit"):
        acc.wrap_optimizer(torch.optim.Muon(split(offloaded)[0]))


def _backward(model: nn.Module, turn: int) -> Tensor:
    loss = model(inputs(turn))
    loss.backward()
    return loss


@on_world(2)
def test_hooks_schedules_closures_and_compiled_functions_see_one_step(mesh) -> None:
    results = []
    for is_compiled in (False, True):
        model = acc.shard(Matrices(), mesh=mesh)
        optimizer = acc.wrap_optimizer(muon(model))
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step = torch.compile(optimizer.step, backend="eager") if is_compiled else optimizer.step
        for turn in range(2):
            assert step(partial(_backward, model, turn)).isfinite()  # the loss of the closure
            optimizer.zero_grad()
            schedule.step()
        assert calls == ["before", "after"] * 2
        assert all(isinstance(state["momentum_buffer"], DTensor) for state in optimizer.state.values())
        results.append(params_of(model))
    assert_close(*results, 0.0)


class Shampoo(torch.optim.Optimizer):
    """A preconditioned step of whole matrices, in the manner of Shampoo: states of three shapes, in lists, and a count."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, mean=torch.zeros_like(p), sums=[p.new_zeros(n, n) for n in p.shape])
                state["count"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                update = state["mean"] / (1 - 0.9 ** state["count"])
                for dim, square in enumerate(state["sums"]):
                    by_dim = p.grad.movedim(dim, 0).reshape(p.shape[dim], -1)
                    square.add_(by_dim @ by_dim.T)
                    scale = torch.linalg.inv(square + torch.eye(len(square), device=p.device))
                    update = torch.tensordot(scale, update.movedim(dim, 0), 1).movedim(0, dim)
                p.sub_(update, alpha=group["lr"])
