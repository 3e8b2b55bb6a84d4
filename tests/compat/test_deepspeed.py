"""`deepspeed.initialize` trains; tests/compat/test_migrate.py compares every ZeRO stage with DeepSpeed's program."""

from __future__ import annotations

from argparse import ArgumentParser

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import accordion as acc
from accordion.compat import deepspeed
from tests.devices import device
from tests.support.ranked import on_world


@on_world(4)
def test_initialize_takes_the_callers_objects(mesh: DeviceMesh) -> None:
    """`initialize` takes the caller's optimizer, scheduler and parameter groups, and refuses unsupported arguments."""
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
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
    assert engine.get_lr() == pytest.approx([0.5 * 0.01, 0.1 * 0.01])
    assert not any(torch.equal(a, p.full_tensor()) for a, p in zip(before, net.parameters(), strict=True))
    for match, options in (
        ("no configuration", {"model": net}),
        ("not NoneType", {"config": config}),
        ("mpu=", {"model": torch.nn.Linear(2, 2), "config": config, "mpu": object()}),
        ("names no optimizer", {"model": torch.nn.Linear(2, 2), "config": config}),
        ("with state", {"model": torch.nn.Linear(2, 2), "config": config, "optimizer": own}),
    ):
        with pytest.raises(acc.UsageError, match=match):
            deepspeed.initialize(**options)


def test_arguments_of_a_command_line():
    args = deepspeed.add_config_arguments(ArgumentParser()).parse_args(
        ["--deepspeed", "--deepspeed_config", "none.json"]
    )
    with pytest.raises(acc.UsageError, match=r"'none.json' cannot be read"):
        deepspeed.initialize(args=args, model=torch.nn.Linear(2, 2))
