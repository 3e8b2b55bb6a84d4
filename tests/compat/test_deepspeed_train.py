"""`deepspeed.initialize`, and `accordion train --deepspeed`: a flag that contradicts the file is an error."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from accordion.compat import deepspeed
from accordion.compat.deepspeed import read
from accordion.config import FULL_SHARD, Offload
from accordion.errors import UsageError
from accordion.sharding import precision_named
from accordion.state import synchronize
from accordion.train import command
from accordion.train.config import ShardConfig, as_yaml
from accordion.train.deepspeed import translated
from accordion.train.rates import share_at
from tests.compat.test_deepspeed_config import CPU, NVME, TRAINER, zero
from tests.devices import device
from tests.support.ranked import on_world

# -- `initialize`; tests/compat/test_migrate.py compares every ZeRO stage with DeepSpeed's program


@on_world(4)
def test_initialize_takes_the_callers_objects(mesh: DeviceMesh) -> None:
    """`initialize` takes the caller's optimizer, scheduler and parameter groups, and refuses unsupported arguments."""
    config = {"train_micro_batch_size_per_gpu": 2, **zero(3), "bf16": {"enabled": True}}
    deepspeed.init_distributed("gloo")  # there is a process group
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    own = torch.optim.SGD([{"params": net[0].parameters(), "lr": 0.5}, {"params": net[1].parameters()}], 0.1, 0.9)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4, device=device()))
    engine, optimizer, loader, _ = deepspeed.initialize(
        model=net,
        optimizer=own,
        config=config,
        training_data=data,
        lr_scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1),
    )
    assert optimizer is own
    before = [p.full_tensor() for p in net.parameters()]
    for (x,) in loader:
        engine.backward(engine(x).square().mean())
        engine.step()
    assert engine.global_steps == 2
    assert engine(x).dtype == torch.bfloat16
    assert engine.get_lr() == pytest.approx([0.5 * 0.01, 0.1 * 0.01])
    assert not any(torch.equal(a, p.full_tensor()) for a, p in zip(before, net.parameters(), strict=True))
    for match, options in (
        ("no configuration", {"model": net}),
        ("not NoneType", {"config": config}),
        ("mpu=", {"model": torch.nn.Linear(2, 2), "config": config, "mpu": object()}),
        ("names no optimizer", {"model": torch.nn.Linear(2, 2), "config": config}),
        ("with state", {"model": torch.nn.Linear(2, 2), "config": config, "optimizer": own}),
    ):
        with pytest.raises(UsageError, match=match):
            deepspeed.initialize(**options)


@on_world(4)
def test_an_optimizer_made_by_a_function_steps_states_on_disk(mesh: DeviceMesh, tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, **zero(3, offload_optimizer={**NVME, "nvme_path": str(tmp_path)})}
    net = torch.nn.Linear(4, 2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=partial(torch.optim.AdamW, lr=0.5), config=config)
    before = net.weight.full_tensor()
    engine.backward(engine(torch.randn(2, 4, device=device())).square().mean())
    engine.step()
    synchronize(engine)
    assert not torch.equal(before, net.weight.full_tensor())


def test_arguments_of_a_command_line():
    args = deepspeed.add_config_arguments(ArgumentParser()).parse_args(
        ["--deepspeed", "--deepspeed_config", "none.json"]
    )
    with pytest.raises(UsageError, match=r"'none.json' cannot be read"):
        deepspeed.initialize(args=args, model=torch.nn.Linear(2, 2))


# -- `accordion train --deepspeed`


def run_of(tmp_path: Path, content: dict[str, Any], *words: str, num_ranks: int = 2) -> Any:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content))
    return translated(*command.read(["--train.deepspeed", str(file), *words]), num_ranks)


def test_a_run_uses_the_settings_of_the_file(tmp_path: Path) -> None:
    content = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        **zero(3, zero_hpz_partition_size=2),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.3}},
    }
    config = run_of(tmp_path, content, num_ranks=4)
    assert (config.train.micro_batch, config.train.accumulate, config.train.clip) == (2, 2, 0.5)
    assert (config.train.lr, config.train.weight_decay) == (0.02, 0.3)
    assert (config.shard.strategy.name, config.shard.replicas) == ("hybrid_shard_optim", 2)
    assert config.shard.precision == precision_named("bf16")
    assert config.shard.offload == Offload()
    offloaded = Offload(params="host", optimizer="disk:/scratch")
    assert run_of(tmp_path, zero(3, offload_optimizer=NVME, offload_param=CPU)).shard.offload == offloaded
    flag = ["--shard.offload", "optimizer=host"]
    assert run_of(tmp_path, zero(3), *flag).shard.offload == Offload(optimizer="host")


def test_missing_keys_have_deepspeeds_default_or_a_flags_value(tmp_path: Path) -> None:
    config = run_of(tmp_path, {})
    assert config.shard == ShardConfig(strategy="no_shard", precision="fp32")
    assert config.train.clip == 0
    assert (config.train.micro_batch, config.train.accumulate, config.train.lr) == (8, 1, 1e-3)
    config = run_of(tmp_path, {}, "--shard.strategy", "full_shard", "--train.clip=1.0", "--train.accumulate", "3")
    assert (config.shard.strategy, config.train.clip, config.train.accumulate) == (FULL_SHARD, 1.0, 3)


def test_autos_are_filled_from_the_run(tmp_path: Path) -> None:
    flags = ["--train.lr", "0.25", "--train.accumulate", "3", "--train.warmup", "0", "--shard.precision", "fp16"]
    config = run_of(tmp_path, TRAINER, *flags)
    assert (config.train.lr, config.train.accumulate, config.shard.precision) == (0.25, 3, precision_named("fp16"))
    assert config.shard.strategy == FULL_SHARD
    assert run_of(tmp_path, TRAINER).shard.precision is None


CONFLICTS = [
    ({"train_micro_batch_size_per_gpu": 4}, ["--train.micro_batch", "2"], "train.micro_batch is 2, and"),
    ({"train_micro_batch_size_per_gpu": 4}, ["--train.micro_batch=8"], "train.micro_batch is 8, and"),
    (zero(2), ["--shard.strategy", "full_shard"], "shard_grad_op"),
    ({"bf16": {"enabled": True}}, ["--shard.precision", "fp32"], "mean"),
    (
        zero(1, offload_optimizer=CPU),
        ["--shard.offload=optimizer=disk:/s"],
        "shard.offload is optimizer=disk:/s, and zero_optimization.offload_optimizer.device in",
    ),
    ({"gradient_clipping": 0.5}, ["--train.clip", "1.0"], "train.clip is 1.0, and gradient_clipping in"),
    ({"optimizer": {"type": "AdamW"}}, ["--train.lr", "0.5"], "optimizer.type"),
    ({"scheduler": {"type": "WarmupLR"}}, ["--train.warmup", "7"], "1000"),
    ({"optimizer": {"type": "Adafactor"}}, [], "whose step is not elementwise"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 0}}}, [], "train.lr is 0"),
    ({"train_batch_size": 3}, [], "x ranks"),
]


@pytest.mark.parametrize(("content", "words", "expected"), CONFLICTS)
def test_a_conflict_of_a_flag_and_the_file_is_one_sentence(
    tmp_path: Path, content: dict[str, Any], words: list[str], expected: str
) -> None:
    with pytest.raises(UsageError) as error:
        run_of(tmp_path, content, *words)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_file_conflicts_too_and_its_record_does_not(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("train: {clip: 1.0}\n")
    with pytest.raises(UsageError, match=r"train.clip is 1.0, and"):
        run_of(tmp_path, {"gradient_clipping": 0.5}, "--config", str(run))
    recorded = run_of(tmp_path, {"gradient_clipping": 0.5, **zero(1)})
    run.write_text(as_yaml(recorded))
    assert translated(*command.read(["--config", str(run)]), 2) == recorded


def test_the_rates_of_a_run_are_those_of_the_file(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}}
    config = run_of(tmp_path, {"scheduler": scheduler})
    schedule = read({"scheduler": scheduler}).scheduler
    assert [schedule.lr(step - 1, config.train.lr) for step in (1, 2, 3, 6)] == [0, 0, 0.1, 0.4]
    assert share_at(2, config.train) == 2 / 4


def test_deepspeed_is_short_for_its_key(tmp_path: Path) -> None:
    assert command.read(["--deepspeed", "a.json"])[0] == command.read(["--train.deepspeed=a.json"])[0]
    assert command.read(["--deepspeed=a.json"])[0].train.deepspeed == "a.json"
