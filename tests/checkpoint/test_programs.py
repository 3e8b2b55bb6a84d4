"""Checkpoints as programs use them: between micro-batches, other units and precision, interrupted runs."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import accordion as acc
from tests.devices import device
from tests.support import models
from tests.support.checkpoints import differing
from tests.support.checks import assert_equal, full, go_on, one_loss
from tests.support.ranked import on_world, under_strategies


def fresh(mesh, seed=0, dtype=None, **options):
    model = acc.shard(models.seeded(seed).to(dtype or torch.float32), mesh=mesh, **options)
    return model, acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


def trained(mesh, steps=2, **options):
    model, optimizer = fresh(mesh, **options)
    go_on(model, optimizer, range(steps))
    return model, optimizer


@under_strategies("shard_optim")
def test_save_between_micro_batches_changes_nothing(mesh, strategy, tmp_path):
    """The checkpoint has the weights before the step, and the step does not change."""
    ends: list[dict[str, torch.Tensor]] = []
    for i, when in enumerate((None, "locally", "summed", "behind")):
        model, optimizer = trained(mesh, strategy=strategy)
        before = full(model)
        for micro in range(3):
            with acc.no_sync(model) if micro < 2 and when != "summed" else nullcontext():
                one_loss(model, 5 + micro).backward()
            if when is not None and micro < 2:
                saving = acc.save(tmp_path / f"{i}-{micro}", model, optimizer, background=when == "behind")
        optimizer.step()
        ends.append(full(model))
        if when is not None:
            saving.wait()
            again, other = fresh(mesh, seed=7, strategy=strategy)
            acc.load(tmp_path / f"{i}-1", again, other)
            assert_equal(full(again), before)
            acc.load(tmp_path / f"{i}-1", model, optimizer)  # and what was gathered of the weights of before is gone
            assert_equal(full(model), before)
            assert torch.equal(one_loss(model, 3), one_loss(again, 3))
    assert_equal(ends[1], ends[0])
    assert_equal(ends[3], ends[0])
    assert all(torch.allclose(ends[2][name], tensor, atol=1e-6) for name, tensor in ends[0].items())


@on_world(2)
def test_load_with_other_units_and_precision(mesh, tmp_path):
    """Into other units bit for bit, and into another precision equal to torch's cast, also for optimizer states."""
    model, optimizer = trained(mesh)
    acc.save(tmp_path / "blocks", model, optimizer)
    for units in ({nn.Linear}, {nn.Linear, nn.LayerNorm, nn.Embedding}):
        fine, its = fresh(mesh, seed=7, units=units)
        acc.load(tmp_path / "blocks", fine, its)
        assert_equal(full(fine), full(model))
        acc.save(tmp_path / f"{len(units)}", fine, its)
        dist.barrier(mesh.get_group())
        assert differing(tmp_path / "blocks", tmp_path / f"{len(units)}") == set()
    half, its = fresh(mesh, seed=7, dtype=torch.bfloat16, precision=acc.Precision(master=None))
    acc.load(tmp_path / "blocks", half, its)
    assert_equal(full(half), {name: tensor.bfloat16() for name, tensor in full(model).items()})
    for param, wide in zip(half.parameters(), model.parameters(), strict=True):
        assert its.state[param]["exp_avg"].dtype == torch.bfloat16
        assert torch.equal(
            its.state[param]["exp_avg"].to_local(), optimizer.state[wide]["exp_avg"].to_local().bfloat16()
        )
    one_loss(half).backward()
    its.step()
    acc.save(tmp_path / "half", half, its)
    acc.load(tmp_path / "half", model, optimizer)
    assert_equal(full(model), {name: tensor.float() for name, tensor in full(half).items()})


# -- a run that is interrupted at any step equals the uninterrupted run bit for bit

VOCAB, SEQ, STEPS, ACCUMULATE = 32, 8, 6, 2


class Run:
    """A run with dropout, accumulation, fp16 with a changing scale, a schedule, and random sequences."""

    def __init__(self, mesh, seed):
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3)) for _ in range(2)]
        model = nn.Sequential(nn.Embedding(VOCAB, 16), *blocks, nn.Linear(16, VOCAB))
        precision = acc.Precision(params=torch.float16)
        self.model = acc.shard(model, mesh, units=lambda name, _: name in "12", precision=precision)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler(device().type, init_scale=2.0**18, growth_interval=2)
        self.state = {
            "scheduler": torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7),
            "scaler": self.scaler,
            "random": acc.checkpoint.RandomState(),
        }
        torch.manual_seed(100 * seed + mesh.get_rank())

    def step(self):
        """Return the inputs, the losses, and the scale afterwards."""
        seen, losses = [], []
        for i in range(ACCUMULATE):
            batch = torch.randint(VOCAB, (1, SEQ + 1), device="cpu").to(device())
            with acc.no_sync(self.model) if i + 1 < ACCUMULATE else torch.enable_grad():
                logits = self.model(batch[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()) / ACCUMULATE
                self.scaler.scale(loss).backward()
            seen.append(batch.tolist())
            losses.append(loss.item())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.state["scheduler"].step()
        self.optimizer.zero_grad()
        return seen, losses, self.scaler.get_scale()


def left_and_taken_up(mesh, folder):
    calm = Run(mesh, 1)
    wanted = []
    for k in range(STEPS):
        wanted.append(calm.step())
        acc.save(folder / f"{k}", calm.model, calm.optimizer, state=calm.state)
    with acc.full_params(calm.model):
        weights = [p.detach().clone() for p in calm.model.parameters()]
    for k in range(STEPS - 1):
        again = Run(mesh, 2 + k)
        acc.load(folder / f"{k}", again.model, again.optimizer, state=again.state)
        assert [again.step() for _ in range(k + 1, STEPS)] == wanted[k + 1 :], f"left after step {k}"
        with acc.full_params(again.model):
            assert all(map(torch.equal, again.model.parameters(), weights)), f"left after step {k}"
    return wanted


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_run_interrupted_at_any_step_resumes_bit_for_bit(world, tmp_path):
    first, second = world.run(2, left_and_taken_up, tmp_path)
    scales = [scale for *_, scale in first]
    assert min(scales) < 2.0**18, "it falls within the run"
    assert max(scales[1:]) > min(scales), "it grows"
    assert [seen for seen, *_ in first] != [seen for seen, *_ in second]
