"""`acc.EMA` equals torch's `AveragedModel` of the unsharded model bit for bit, in every place, and after a resume."""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import accordion as acc
from accordion.checkpoint.command import inspect
from accordion.checkpoint.reading import verify
from tests.support import forked, models
from tests.support.checks import PlantedError, assert_equal, full, go_on, one_loss
from tests.support.offloads import disk_of_all
from tests.support.ranked import on_world, under_strategies

DECAYS = (0.5, 0.9)


class Average:
    """The averages of an unsharded copy of a sharded model, which takes its weights before each update."""

    def __init__(self, model: nn.Module, plain: nn.Module, *, warmup: bool = False) -> None:
        self.model, self.plain = model, plain

        def update_of(decay: float):
            def update(averages: list[Tensor], params: list[Tensor], num_averaged: Tensor) -> None:
                n = int(num_averaged)
                rate = min(decay, (1 + n) / (10 + n)) if warmup else decay
                get_ema_multi_avg_fn(rate)(averages, params, num_averaged)

            return update

        self.of = {decay: AveragedModel(plain, multi_avg_fn=update_of(decay)) for decay in DECAYS}

    def update(self) -> None:
        self.plain.load_state_dict(full(self.model))
        for average in self.of.values():
            average.update_parameters(self.plain)

    def check(self, ema: acc.EMA, precision: torch.dtype | None = None) -> None:
        """Compare weights and outputs in `applied`, and weights and outputs before and after, bit for bit."""
        weights, loss = full(self.model), one_loss(self.model).detach()
        for decay, average in self.of.items():
            with suppress(PlantedError), ema.applied(decay):
                assert_equal(full(self.model), average.module.state_dict())
                if precision is None:
                    assert torch.equal(one_loss(self.model), one_loss(average.module))
                assert not torch.equal(one_loss(self.model).detach(), loss)
                raise PlantedError
            assert torch.equal(one_loss(self.model).detach(), loss)
        assert_equal(full(self.model), weights)


def trained_average(
    mesh, build: str, ema_options: dict, steps: int = 3, **options
) -> tuple[nn.Module, torch.optim.Optimizer, acc.EMA, Average]:
    """Train a model of `models` for `steps` with an EMA; return it, its optimizer, the EMA and the unsharded averages."""
    model = acc.shard(getattr(models, build)(), mesh, **options)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    ema = acc.EMA(model, DECAYS, **ema_options)
    average = Average(model, getattr(models, build)(), warmup=ema_options.get("warmup", False))
    for step in range(steps):
        go_on(model, optimizer, [step])
        ema.update()
        average.update()
    return model, optimizer, ema, average


@under_strategies("shard_optim", "hybrid_shard_optim")
def test_averages_equal_those_of_averaged_model(mesh, strategy: acc.Strategy, tmp_path: Path) -> None:
    for build, options in {
        "uneven": {"place": "device"},
        "tied": {"place": "host", "warmup": True},
        "frozen": {"place": f"disk:{tmp_path}"},
    }.items():
        model, optimizer, ema, average = trained_average(mesh, build, options, strategy=strategy)
        average.check(ema)
        trained = [p.to_local() for p in model.parameters() if p.requires_grad]
        assert ema.num_bytes == len(DECAYS) * sum(local.nbytes for local in trained)
        with torch.inference_mode():
            average.check(ema)
        go_on(model, optimizer, [3])  # and training goes on


@on_world(3)
def test_low_precision_and_cut_columns(mesh) -> None:
    precision = acc.Precision(params=torch.bfloat16)
    *_, ema, average = trained_average(mesh, "experts", {"place": "host"}, precision=precision)
    average.check(ema, torch.bfloat16)


@pytest.mark.parametrize(("offload", "place"), [("host", "device"), ("disk", "host")])
@on_world(2)
def test_offloaded_parameters_are_averaged_between_backward_and_step(mesh, offload: str, place: str, tmp_path) -> None:
    ends = []
    for is_applied in (True, False):
        chosen = acc.Offload(params="host", optimizer="host") if offload == "host" else disk_of_all(tmp_path)
        model, optimizer, ema, average = trained_average(mesh, "plain", {"place": place}, offload=chosen)
        one_loss(model, 3).backward()
        if is_applied:
            average.check(ema)
        with ema.applied(0.9):
            pass
        optimizer.step()
        optimizer.zero_grad()
        ends.append(full(model))
    assert_equal(*ends)


@pytest.mark.sim
@on_world(2)
def test_the_host_does_not_wait_in_an_update(mesh) -> None:
    for place in ("device", "host"):
        model, optimizer, ema, average = trained_average(mesh, "plain", {"place": place})
        go_on(model, optimizer, [3])
        torch.accelerator.synchronize()
        before = torch.sim.num_waits()
        ema.update()
        assert torch.sim.num_waits() == before
        average.update()
        average.check(ema)


def saved(mesh, folder: Path) -> dict[float, dict[str, Tensor]]:
    model, optimizer, ema, average = trained_average(mesh, "tied", {"place": "host"})
    plain = nn.BatchNorm1d(2)
    plain.running_mean.fill_(5.0)
    acc.save(folder, model, optimizer, state={"ema": ema, "plain": plain}, background=True).wait()
    average.check(ema)
    return {decay: {n: t.cpu() for n, t in one.module.state_dict().items()} for decay, one in average.of.items()}


def resumed(mesh, folder: Path, strategy: acc.Strategy, wanted: dict[float, dict[str, Tensor]]) -> None:
    model = acc.shard(models.tied(), mesh, strategy=strategy)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    ema, plain = acc.EMA(model, DECAYS), nn.BatchNorm1d(2)
    acc.load(folder, model, optimizer, state={"ema": ema, "plain": plain})
    assert (ema.updates, plain.running_mean.tolist()) == (3, [5.0, 5.0])
    average = Average(model, models.tied())
    for decay, one in average.of.items():
        one.module.load_state_dict(wanted[decay])
        one.n_averaged.fill_(3)
    average.check(ema)
    go_on(model, optimizer, [3])
    ema.update()
    average.update()
    average.check(ema)


def test_a_checkpoint_resumes_on_another_number_of_ranks(world, tmp_path: Path) -> None:
    wanted, *_ = world.run(2, saved, tmp_path / "c")
    for num_ranks, strategy in {1: acc.NO_SHARD, 2: acc.FULL_SHARD, 3: acc.SHARD_OPTIM, 4: acc.FULL_SHARD}.items():
        world.run(num_ranks, resumed, tmp_path / "c", strategy, wanted)
    assert verify(tmp_path / "c") == []
    tensors = inspect(tmp_path / "c")["tensors"]
    assert tensors["state/ema/0.9/embed.weight"]["placements"] == ("S(0)",)


@on_world(2)
def test_bad_input_is_refused_on_every_rank(mesh, tmp_path: Path) -> None:
    def fresh(**options) -> nn.Module:
        return acc.shard(models.seeded(1, **options), mesh)

    def refused(words: str, call, error: type[Exception] = acc.UsageError) -> None:
        with pytest.raises(error, match=words):
            call()

    model = fresh()
    for words, arguments in {
        "EMA takes a model that shard": (models.plain(),),
        "from 0 to 1": (model, 1.5),
        "several different ones": (model, [0.9, 0.9]),
        r"EMA\(place='disc' is no place": (model, 0.9, "disc"),
    }.items():
        refused(words.replace("' is", r"'\) is"), lambda given=arguments: acc.EMA(*given))
    refused("nope", lambda: acc.EMA(model, place=f"disk:{tmp_path}/nope"))
    refused("this model has none", lambda: acc.EMA(fresh().requires_grad_(False)))
    refused("decay", lambda: acc.EMA(model, 0.9 + mesh.get_rank() / 100), acc.DivergenceError)
    refused(r"acc\.EMA", lambda: copy.deepcopy(model), AssertionError)
    refused(r"acc\.EMA", lambda: AveragedModel(model), AssertionError)

    model = fresh()
    ema = acc.EMA(model, DECAYS)
    weights = full(model)
    refused("one of 0.5, 0.9", ema.applied(0.7).__enter__)
    refused("one of 0.5, 0.9", ema.applied().__enter__)
    with ema.applied(0.5):
        assert_equal(full(model), weights)  # before any update, the average is the weights
        refused("inside applied", ema.update)
        refused("inside applied", lambda: acc.save(tmp_path / "inside", model, state={"ema": ema}))
    with acc.full_params(model):
        refused("inside full_params", ema.update)
    acc.save(tmp_path / "c", model, state={"ema": ema})

    for other in (acc.EMA(model, 0.5), acc.EMA(model, 0.7)):
        load = partial(acc.load, tmp_path / "c", model, state={"ema": other})
        refused(r"44 in the checkpoint alone|22 in the checkpoint alone", load, acc.CheckpointError)
        assert other.updates == 0
    renewed = fresh()
    ema = acc.EMA(renewed)
    renewed = fresh()
    refused("update of an EMA whose model was deleted or sharded anew", ema.update)
    refused("sharded anew", lambda: acc.save(tmp_path / "d", renewed, state={"ema": ema}))
    outer = nn.Sequential(renewed)
    ema = acc.EMA(outer)
    outer[0] = fresh()
    refused("applied of an EMA whose model was", ema.applied().__enter__)


def test_the_example_learns_more_with_the_average(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "ema.py"
    assert forked.script_under_torchrun(example, 2, str(tmp_path / "ckpt")) == 0
    shown = capfd.readouterr().out
    weights, first, second = (float(line.split()[-1]) for line in shown.splitlines() if ": error " in line)
    assert max(first, second) < weights
