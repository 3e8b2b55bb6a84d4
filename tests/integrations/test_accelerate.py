"""`integrations.accelerate`: a training loop with `Accelerator` learns as with accelerate's own under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accordion as acc
from accordion.engine.hooks import engine_of
from tests.integrations.jobs import (
    WIDTH,
    assert_held_once,
    blocks,
    bytes_held,
    full,
    library_job,
    needs,
    on_library_job,
    sizes_of_steps,
)
from tests.support.ranked import on_job
from tests.support.sample import sampled

pytestmark = needs("accelerate")


def loader(count: int = 104) -> Any:
    g = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(*(torch.randn(count, WIDTH, generator=g) for _ in range(2)))
    return torch.utils.data.DataLoader(data, batch_size=2)


def accelerator(ours: bool, sharding: Any = None, **changes: Any) -> Any:
    import accelerate

    from accordion.integrations.accelerate import Accelerator

    options = {"cpu": True, "gradient_accumulation_steps": 2, **changes}
    return Accelerator(**options, sharding=sharding) if ours else accelerate.Accelerator(**options)


def learns(one: Any, order: str, steps: int = 6) -> tuple[Any, list[float], list[float]]:
    """Return the model, its losses and gradient norms. `order`: what is prepared together."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    if order == "together":
        model, optimizer, data, schedule = one.prepare(model, optimizer, loader(), schedule)
    else:
        model = one.prepare(model)
        optimizer = one.prepare(optimizer)
        data, schedule = one.prepare(loader(), schedule)
    losses, norms = [], []
    for x, y in data:
        with one.accumulate(model):
            loss = (model(x) - y).pow(2).mean()
            one.backward(loss)
            if one.sync_gradients:
                norms.append(float(one.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(one.gather_for_metrics(loss.detach()).mean()))
        if len(norms) == steps:
            break
    return model, losses, norms


@pytest.mark.parametrize("order", ["together", "apart"])
@on_job(2)
def test_a_loop_learns_as_under_ddp(mesh: Any, order: str) -> None:
    from accordion.optimizers.wrap import LocalStep

    with library_job():
        one = accelerator(True)
        with sizes_of_steps() as mine:
            model, *found = learns(one, order)
        assert isinstance(one._optimizers[0].optimizer, LocalStep)
        assert one.unwrap_model(model) is model
        assert engine_of(model) is not None
        assert bytes_held(model) < 0.6 * bytes_held(blocks())
        state = one.get_state_dict(model)
    with library_job():
        one = accelerator(False)
        with sizes_of_steps() as whole:
            model, *expected = learns(one, order)
        assert_held_once(mine, whole)
        for a, b in zip(found, expected, strict=True):
            assert a == pytest.approx(b, rel=1e-5)
        if mesh.get_local_rank() == 0:
            torch.testing.assert_close(state, dict(one.get_state_dict(model)), rtol=1e-4, atol=1e-5)
        assert len(expected[1]) == 6


@on_job(2)
def test_mixed_precision(mesh: Any) -> None:
    with library_job():
        _, plain, _ = learns(accelerator(False), "together", 4)
    for mixed, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with library_job():
            model, losses, _ = learns(accelerator(True, mixed_precision=mixed), "together", 4)
            assert engine_of(model).precision.params == dtype
            assert losses == pytest.approx(plain, rel=3e-2)
            assert model(torch.ones(1, WIDTH)).dtype == torch.float32
    with library_job():
        one = accelerator(True, mixed_precision="bf16", sharding={"precision": acc.Precision()})
        model, *found = learns(one, "together", 4)
        out = one.unwrap_model(model, keep_fp32_wrapper=False)(torch.ones(1, WIDTH))
        assert out.dtype == torch.float32
    with library_job():
        _, *expected = learns(accelerator(False, mixed_precision="bf16"), "together", 4)
        for a, b in zip(found, expected, strict=True):
            assert a == pytest.approx(b, rel=1e-5)


def several(one: Any, folder: Path | None = None) -> list[float]:
    """A small GAN and a frozen teacher."""
    a, b, teacher = blocks(), blocks(seed=1), blocks(1, seed=2).requires_grad_(False)
    first, second = torch.optim.SGD(a.parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(b.parameters(), lr=1e-2)
    a, b, first, second, data = one.prepare(a, b, first, second, loader(24))
    if hasattr(one, "shard_arguments"):  # DDP takes no model that is frozen
        teacher = one.prepare(teacher)
    found = []
    for i, (x, _) in enumerate(data):
        one.backward((b(a(x)) - teacher(x)).pow(2).mean())
        found.append(float(one.clip_grad_norm_([*a.parameters(), *b.parameters()], 1.0)))
        (first if i % 2 else second).step()
        for optimizer in (first, second):
            optimizer.zero_grad()
        if folder is not None and i == 2:
            one.save_state(str(folder))
    return found


@on_job(2)
def test_several_models_and_optimizers(mesh: Any, tmp_path: Path) -> None:
    with library_job():
        found = several(accelerator(True, gradient_accumulation_steps=1), tmp_path / "state")
        assert {p.name for p in (tmp_path / "state").glob("sharded_*")} == {"sharded_0", "sharded_1", "sharded_2"}
    with library_job():
        expected = several(accelerator(False, gradient_accumulation_steps=1))
        assert found == pytest.approx(expected, rel=1e-5)


def normed(one: Any) -> list[float]:
    """Return this rank's output for one input in evaluation, after steps on its own data."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model, optimizer, data = one.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader(24))
    for x, _ in data:
        one.backward(model(x).pow(2).mean() + model(-x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return model(torch.ones(1, WIDTH)).flatten().tolist()


@on_job(2)
def test_ranks_evaluate_with_the_first_ones_buffers_as_under_ddp(mesh: Any) -> None:
    with library_job():
        found = normed(accelerator(True, gradient_accumulation_steps=1))
    of_ranks: list[Any] = [None, None]
    torch.distributed.all_gather_object(of_ranks, found)
    assert of_ranks[0] == of_ranks[1]
    if torch.__version__ < "2.13":  # DDP of 2.11 writes buffers between two forwards of one backward, which fails then
        return
    with library_job():
        expected = normed(accelerator(False, gradient_accumulation_steps=1))
    assert found == pytest.approx(expected, rel=5e-3)  # batches of two are far apart after rounding errors


class Counter:
    """Counts, and keeps an average of a model's parameters."""

    def __init__(self) -> None:
        self.value, self.average = 0, list[torch.Tensor]()

    def follow(self, model: nn.Module) -> None:
        self.average = [p.detach().clone() for p in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        for mine, given in zip(self.average, state["average"], strict=True):
            mine.copy_(given)


def prepared(folder: Path) -> Any:
    """Return an Accelerator that names its checkpoints in `folder`, what it prepared, and a registered `Counter`."""
    from accelerate.utils import ProjectConfiguration

    named = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    changes = {"step_scheduler_with_optimizer": False, "project_config": named}
    one = accelerator(True, gradient_accumulation_steps=1, **changes)
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    counter = Counter()
    one.register_for_checkpointing(counter)
    return one, *one.prepare(model, optimizer, schedule), counter


def step(one: Any, model: Any, optimizer: Any, schedule: Any, seed: int) -> float:
    """Return the mean loss over all ranks."""
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
    # Of one batch, on any number of ranks.
    mine = x.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]
    loss = model(mine).pow(2).mean()
    one.backward(loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return float(one.gather(loss.detach()).mean())


def saves(mesh: Any, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses of six steps after the last save, and the weights then."""
    with library_job():
        one, *parts, counter = prepared(folder)
        for seed in range(6):
            step(one, *parts, seed)
            counter.value = seed + 1
            counter.follow(parts[0])
            if seed in (3, 5):
                one.save_state()
        losses = [step(one, *parts, seed) for seed in range(6, 12)]
        one.save_model(parts[0], str(folder / "model"))
        return losses, full(parts[0])


def loads(mesh: Any, folder: Path, losses: list[float], expected: dict[str, torch.Tensor], rel: float) -> None:
    from safetensors.torch import load_file

    with library_job():
        one, *parts, counter = prepared(folder)
        model, optimizer, _ = parts
        counter.follow(model)
        one.load_state(str(folder / "checkpoints" / "checkpoint_1"))
        assert counter.value == 6
        for average, param in zip(counter.average, model.parameters(), strict=True):
            torch.testing.assert_close(average.full_tensor(), param.detach().full_tensor(), rtol=0, atol=0)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**6)
        assert [step(one, *parts, seed) for seed in range(6, 12)] == pytest.approx(losses, rel=rel, abs=0)
        torch.testing.assert_close(full(model), expected, rtol=rel, atol=rel)
        torch.testing.assert_close(load_file(folder / "model" / "model.safetensors"), expected, rtol=0, atol=0)


def torn(mesh: Any, folder: Path) -> None:
    with library_job():
        one, *_, counter = prepared(folder)
        newest = folder / "checkpoints" / "checkpoint_1"
        if mesh.get_local_rank() == 0:
            (newest / "sharded_0" / "manifest.json").unlink()
            newest.with_name("checkpoint_best").mkdir()  # by another program, without a number
        torch.distributed.barrier()
        with pytest.raises(acc.CheckpointError, match="checkpoint_1 has no sharded_0: it was not saved by this"):
            one.load_state(str(newest))
        counter.follow(one._models[0])
        one.load_state()
        assert counter.value == 4


@pytest.mark.parametrize("count", sampled([1, 3], lambda count: count == 1))
def test_a_state_resumes_on_another_number_of_ranks(ranks, tmp_path, count):
    losses, expected = ranks(2).run(2, saves, tmp_path)[0]
    assert losses[-1] < 0.9 * losses[0]
    ranks(2).run(2, loads, tmp_path, losses, expected, 0.0)
    ranks(count).run(count, loads, tmp_path, losses, expected, 1e-5)
    ranks(2).run(2, torn, tmp_path)


@on_library_job(2)
def test_hooks_of_a_state_get_the_models_and_take_over_their_weights(mesh: Any, tmp_path: Path) -> None:
    """Hooks save and load the first of two models themselves, like those of diffusers' programs."""
    one = accelerator(True)
    models = [blocks(), blocks(seed=1)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    models[0], models[1], optimizers[0], optimizers[1] = one.prepare(*models, *optimizers)
    shown = []

    def save_first(models: list[Any], weights: list[Any], folder: str) -> None:
        shown.append((len(models), len(weights)))
        state = one.get_state_dict(models[0])
        if one.is_main_process:
            torch.save({name: tensor + 1 for name, tensor in state.items()}, Path(folder, "own.pt"))
            weights.pop(0)

    def load_first(models: list[Any], folder: str) -> None:
        shown.append((len(models), 0))
        models.pop(0).load_state_dict(torch.load(Path(folder, "own.pt")))

    one.register_save_state_pre_hook(save_first)
    one.register_load_state_pre_hook(load_first)

    def train() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            one.backward(model(torch.ones(2, WIDTH)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()

    train()
    expected = [full(model) for model in models]
    one.save_state(str(tmp_path))
    train()
    one.load_state(str(tmp_path))
    assert shown == [(2, 2), (2, 0)]
    torch.testing.assert_close(full(models[0]), {name: t + 1 for name, t in expected[0].items()})
    torch.testing.assert_close(full(models[1]), expected[1])
    assert all(float(state["step"]) == 1 for o in optimizers for state in o.state.values())


@on_job(2)
def test_unsupported_options_are_refused(mesh: Any) -> None:
    from transformers import Adafactor

    with library_job():
        one = accelerator(True)
        model = one.prepare(blocks())
        with (
            pytest.raises(acc.UsageError, match="trigger_sync_in_backward is not supported"),
            one.trigger_sync_in_backward(model),
        ):
            pass
        for kind in (torch.optim.Adafactor, Adafactor):
            with pytest.raises(acc.UsageError, match="Adafactor keeps means over the rows and columns"):
                one.prepare(kind(model.parameters()))
        (model(torch.ones(1, WIDTH)) ** 2).sum().backward()
        with pytest.raises(acc.UsageError, match="Adafactor keeps means over the rows and columns"):  # never prepared
            Adafactor(model.parameters()).step()
        both = one.prepare(torch.optim.SGD([*model.parameters(), *one.prepare(blocks(seed=1)).parameters()], lr=0.1))
        assert both is not None
        with pytest.raises(acc.UsageError, match="parameters of several models"):
            one.save_state("nowhere")
    with library_job(), pytest.raises(acc.UsageError, match="a dynamo backend would compile the model"):
        accelerator(True, dynamo_backend="eager")


@pytest.mark.cpu("plain tensors are there")
@on_job(2)
def test_a_sharded_model_in_accelerates_prepare(mesh: Any) -> None:
    with library_job():
        model = acc.shard(nn.Linear(8, 8), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        refusal = r"this model is sharded, and DistributedDataParallel.*accordion.integr"
        with pytest.raises(acc.UsageError, match=refusal):
            accelerator(False).prepare(model, optimizer)
    with library_job():
        one = accelerator(True)
        model, optimizer = one.prepare(model, optimizer)
        one.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()


@on_job(2)
def test_an_optimizer_that_has_states_already_keeps_them_when_it_is_prepared(mesh: Any) -> None:
    makers = {
        "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
        "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    }
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    for name, make in makers.items():
        for before in (0, 2):
            results = []
            for ours in (False, True):
                model, one = blocks(seed=2), accelerator(True) if ours else None
                optimizer = make(model.parameters())
                for step in range(4):
                    if step == before and one is not None:
                        model, optimizer = one.prepare(model, optimizer)

                    def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
                        optimizer.zero_grad()
                        loss = model(x).square().mean()
                        loss.backward()
                        return loss

                    optimizer.step(closure)
                results.append(full(model))
            for name, value in results[0].items():
                torch.testing.assert_close(results[1][name], value, msg=name)
