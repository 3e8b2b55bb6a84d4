"""`integrations.lightning`: a sharded Lightning Trainer trains, evaluates, saves and resumes as under Lightning's DDP."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import accordion as acc
from accordion.engine.hooks import engine_of
from tests.integrations.jobs import (
    WIDTH,
    assert_held_once,
    blocks,
    bytes_held,
    full,
    mean,
    needs,
    on_first_rank,
    sizes_of_steps,
    torchrun_job,
)
from tests.support.ranked import on_job
from tests.support.sample import sampled

pytestmark = needs("lightning")

GLOBAL_BATCH, STEPS_OF_EPOCH = 12, 3
KINDS = [("ddp", False, {}), ("full", True, {}), ("sharded", True, {"state_dict_type": "sharded"})]


def data(steps: int = STEPS_OF_EPOCH, accumulated: int = 2, seed: int = 1) -> Any:
    """Return batches of this rank; all ranks together have the same samples in each step, with any number of ranks."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(GLOBAL_BATCH * steps * accumulated, WIDTH, generator=g)
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x.abs()), batch_size=GLOBAL_BATCH // dist.get_world_size()
    )


def lightning() -> Any:
    return importlib.import_module("lightning.pytorch")


def sides(nodes: int = 1) -> Iterator[bool]:
    """Yield False, for DDP, and True, for our strategy, each in a job that looks like one of torchrun."""
    for ours in (False, True):
        with torchrun_job(nodes):
            yield ours


def module(on: str = "") -> Any:
    """A LightningModule that records its losses, and the gradient norm of each step before clipping.

    `on`: the device on which `configure_model` creates the layers, by default `__init__` does it.
    """

    class Lit(lightning().LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.norms: list[float] = []
            self.net: Any = None if on else blocks()

        def configure_model(self) -> None:
            if self.net is None:
                with torch.device(on):
                    self.net = blocks()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = (self(batch[0]) - batch[1]).pow(2).mean()
            self.losses.append(float(loss))
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            grads = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)))

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", (self(batch[0]) - batch[1]).pow(2).mean(), sync_dist=True)

        def test_step(self, batch: Any, index: int) -> None:
            self.log("test", (self(batch[0]) - batch[1]).abs().mean(), sync_dist=True)

        def predict_step(self, batch: Any, index: int) -> Tensor:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)}

    return Lit()


def trainer(ours: bool, folder: Path, strategy: Any = None, **changes: Any) -> Any:
    pl, integration = lightning(), importlib.import_module("accordion.integrations.lightning")
    if strategy is None or isinstance(strategy, dict):
        strategy = (integration.AccordionStrategy if ours else pl.strategies.DDPStrategy)(**(strategy or {}))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    usual = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "enable_checkpointing": False}
    here = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "strategy": strategy,
        "default_root_dir": str(folder),
    }
    return pl.Trainer(**{**here, **quiet, **usual, **changes})


def fitted(ours: bool, folder: Path, strategy: Any = None, lit: Any = None, resume: Any = None, **changes: Any) -> Any:
    """Train `lit`, by default a new `module()`, and return (trainer, lit). `resume`: path of the checkpoint to begin from."""
    one, lit = trainer(ours, folder, strategy, **changes), module() if lit is None else lit
    one.fit(lit, data(), ckpt_path=resume)
    return one, lit


# -- it trains


CASES: dict[str, dict[str, Any]] = {
    "accumulation, clipped by norm": {},
    "clipped by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "64-true": {"precision": "64-true"},
}


@pytest.mark.parametrize("case", sampled(CASES, lambda case: case.startswith("accumulation")))
@on_job(2)
def test_it_trains_as_under_ddp(mesh: Any, tmp_path: Path, case) -> None:
    changes = CASES[case]
    found = []
    for ours in sides():
        options = {"sharding": {"precision": acc.Precision()}} if ours else {}
        one, lit = trainer(ours, tmp_path, options, **changes), module()
        with sizes_of_steps() as sizes:
            one.fit(lit, data(), data(2, seed=2))
        found.append((lit, one.callback_metrics["val"], sizes))
    (theirs, val, whole), (mine, own_val, held) = found
    assert_held_once(held, whole)
    assert len(mine.losses) == 12
    assert len(mine.norms) == 6
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert mine.norms == pytest.approx(theirs.norms, rel=1e-5)
    assert float(own_val) == pytest.approx(float(val), rel=1e-5)
    assert bytes_held(mine) < 0.6 * bytes_held(theirs)
    for (name, a), b in zip(full(theirs).items(), full(mine).values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=name)


@on_job(2)
def test_mixed_precision_gathers_in_it_and_fp16_has_its_scaler(mesh: Any, tmp_path: Path) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    with torchrun_job():
        _, plain = fitted(False, tmp_path)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for dtype, changes in (
            (torch.bfloat16, {"precision": "bf16-mixed"}),
            (torch.float16, {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}),
        ):
            _, lit = fitted(True, tmp_path, **changes)
            assert engine_of(lit).precision.params == dtype
            assert lit.losses == pytest.approx(plain.losses, rel=3e-2)
        assert scaler.get_scale() == 8192.0, "it has grown thrice in 6 steps"


@on_job(2)
def test_configure_model_on_meta_begins_as_on_one_device(mesh: Any, tmp_path: Path) -> None:
    found = []
    for ours in sides():
        _, lit = fitted(ours, tmp_path, lit=module("meta" if ours else "cpu"))
        found.append(lit.losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    with torchrun_job():  # ranks whose generators differ begin alike all the same
        lit = module("meta")
        lit.configure_model()
        torch.manual_seed(dist.get_rank())
        fitted(True, tmp_path, lit=lit, max_epochs=1)
        assert lit.losses[-1] < lit.losses[0]


# -- it evaluates


@on_job(2)
def test_it_validates_tests_and_predicts_as_under_ddp(mesh: Any, tmp_path: Path) -> None:
    found = []
    for ours in sides():
        one, lit = trainer(ours, tmp_path), module()
        before = one.validate(lit, data(2), verbose=False)
        assert (engine_of(lit) is not None) == ours
        one.fit(lit, data())
        numbers = [before, one.validate(lit, data(2), verbose=False), one.test(lit, data(2), verbose=False)]
        found.append(([n[0] for n in numbers], torch.cat(one.predict(lit, data(2)))))
    (theirs, rows), (mine, own_rows) = found
    for a, b in zip(theirs, mine, strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    torch.testing.assert_close(own_rows, rows, rtol=1e-4, atol=1e-5)


# -- several optimizers


def gan(bad: str = "") -> Any:
    class Gan(lightning().LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.parts = nn.ModuleDict({"generator": blocks(2)})
            self.critic = blocks(2, seed=1)
            if bad == "own":
                self.scale = nn.Parameter(torch.ones(1))
            if bad == "tied":
                self.critic[0][0].weight = self.parts["generator"][0][0].weight
            self.losses: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["generator"](x)

        def training_step(self, batch: Any, index: int) -> None:
            real, noise = batch
            for_generator, for_critic = self.optimizers()
            with for_generator.toggle_model(sync_grad=index % 2 == 1):
                loss = -self.critic(self(noise)).tanh().mean()
                self.manual_backward(loss)
                if index % 2 == 1:
                    self.clip_gradients(for_generator, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                    for_generator.step()
                    for_generator.zero_grad()
            with for_critic.toggle_model():
                other = (self.critic(self(noise).detach()) - self.critic(real)).tanh().mean()
                for_critic.zero_grad()
                self.manual_backward(other)
                for_critic.step()
            self.losses += [float(loss), float(other)]

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", self(batch[0]).mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (self.parts, self.critic)]

    return Gan()


@on_job(2)
def test_manual_optimisation_with_several_optimizers(mesh: Any, tmp_path: Path) -> None:
    manual = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_epochs": 1}
    found = []
    for ours in sides():
        lit = gan()
        one = trainer(ours, tmp_path, None if ours else {"find_unused_parameters": True}, **manual)
        one.fit(lit, data(), data(2, seed=2))
        found.append((lit.losses, float(one.callback_metrics["val"])))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-5)
    with torchrun_job():
        whole, parts, longer = gan(), gan(), {**manual, "max_epochs": 2}
        fitted(True, tmp_path, lit=whole, **longer)
        one, _ = fitted(True, tmp_path, lit=parts, **manual)
        for kind in ("full", "sharded"):
            one.strategy.state_dict_type = kind
            one.save_checkpoint(tmp_path / f"{kind}.ckpt")
            _, again = fitted(True, tmp_path, lit=gan(), resume=tmp_path / f"{kind}.ckpt", **longer)
            assert again.losses == whole.losses[len(parts.losses) :]
    with torchrun_job():
        for bad, words in (
            ("own", "parameter 'scale' belongs to Gan itself"),
            ("tied", "belongs to another module too"),
        ):
            with pytest.raises(acc.UsageError, match=words):
                fitted(True, tmp_path, lit=gan(bad), **manual)


# -- it saves and resumes


def saves(mesh: Any, folder: Path) -> None:
    pl = lightning()
    with torchrun_job():
        for name, ours, options in KINDS:
            kept = pl.callbacks.ModelCheckpoint(dirpath=folder / name, filename="{epoch}", save_top_k=-1)
            _, lit = fitted(ours, folder, options, enable_checkpointing=True, callbacks=[kept])
            dist.barrier()
            assert sorted(p.name for p in (folder / name).iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt"]
            assert (folder / name / "epoch=0.ckpt").is_dir() == (name == "sharded")
            losses = mean(lit.losses)
            if dist.get_rank() == 0:
                torch.save((losses, lit.norms, full(lit) if not ours else None), folder / f"{name}.losses")
        found = torch.load(folder / "full" / "epoch=1.ckpt")
        theirs = torch.load(folder / "ddp" / "epoch=1.ckpt")
        assert set(found) == set(theirs)
        torch.testing.assert_close(found["state_dict"], theirs["state_dict"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["optimizer_states"], theirs["optimizer_states"], rtol=1e-3, atol=1e-5)


def resumes(mesh: Any, folder: Path, name: str, ours: bool) -> None:
    losses, norms, _ = torch.load(folder / f"{name}.losses")
    with torchrun_job():
        lit = module()
        torch.nn.init.zeros_(lit.net[0][0].weight)  # what is resumed is not what it began with
        one, _ = fitted(ours, folder, lit=lit, resume=folder / name / "epoch=0.ckpt")
        assert one.global_step == 6
        assert mean(lit.losses) == pytest.approx(losses[6:], rel=1e-5)
        assert lit.norms == pytest.approx(norms[3:], rel=1e-5)
        one = trainer(ours, folder)
        one.validate(module(), data(1), ckpt_path=folder / name / "epoch=1.ckpt", verbose=False)
        assert float(one.callback_metrics["val"]) < losses[0]


@pytest.mark.parametrize("count", sampled([1, 3], lambda count: count == 1))
def test_it_resumes_in_the_middle_on_another_number_of_ranks(ranks, tmp_path, count):
    ranks(2).run(2, saves, tmp_path)
    for name in ("full", "sharded"):
        ranks(count).run(count, resumes, tmp_path, name, True)
    ranks(2).run(2, resumes, tmp_path, "ddp", True)
    ranks(2).run(2, resumes, tmp_path, "full", False)  # without sharding


@on_job(2)
def test_an_incomplete_folder_is_never_resumed(mesh: Any, tmp_path: Path) -> None:
    with torchrun_job():
        one, lit = fitted(True, tmp_path, {"state_dict_type": "sharded"}, max_epochs=1)
        one.save_checkpoint(tmp_path / "whole.ckpt")
        for lost, words in (("meta.pt", "its save was interrupted"), ("sharded_0/manifest.json", "cannot be loaded")):
            one.save_checkpoint(tmp_path / "torn.ckpt")
            dist.barrier()
            on_first_rank((tmp_path / "torn.ckpt" / lost).unlink)
            with pytest.raises(acc.CheckpointError, match=words):
                fitted(True, tmp_path, resume=tmp_path / "torn.ckpt")
        # A file takes the place of a folder, and the other way round.
        one, _ = fitted(True, tmp_path, lit=lit, resume=tmp_path / "whole.ckpt")
        one.save_checkpoint(tmp_path / "whole.ckpt")
        assert (tmp_path / "whole.ckpt").is_file()
        one.strategy.state_dict_type = "sharded"
        one.save_checkpoint(tmp_path / "whole.ckpt")
        assert (tmp_path / "whole.ckpt" / "meta.pt").is_file()


# -- callbacks


@on_job(2)
def test_checkpoints_early_stopping_and_averages(mesh: Any, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint

    found = []
    for name, ours, options in KINDS[:2]:
        with torchrun_job():
            lit = module()
            best = ModelCheckpoint(tmp_path / name, "{epoch}", monitor="val", mode="max", save_top_k=1, save_last=True)
            stop = EarlyStopping("val", mode="max", patience=2)  # the loss falls, so it stops
            own = [best, stop, EMAWeightAveraging(decay=0.8)]
            one = trainer(ours, tmp_path, options, max_epochs=8, callbacks=own, enable_checkpointing=True)
            one.fit(lit, data(), data(2, seed=2))
            values = [one.current_epoch, float(one.callback_metrics["val"]), float(best.best_model_score)]
            names = sorted(p.name for p in (tmp_path / name).iterdir())
            again = module()
            one = trainer(ours, tmp_path, options, max_epochs=4, callbacks=[EMAWeightAveraging(decay=0.8)])
            one.fit(again, data(), data(2, seed=2), ckpt_path=tmp_path / name / "last.ckpt")
            values += [float(one.callback_metrics["val"]), *again.losses]
            values += [one.validate(again, data(2), ckpt_path=tmp_path / name / "last.ckpt", verbose=False)[0]["val"]]
            found.append((names, values, full(lit)))
            if ours:
                assert bytes_held(own[2]._average_model) < 0.6 * bytes_held(module())
    names, values, weights = found[1]
    assert names == found[0][0] == ["epoch=0.ckpt", "last.ckpt"]
    assert values == pytest.approx(found[0][1], rel=1e-4), (values, found[0][1])
    torch.testing.assert_close(weights, found[0][2], rtol=1e-4, atol=1e-5)
    assert found[0][1][0] < 8, "it stopped early"
    with torchrun_job(), pytest.raises(acc.UsageError, match="average weights need state_dict_type='full'"):
        fitted(True, tmp_path, KINDS[2][2], callbacks=[EMAWeightAveraging(decay=0.8)])


# -- meshes, what is refused, what works without it


def full_of(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


@on_job(2)
def test_callbacks_and_hooks_change_what_is_saved_and_resumed(mesh: Any, tmp_path: Path) -> None:
    """One callback adds a parameter group in the second epoch, one keeps an average, and hooks change a checkpoint."""
    pl = lightning()

    class Unfreezes(pl.callbacks.BaseFinetuning):  # type: ignore[misc]
        def freeze_before_training(self, module: Any) -> None:
            """Do nothing: DDP would not reduce gradients of parameters that were frozen when it wrapped the model."""

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                module.net[0].zero_grad()
                self.unfreeze_and_add_param_group(module.net[0], optimizer)

    class Averages(pl.Callback):  # type: ignore[misc]
        average: Any = None

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.average = self.average or [p.detach().clone() for p in module.parameters()]

        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            for mine, param in zip(self.average, module.parameters(), strict=True):
                mine.lerp_(param.detach(), 0.5)

        def state_dict(self) -> dict[str, Any]:
            return {"average": self.average}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.average = state["average"]

    def made() -> Any:
        lit = module()

        def configure_optimizers() -> Any:
            return torch.optim.AdamW(lit.net[1:].parameters(), lr=1e-2)

        def rename(checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            state["older.bias"] = state.pop("net.1.0.bias")
            state["net.2.2.bias"] = state["net.2.2.bias"] * 2
            checkpoint["beside"] = {"bias": state["older.bias"] + 1}

        def rename_back(checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            state["net.1.0.bias"] = checkpoint["beside"]["bias"] - 1
            torch.testing.assert_close(full_of(state.pop("older.bias")), full_of(state["net.1.0.bias"]))

        lit.configure_optimizers = configure_optimizers
        lit.on_save_checkpoint, lit.on_load_checkpoint = rename, rename_back
        return lit

    found = []
    for name, ours, options in KINDS[:2]:
        with torchrun_job():
            path, calls = tmp_path / f"{name}.ckpt", lambda: [Unfreezes(), Averages()]
            one, _ = fitted(ours, tmp_path, options, made(), callbacks=calls())
            one.save_checkpoint(path)
            one, lit = fitted(ours, tmp_path, options, made(), path, max_epochs=3, callbacks=calls())
            assert [len(group["params"]) for group in one.optimizers[0].param_groups] == [8, 4]
            found.append((full(lit), [full_of(tensor) for tensor in one.callbacks[-1].average]))
            if ours:
                one.strategy.state_dict_type = "sharded"
                with pytest.raises(acc.UsageError, match="a hook has changed the state_dict"):
                    one.save_checkpoint(path)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@on_job(4)
def test_a_hybrid_has_one_replica_per_node(mesh: Any, tmp_path: Path) -> None:
    found = []
    for ours in sides(2):
        options = {"sharding": {"strategy": acc.HYBRID_SHARD}} if ours else {}
        found.append(fitted(ours, tmp_path, options, num_nodes=2, devices=2, max_epochs=1)[1])
    weight = found[1].net[0][0].weight
    assert weight.device_mesh.mesh_dim_names == ("replicate", "shard")
    assert weight.device_mesh.shape == (2, 2)
    assert found[1].losses == pytest.approx(found[0].losses, rel=1e-5)


@on_job(2)
def test_unsupported_options_are_refused(mesh: Any, tmp_path: Path) -> None:
    from accordion.integrations.lightning import AccordionStrategy, FabricStrategy

    for kind in (AccordionStrategy, FabricStrategy):
        with pytest.raises(acc.UsageError, match="find_unused_parameters=True is not supported: nothing is wrapped"):
            kind(find_unused_parameters=True)
        with pytest.raises(acc.UsageError, match="state_dict_type is 'ful'; valid: 'full', 'sharded'"):
            kind(state_dict_type="ful")
        with pytest.raises(acc.UsageError, match="sharding takes no 'unit'; did you mean 'units'"):
            kind(sharding={"unit": 1})
    with pytest.raises(acc.UsageError, match="model_averaging_period=3 is not supported"):
        AccordionStrategy(model_averaging_period=3)

    class Half(type(module())):  # type: ignore[misc]
        def configure_model(self) -> None:
            if not hasattr(self, "more"):
                acc.shard(self.net)
                self.more = nn.Linear(2, 2)

    with torchrun_job(), pytest.raises(acc.UsageError, match=r"but not its parameter .more\.weight"):
        fitted(True, tmp_path, lit=Half())


@on_job(2)
def test_modules_that_configure_model_has_sharded_are_not_changed(mesh: Any, tmp_path: Path) -> None:
    """With our strategy, and with Lightning's own for meshes."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    kind = type(module())

    class Own(kind):  # type: ignore[misc, valid-type]
        def configure_model(self) -> None:
            if engine_of(self.net) is None:
                acc.shard(self.net)

    with torchrun_job():
        _, plain = fitted(False, tmp_path, gradient_clip_val=None)
        for strategy in (None, ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)):
            _, lit = fitted(True, tmp_path, strategy, Own(), gradient_clip_val=None)
            assert lit.losses == pytest.approx(plain.losses, rel=1e-5)


# -- Fabric


def fabric(ours: bool, options: Any = None, strategy: Any = None, **changes: Any) -> Any:
    made = importlib.import_module("lightning.fabric")
    mine = importlib.import_module("accordion.integrations.lightning").FabricStrategy
    strategy = strategy or (mine if ours else made.strategies.DDPStrategy)(**(options or {}))
    one = made.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **changes)
    one.launch()
    return one


def set_up(ours: bool, options: Any = None, seed: int = 0) -> tuple[Any, Any, Any]:
    """Return a Fabric with a model and its optimizer, which was created before the model was sharded."""
    one, model = fabric(ours, options), blocks(seed=seed)
    return one, *one.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def fabric_loop(
    one: Any, model: Any, optimizer: Any, by: str = "norm", steps: int = 6, accumulated: int = 2
) -> list[float]:
    found = []
    batches = iter(one.setup_dataloaders(data(STEPS_OF_EPOCH * 2), use_distributed_sampler=True))
    for _ in range(steps):
        for micro in range(accumulated):
            x, y = next(batches)
            with one.no_backward_sync(model, enabled=micro < accumulated - 1):
                loss = (model(x) - y).pow(2).mean()
                one.backward(loss)
            found.append(float(loss))
        if by == "norm":
            found.append(float(one.clip_gradients(model, optimizer, max_norm=0.1)))
        elif by == "value":
            one.clip_gradients(model, optimizer, clip_val=1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return found


@on_job(2)
def test_fabric_trains_as_under_ddp(mesh: Any) -> None:
    for by in ("norm", "value"):
        found = []
        for ours in sides():
            one, model, optimizer = set_up(ours)
            found.append(fabric_loop(one, model, optimizer, by))
            assert (engine_of(model) is not None) == ours
        assert found[1] == pytest.approx(found[0], rel=1e-5)
    with torchrun_job():
        one = fabric(True, precision="bf16-mixed")
        with one.init_module(empty_init=True):
            model = blocks()
        assert next(model.parameters()).is_meta
        model = one.setup_module(model)
        optimizer = one.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        low = fabric_loop(one, model, optimizer)
        assert engine_of(model).precision.params == torch.bfloat16
        assert low[-3] < low[0]


@on_job(2)
def test_fabrics_own_strategy_takes_a_plain_shard(mesh: Any) -> None:
    from lightning.fabric.strategies import ModelParallelStrategy

    def sharded(model: nn.Module, meshes: Any) -> nn.Module:
        return acc.shard(model, meshes["data_parallel"])

    found = []
    for strategy in (None, ModelParallelStrategy(sharded, data_parallel_size=2, tensor_parallel_size=1)):
        with torchrun_job():
            one = fabric(False, strategy=strategy)
            model = one.setup_module(blocks())
            optimizer = one.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
            assert all(isinstance(p, DTensor) == (strategy is not None) for p in model.parameters())
            found.append(fabric_loop(one, model, optimizer, by="", accumulated=1))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[1][-1] < found[1][0]


def fabric_saves(mesh: Any, folder: Path) -> None:
    for kind in ("full", "sharded"):
        with torchrun_job():
            one, model, optimizer = set_up(True, {"state_dict_type": kind})
            fabric_loop(one, model, optimizer)
            average = [p.detach().clone() for p in model.parameters()]
            one.save(folder / kind, {"model": model, "optimizer": optimizer, "step": 6, "average": average})
            expected = fabric_loop(one, model, optimizer, steps=3)
            if dist.get_rank() == 0:
                torch.save(expected[2::3], folder / f"{kind}.norms")


def fabric_loads(mesh: Any, folder: Path, kind: str) -> None:
    with torchrun_job():
        one, model, optimizer = set_up(True, seed=1)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        rest = one.load(folder / kind, state)
        assert (state["step"], list(rest)) == (6, ["average"])
        for average, param in zip(rest["average"], model.parameters(), strict=True):
            assert average.placements == param.placements
            torch.testing.assert_close(average.full_tensor(), param.detach().full_tensor(), rtol=0, atol=0)
        assert fabric_loop(one, model, optimizer, steps=3)[2::3] == pytest.approx(
            torch.load(folder / f"{kind}.norms"), rel=1e-5
        )
        with pytest.raises(KeyError, match="has no 'epoch'"):
            one.load(folder / kind, {**state, "epoch": 1})
        if kind == "full":
            other = one.setup_module(blocks())
            found = torch.load(folder / kind)
            on_first_rank(torch.save, found["model"], folder / f"raw-{dist.get_world_size()}")
            one.load_raw(folder / f"raw-{dist.get_world_size()}", other)
            torch.testing.assert_close(full(other._forward_module), found["model"])


@pytest.mark.parametrize("count", sampled([1, 3], lambda count: count == 1))
def test_fabric_saves_and_resumes_on_another_number_of_ranks(ranks, tmp_path, count):
    ranks(2).run(2, fabric_saves, tmp_path)
    for kind in ("full", "sharded"):
        ranks(count).run(count, fabric_loads, tmp_path, kind)
