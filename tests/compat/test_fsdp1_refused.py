"""compat.fsdp1 has and documents every name of torch's FullyShardedDataParallel, and refuses what is not supported."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accordion.compat import fsdp1, fsdp2
from accordion.compat.fsdp1 import FullyShardedDataParallel as FSDP  # noqa: N817
from accordion.compat.fsdp1 import (
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from accordion.compat.fsdp1 import wrap as wrapping
from accordion.errors import UsageError
from tests.compat.test_fsdp1 import (
    EXAMPLES,
    SIZE,
    seeded,
)


def test_every_name_of_torch_is_here():
    of_both = set(torch_fsdp.__all__) - {"FlatParameter"}
    assert of_both - set(fsdp2.__all__) <= set(fsdp1.__all__)
    assert set(torch_wrap.__all__) == set(wrapping.__all__)
    from accordion.compat.fsdp1 import fully_sharded_data_parallel as ours

    names = {n for n in vars(torch_fsdp.FullyShardedDataParallel) if not n.startswith("_")}
    assert names <= set(dir(FSDP)), names - set(dir(FSDP))
    assert set(torch_fsdp.fully_sharded_data_parallel.__all__) - set(ours.__all__) <= {"FlatParameter"}
    parameters = [list(inspect.signature(cls).parameters) for cls in (FSDP, torch_fsdp.FullyShardedDataParallel)]
    assert parameters[0] == parameters[1]


def test_every_name_is_in_the_documentation():
    written = (EXAMPLES.parents[1] / "docs" / "compat.md").read_text()
    section = written[written.index("## `accordion.compat.fsdp1`") : written.index("## `accordion.compat.deepspeed`")]
    public = {name for name in vars(torch_fsdp.FullyShardedDataParallel) if not name.startswith("_")}
    arguments = set(inspect.signature(FSDP).parameters) - {"module"}
    for name in {*fsdp1.__all__, *wrapping.__all__, *public, *arguments, "FlatParameter"}:
        assert f"`{name}`" in section, name


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def refused(mesh: DeviceMesh) -> list[str]:
    net = seeded()
    said: list[str] = []
    cases: list[Any] = [
        lambda: FSDP("net"),  # type: ignore[arg-type]
        lambda: FSDP(net.blocks),
        lambda: FSDP(net, sharding_strategy="FULL_SHARD"),  # type: ignore[arg-type]
        lambda: FSDP(net, cpu_offload=True),  # type: ignore[arg-type]
        lambda: FSDP(net, mixed_precision=MixedPrecision(keep_low_precision_grads=True)),
        lambda: FSDP(net, process_group=mesh.get_group(), device_mesh=mesh),
        lambda: FSDP(net, ignored_states=["first"]),  # type: ignore[list-item]
        lambda: FSDP(net, ignored_states=[net.first], ignored_modules=[net.first]),
        lambda: FSDP(net, auto_wrap_policy=3),
        lambda: FSDP(nn.ReLU(), device_mesh=mesh).state_dict(),
        lambda: FSDP(seeded(), device_mesh=DeviceMesh("cuda", [0, 1], _init_backend=False), auto_wrap_policy=SIZE),
        lambda: FSDP(net, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh).state_dict(),
        lambda: FSDP(net, sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=mesh.get_group()).state_dict(),
        lambda: FSDP(nn.Sequential(FSDP(nn.Linear(2, 2)), nn.Linear(2, 2)), auto_wrap_policy=SIZE),
        lambda: FSDP(nn.Sequential(FSDP(seeded(), auto_wrap_policy=SIZE, device_mesh=mesh))),
        lambda: FSDP(
            nn.Sequential(FSDP(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.NO_SHARD)), device_mesh=mesh
        ).state_dict(),
        lambda: FSDP.set_state_dict_type(FSDP(seeded(), device_mesh=mesh), StateDictType.LOCAL_STATE_DICT),
        lambda: FSDP.set_state_dict_type(
            FSDP(seeded(), device_mesh=mesh), StateDictType.FULL_STATE_DICT, ShardedStateDictConfig()
        ),
        lambda: FSDP.get_state_dict_type(net),
        lambda: FSDP.summon_full_params(FSDP(seeded(), device_mesh=mesh), rank0_only=True).__enter__(),
        lambda: FSDP(seeded(), device_mesh=mesh).register_comm_hook(None, None),
        lambda: FSDP.rekey_optim_state_dict({}, None, None),
        lambda: FSDP.optim_state_dict_to_load(plain := FSDP(seeded(), device_mesh=mesh), sgd(plain), {}),
        lambda: FSDP.optim_state_dict(FSDP(seeded(), device_mesh=mesh), torch.optim.SGD(net.parameters(), lr=1.0)),
    ]
    for case in cases:
        with pytest.raises(UsageError) as error:
            case()
        said.append(str(error.value))
        assert "\n" not in said[-1]
    return said


SAID = [
    "not str", "has no forward", "it takes ShardingStrategy", "it takes CPUOffload", "keep_low_precision_grads",
    "pass one of them", "contains a str", "pass everything in ignored_states", "auto_wrap_policy is 3", "has no parameters",
    "one of 'cuda' devices", "has 1 axes", "takes two",
    "pass a policy, or wrap by hand", "has an engine already", "pass the same to all",
    "LOCAL_STATE_DICT is not supported", "takes a FullStateDictConfig", "contains none", "writeback=False", "no flat gradient",
    "qualified names", "empty on this rank", "that is not in the model",
]  # fmt: skip


def test_bad_input_is_named_on_every_rank(world):
    for said in world.run(2, refused):
        for expected, found in zip(SAID, said, strict=True):
            assert expected in found
