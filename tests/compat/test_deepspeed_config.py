"""`deepspeed.read`: what each key of a DeepSpeed configuration becomes, and errors of one sentence for each mistake."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accordion.compat.deepspeed import read
from accordion.compat.deepspeed.reading import KEYS, SECTIONS
from accordion.config import FULL_SHARD, HYBRID_SHARD, HYBRID_SHARD_OPTIM, NO_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, Offload
from accordion.errors import AccordionError, UsageError
from tests.compat.deepspeed_page import render
from tests.pool import fake_world

CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/scratch"}
DOCUMENT = Path(__file__).parents[2] / "docs" / "compat_deepspeed.md"


def autos(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, "auto")


def zero(stage: Any, **keys: Any) -> dict[str, Any]:
    """Return a configuration with this section `zero_optimization`."""
    return {"zero_optimization": {"stage": stage, **keys}}


TRAINER: dict[str, Any] = {  # as the Hugging Face documentation has it for stage 3, without its offload
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": autos("lr", "betas", "eps", "weight_decay")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": autos("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"),
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        **autos("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    **autos("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"),
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
ANSWERS = {
    "bf16.enabled": True,
    "fp16.enabled": False,
    "optimizer.params.lr": 3e-4,
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": 2,
}


def test_the_documentation_has_the_table() -> None:
    assert DOCUMENT.read_text() == render(), (
        "write it anew: python -m tests.compat.deepspeed_page > docs/compat_deepspeed.md"
    )


def test_a_file_of_the_trainer_with_its_autos() -> None:
    settings = read(TRAINER, auto=ANSWERS)
    assert settings.sharding.strategy is FULL_SHARD
    assert settings.sharding.precision.params is torch.bfloat16
    assert settings.sharding.precision.master is torch.float32
    assert settings.clip == 1.0
    assert not settings.scaler().is_enabled()
    assert settings.batch(8).train_batch == 64
    assert settings.mesh() is None
    assert settings.scheduler is not None
    assert settings.scheduler.lr(100 + 1, 0) == 0
    assert settings.scheduler.lr(11, 0) == 3e-4
    assert "steps_per_print" in settings.ignored
    optimizer = settings.optimizer([nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is torch.optim.AdamW
    defaults = optimizer.defaults
    assert (defaults["lr"], defaults["betas"], defaults["eps"]) == (3e-4, (0.9, 0.999), 1e-8)
    assert defaults["weight_decay"] == 0
    assert pickle.loads(pickle.dumps(settings)).sharding.strategy == FULL_SHARD


def test_an_auto_without_a_value_is_named() -> None:
    for name in ANSWERS:
        with pytest.raises(UsageError, match=f"'{name}' is 'auto'"):
            read(TRAINER, auto={key: value for key, value in ANSWERS.items() if key != name})


def test_a_path_and_a_dict_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(TRAINER))
    assert read(file, auto=ANSWERS) == read(str(file), auto=ANSWERS) == read(TRAINER, auto=ANSWERS)


def test_stages() -> None:
    for stage, strategy in enumerate((NO_SHARD, SHARD_OPTIM, SHARD_GRAD_OP, FULL_SHARD)):
        assert read(zero(stage)).sharding.strategy is strategy
    assert read({}).sharding.strategy is NO_SHARD


@pytest.mark.parametrize(
    ("key", "strategy"), [("zero_hpz_partition_size", HYBRID_SHARD_OPTIM), ("mics_shard_size", HYBRID_SHARD)]
)
def test_hybrids_and_their_mesh(key: str, strategy: Any) -> None:
    settings = read(zero(3, **{key: 4}))
    assert settings.sharding.strategy is strategy
    assert settings.replicas(8) == 2
    with fake_world(8, 0):
        mesh = settings.mesh()
        assert mesh is not None
        assert (mesh.shape, mesh.mesh_dim_names) == ((2, 4), ("replicate", "shard"))
    with pytest.raises(UsageError, match="but there are 6 ranks"):
        settings.replicas(6)
    with pytest.raises(UsageError, match="needs stage 3"):
        read(zero(2, **{key: 4}))


BATCHES = [  # train, micro, accumulation as given, and what follows on four ranks
    ((32, 4, 2), (32, 4, 2)),
    ((32, 4, None), (32, 4, 2)),
    ((32, None, 2), (32, 4, 2)),
    ((None, 4, 2), (32, 4, 2)),
    ((32, None, None), (32, 8, 1)),
    ((None, 4, None), (16, 4, 1)),
]
NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def sizes(*given: int | None) -> tuple[int, ...]:
    """Return the batch sizes on four ranks from those in a file, in the order of `NAMES`."""
    batch = read({k: v for k, v in zip(NAMES, given, strict=True) if v is not None}).batch(4)
    return batch.train_batch, batch.micro_batch, batch.accumulation


def test_batch_sizes_follow_or_do_not_fit() -> None:
    for given, expected in BATCHES:
        assert sizes(*given) == expected
    for given in [(32, 4, 3), (31, 4, None), (31, None, 2), (2, None, None), (8, 16, None)]:
        with pytest.raises(UsageError, match=r"which is not .* x ranks"):
            sizes(*given)
    with pytest.raises(UsageError, match="neither"):
        sizes(None, None, 2)


def test_precision() -> None:
    both = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert read({"bf16": {"enabled": True, **both}}).sharding.precision.master is torch.bfloat16
    assert read({"bfloat16": {"enabled": True}}).sharding.precision.params is torch.bfloat16
    assert read({"fp16": {"enabled": True}}).sharding.precision.params is torch.float16
    assert read({}).sharding.precision.params is None
    assert read({"communication_data_type": "bf16"}).sharding.precision.reduce is torch.bfloat16
    assert read({"data_types": {"buffer_dtype": "bf16"}}).sharding.precision.buffers is torch.bfloat16
    assert read({"gradient_allreduce_op": "sum"}).sharding.reduce_op == "sum"


OPTIMIZERS = [
    ("AdamW", {"lr": 0.1}, torch.optim.AdamW, {"weight_decay": 0.0}),
    ("Adam", {}, torch.optim.AdamW, {"weight_decay": 0.0}),
    ("adam", {"adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.0}),
    ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),
    ("Adagrad", {"lr": 0.1}, torch.optim.Adagrad, {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    ("Adadelta", {"rho": 0.8}, torch.optim.Adadelta, {"rho": 0.8}),
]


@pytest.mark.parametrize(("name", "params", "cls", "defaults"), OPTIMIZERS)
def test_optimizers(name: str, params: dict[str, Any], cls: type, defaults: dict[str, Any]) -> None:
    choice = read({"optimizer": {"type": name, "params": params}}).optimizer
    assert choice is not None
    optimizer = choice([nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is cls
    assert {key: optimizer.defaults[key] for key in defaults} == defaults
    assert (choice.lr, choice.weight_decay) == (optimizer.defaults["lr"], optimizer.defaults["weight_decay"])


# The rates of the first steps, worked out from DeepSpeed's formulas: the first step comes before the schedule's first iteration.
RATES: list[tuple[str, dict[str, Any], list[float]]] = [
    (
        "WarmupLR",
        {"warmup_type": "linear", "warmup_max_lr": 0.4, "warmup_num_steps": 4},
        [0, 0, 0.1, 0.2, 0.3, 0.4, 0.4],
    ),
    ("WarmupLR", {"warmup_num_steps": 4, "warmup_min_lr": 0.5}, [0.5, 0.5, 0.75, 0.5 + 0.5 * 0.7924812503605781, 1, 1]),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_max_lr": 2.0}, [0, 0, 2, 2]),
    (
        "WarmupDecayLR",
        {"warmup_type": "linear", "warmup_max_lr": 1.0, "warmup_num_steps": 2, "total_num_steps": 6},
        [0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0],
    ),
    (
        "WarmupCosineLR",
        {"warmup_type": "linear", "warmup_num_steps": 2, "total_num_steps": 4, "cos_min_ratio": 0.2},
        [0, 0, 0.5, 0.6, 0.2, 0.2],
    ),
]


@pytest.mark.parametrize(("name", "params", "expected"), RATES)
def test_schedules_step_for_step(name: str, params: dict[str, Any], expected: list[float]) -> None:
    schedule = read({"scheduler": {"type": name, "params": params}}).scheduler
    assert schedule is not None
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    scheduler, found = schedule(optimizer), []
    for _ in expected:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert found == pytest.approx(expected)
    assert "_schedule" not in scheduler.state_dict()


def scales(section: dict[str, Any], overflows: list[bool]) -> list[float]:
    scaler = read({"fp16": {"enabled": True, **section}}).scaler("cpu")
    param = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scales = []
    for overflow in overflows:
        scaler.scale(param.sum()).backward()
        if overflow:
            assert param.grad is not None
            param.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def test_loss_scaling_by_deepspeeds_rules() -> None:
    bad, good = True, False
    assert scales({"initial_scale_power": 4, "loss_scale_window": 2}, [good, good, good, good]) == [16, 32, 32, 64]
    assert scales({"initial_scale_power": 4, "hysteresis": 2}, [bad, good, bad]) == [8, 8, 4]
    assert scales({"initial_scale_power": 4, "min_loss_scale": 6}, [bad, bad, good]) == [8, 6, 6]
    assert scales({"loss_scale": 128}, [bad, good, bad]) == [128, 128, 128]
    with pytest.raises(AccordionError, match="least loss scale"):
        scales({"initial_scale_power": 1}, [bad, bad, bad])
    assert read({}).scaler("cpu").state_dict() == {}


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"train_batchsize": 4}, "'train_batchsize' does not exist; did you mean 'train_batch_size'?"),
    (
        {"zero_optimization": {"stge": 3}},
        "'zero_optimization.stge' does not exist; did you mean 'zero_optimization.stage'?",
    ),
    ({"stage": 3}, "did you mean 'zero_optimization.stage'?"),
    ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "not an argument of AdamW"),
    ({"optimizer": {"type": "AdamW", "parms": {}}}, "did you mean 'optimizer.params'?"),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup": 1}}},
        "does not exist; did you mean 'scheduler.params.warmup_type'?",
    ),
    ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 1}}}, "is not a parameter of WarmupLR"),
    ({"zero_optimization": True}, "is a section and takes keys"),
    ({"fp16": {"enabled": "yes"}}, "takes true or false"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "same value"),
    ({"gradient_clipping": -1}, "at least 0"),
    ({"gradient_clipping": "much"}, "at least 0"),
    ({"gradient_accumulation_steps": 1.5}, "whole number"),
    ({"train_batch_size": 0}, "at least 1"),
    (zero(4), "valid: 0, 1, 2, 3"),
    (zero("auto"), "does not take 'auto'"),
    (zero(3, zero_hpz_partition_size=2, mics_shard_size=2), "keep one"),
    ({"communication_data_type": "fp8"}, "valid: fp32, bf16, fp16"),
    ({"gradient_allreduce_op": "max"}, "valid: mean, sum"),
    ({"optimizer": {"type": "AdmW"}}, "did you mean 'Adam"),
    ({"optimizer": {"params": {"lr": 1}}}, "takes a name"),
    ({"optimizer": {"type": "OneBitAdam"}}, "torch.optim lacks it"),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}}, "OneCycleLR"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1.0, 3.0]}}}, "takes a number"),
    ({"scheduler": {"type": "Warmup"}}, "did you mean 'WarmupLR'?"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, "needs scheduler.params.total_num_steps"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "whole number of at least 1"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}, "valid: log, linear"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}, "no optimizer with an lr"),
    (zero(3, offload_optimizer={"device": "nvme"}), "nvme_path is None; device 'nvme' needs a folder"),
    (zero(3, offload_param={"device": "nvme"}), "offload_param.nvme_path is None; device 'nvme' needs a folder"),
    (zero(2, offload_param=NVME), "parameters to 'nvme' and the optimizer to 'none' in stage 2"),
    (zero(3, offload_param={"device": "disk"}), "'disk'; valid: none, cpu, nvme"),
    (zero(2, offload_param=CPU), "in stage 2"),
    (zero(0, offload_optimizer=CPU), "stage 1 or higher"),
    (zero(3, cpu_offload=True), "it is the older name"),
]


def test_mistakes_are_named_on_one_line() -> None:
    for content, expected in MISTAKES:
        with pytest.raises(UsageError) as error:
            read(content)
        assert expected in str(error.value)
        assert "\n" not in str(error.value)


def nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    result: dict[str, Any] = value
    return result


def test_unsupported_keys_are_refused_by_name_unless_off() -> None:
    for name, row in KEYS.items():
        if row.refused:
            with pytest.raises(UsageError, match=rf"'{name}'.* is not supported: ") as error:
                read(nested(name, {"enabled": True} if name in SECTIONS else "wanted"))
            assert row.refused in str(error.value)
            for off in (None, False, *row.off, *([{"enabled": False}] if name in SECTIONS else [])):
                read(nested(name, off))


def test_unneeded_keys_are_accepted_and_listed() -> None:
    for name, row in KEYS.items():
        if row.not_needed:
            ignored = read(nested(name, {"anything": 1} if name in SECTIONS else "auto")).ignored
            assert [key for key in ignored if key == name or key.startswith(f"{name}.")], name


OFFLOADED = [
    (zero(3), Offload()),
    (zero(3, offload_param={"device": "none"}, offload_optimizer={"device": "none"}), Offload()),
    (zero(1, offload_optimizer={**CPU, "pin_memory": True}), Offload(optimizer="host")),
    (
        zero(3, offload_optimizer=CPU, offload_param={**CPU, "buffer_count": 5}),
        Offload(params="host", optimizer="host"),
    ),
    (
        zero(3, offload_optimizer={**NVME, "pin_memory": True, "fast_init": False}, offload_param=CPU),
        Offload(params="host", optimizer="disk:/scratch"),
    ),
    (
        zero(3, offload_optimizer=NVME, offload_param={**NVME, "nvme_path": "/rows", "max_in_cpu": 1e9}),
        Offload(params="disk:/rows", optimizer="disk:/scratch"),
    ),
    (zero(3, offload_param=CPU), Offload(params="host")),
]


def test_offload_devices() -> None:
    for content, offload in OFFLOADED:
        assert read(content).sharding.offload == offload


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    for text, expected in (("{", "is not valid JSON"), ("[]", "is not a JSON object")):
        file.write_text(text)
        with pytest.raises(UsageError, match=expected):
            read(file)
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="not list"):
        read([])  # type: ignore[arg-type]
