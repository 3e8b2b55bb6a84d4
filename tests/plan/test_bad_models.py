"""Models and numbers that cannot be planned, or not as they seem: each is told of in one sentence."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import accordion as acc
from accordion import _torch, cli
from accordion.plan.hardware import LARGEST_GPUS, Cluster
from accordion.plan.result import Plan
from accordion.plan.search.suggest import attempts
from tests.plan.builders import planned as planned_of
from tests.plan.builders import space

ONE = "--strategy full_shard --checkpoint-activations none --micro-batch 1 --offload none --units blocks"
FIXED = f"--seq 64 --gpus 2 --json {ONE}"
LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 128, "max_position_embeddings": 64,
}  # fmt: skip


def planned(tmp_path, capsys, config, more=""):
    """(exit code, stdout, stderr) of the command on a configuration."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = cli.main(["plan", "--model", str(tmp_path), *FIXED.split(), *more.split()])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_model_without_layers_is_refused(tmp_path, capsys):
    code, _, said = planned(tmp_path, capsys, {**LLAMA, "num_hidden_layers": 0})
    assert code == cli.BAD_INPUT
    assert "has 0 layers (num_hidden_layers); it takes 1 or more" in said


def test_an_encoder_is_planned_as_one_and_says_so(tmp_path, capsys):
    bert = {
        "model_type": "bert", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "max_position_embeddings": 64,
    }  # fmt: skip
    code, out, _ = planned(tmp_path, capsys, bert)
    assert code == 0
    assert "planned as BertForMaskedLM" in json.loads(out)["assumed"]["remarks"][0]


def test_a_loop_over_tokens_is_no_prediction_of_a_fused_kernel(tmp_path, capsys):
    mamba = {"model_type": "mamba", "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    code, out, _ = planned(tmp_path, capsys, mamba, "--seq 8")
    assert code == 0
    assert "MambaMixer: timed by a reference loop" in json.loads(out)["assumed"]["remarks"][0]


class Clashes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.reshape(-1, 4)).sum()


def test_of_shapes_that_clash_the_log_says_nothing(tmp_path, capsys, caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError):
        planned_of(
            Clashes(), lambda model, x: model(x), torch.zeros(2, 8), gpus=2, strategy="full_shard", micro_batch=1
        )
    assert caplog.text == ""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    assert not log.disabled


def total(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().sum()


def planned_alone(model: nn.Module) -> Plan:
    fixed = {"gpus": 2, "strategy": "full_shard", "checkpoint_activations": "none", "offload": "none"}
    return planned_of(model, total, torch.zeros(4, 32), **fixed)


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


@pytest.fixture(scope="module")
def plain() -> Plan:
    return planned_alone(narrow())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", [pytest.param("torch.compile", marks=pytest.mark.slow), "Module.compile"])
def test_a_compiled_model_is_planned_as_it_was_written(how, plain):
    model = narrow()
    if how == "torch.compile":
        model = torch.compile(model)
    else:
        model.compile()
    made = planned_alone(model)
    assert made.chosen.memory.peak.num_bytes == plain.chosen.memory.peak.num_bytes
    assert "compiled" in made.as_dict()["assumed"]["remarks"][0]
    assert plain.as_dict()["assumed"]["remarks"] == []
    assert _torch.without_compile(model) is not None


def test_meshes_of_their_own_are_not_planned():
    with pytest.raises(acc.UsageError, match=r"meshes is set, but a plan creates its own.*expert_parallel"):
        planned_of(nn.Linear(4, 4), total, torch.zeros(4, 4), gpus=2, meshes={"*": None})


def test_more_gpus_than_any_world_has_are_not_tried():
    fixed = {"strategies": ["full_shard"], "checkpointing": ["full"], "micro_batches": [1], "offloads": ["none"]}
    looked = space(**fixed, cluster=Cluster(gpus=LARGEST_GPUS // 4))
    tried = [attempt.cluster.num_gpus for _, attempt in attempts(looked)]
    assert max(tried) == LARGEST_GPUS
    with pytest.raises(acc.UsageError, match=r"gpus is 1,000,000; it takes 1 to 65,536"):
        planned_of(nn.Linear(4, 4), total, torch.zeros(4, 4), gpus=1_000_000)


def test_a_hybrid_whose_copies_nobody_fixed_does_not_look_at_other_gpus():
    fixed = {
        "strategy": "hybrid_shard",
        "checkpoint_activations": "none",
        "offload": "none",
        "units": acc.only_blocks(),
    }
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)])
    made = planned_of(model, total, torch.zeros(4, 32), gpus=32, **fixed)
    assert {c.choice.gpus for c in made.found.candidates} == {32}
    assert {c.choice.replicas for c in made.found.candidates} == {4, 2}
    assert made.found.fewest is None


def test_a_model_that_is_distributed_already_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    dist.init_process_group("fake", store=_torch.fake_store(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"1": ColwiseParallel()})
    finally:
        dist.destroy_process_group()
    with pytest.raises(
        acc.UsageError, match=r"parameter '1.weight' is a DTensor already, .*cannot be planned.*expert_"
    ):
        planned_of(model, total, torch.zeros(2, 8), gpus=2)
