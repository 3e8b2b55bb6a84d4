"""Models that are planned: presets, other kinds of models, and those that cannot be planned, or not as they seem."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import accordion as acc
from accordion import _torch
from accordion.models.llama import PUBLISHED, LlamaShape
from accordion.plan.result import Plan
from tests.plan.builders import ONE_CHOICE, config_in, peak, planned, total

NUM_PARAMS = {  # parameters, by the makers' model cards and indices of weights
    "llama3-405b": 405_853_388_800,
    "llama3-70b": 70_553_706_496,
    "llama3-8b": 8_030_261_248,
    "llama3-3b": 3_212_749_824,
    "llama3-1b": 1_235_814_400,
    "llama2-13b": 13_015_864_320,
    "llama2-7b": 6_738_415_616,
    "mistral-7b": 7_248_023_552,
}


def elements(s: LlamaShape) -> int:
    head = s.hidden // s.heads
    block = 2 * s.hidden**2 + 2 * s.hidden * s.kv_heads * head + 3 * s.hidden * s.mlp + 2 * s.hidden
    return s.layers * block + s.hidden + s.vocab * s.hidden * (1 if s.tied else 2)


def test_presets_are_as_large_as_their_makers_say():
    assert {name: elements(shape) for name, shape in PUBLISHED.items()} == NUM_PARAMS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, "can be built, but not run: "),
        ({"num_hidden_layers": 0}, "has 0 layers (num_hidden_layers); it takes 1 or more"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_in_one_line(tmp_path, changes, message):
    with pytest.raises(acc.UsageError) as raised:
        planned(config_in(tmp_path, **changes), **ONE_CHOICE, seq=64)
    assert str(raised.value).startswith("model ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("model_type", "changes", "remark"),
    [
        ("bert", {"max_position_embeddings": 64}, "planned as BertForMaskedLM"),
        ("mamba", {"num_hidden_layers": 1, "state_size": 4}, "MambaMixer: timed by a reference loop"),
    ],
)
def test_a_remark_says_how_a_model_is_planned(tmp_path, model_type, changes, remark):
    plan = planned(config_in(tmp_path, model_type, **changes), **ONE_CHOICE, seq=8)
    assert remark in plan.as_dict()["assumed"]["remarks"][0]


def test_a_folder_of_another_kind_of_model_says_how_to_plan_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "wav2vec2"}')
    message = r"type 'wav2vec2', .*from Python, with accordion\.Workload\(model, loss, batch\)"
    with pytest.raises(acc.UsageError, match=message):
        planned(tmp_path, gpus=2)


@pytest.mark.slow
def test_an_encoder_decoder_is_planned():
    model = nn.Transformer(64, 4, 7, 3, 128, 0.0, batch_first=True)
    batch = torch.zeros(2, 16, 64), torch.zeros(2, 8, 64)
    fixed = {**ONE_CHOICE, "units": None, "offload": None}
    data = planned(model, lambda model, pair: model(*pair).square().mean(), batch, **fixed).as_dict()
    assert data["fits"] is True
    assert data["model"]["num_params"] == sum(p.numel() for p in model.parameters())
    assert data["breakdown_bytes"]["parameters"] == pytest.approx(4 * data["model"]["num_params"] / 2, rel=0.15)


# -- models that cannot be planned, or not as they seem


def test_shapes_that_do_not_match_log_nothing(caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError):
        planned(nn.Linear(4, 8), total, torch.zeros(2, 8), **ONE_CHOICE)
    assert caplog.text == ""
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


def planned_alone(model: nn.Module, **more: object) -> Plan:
    return planned(model, total, torch.zeros(4, 32), **{**ONE_CHOICE, **more})


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", [pytest.param("torch.compile", marks=pytest.mark.slow), "Module.compile"])
def test_a_compiled_model_is_planned_as_it_was_written(how):
    plain, model = planned_alone(narrow(), units=None), narrow()
    if how == "torch.compile":
        model = torch.compile(model)
    else:
        model.compile()
    compiled = planned_alone(model, units=None)
    assert peak(compiled) == peak(plain)
    assert "compiled" in compiled.as_dict()["assumed"]["remarks"][0]
    assert plain.as_dict()["assumed"]["remarks"] == []
    assert _torch.without_compile(model) is not None


def test_a_hybrid_whose_copies_nobody_fixed_does_not_look_at_other_gpus():
    plan = planned_alone(nn.Sequential(narrow(), narrow()), gpus=32, strategy="hybrid_shard")
    assert {c.choice.gpus for c in plan.found.candidates} == {32}
    assert {c.choice.replicas for c in plan.found.candidates} == {4, 2}
    assert plan.found.fewest is None


def test_a_model_that_is_distributed_already_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    dist.init_process_group("fake", store=_torch.fake_store(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"1": ColwiseParallel()})
    finally:
        dist.destroy_process_group()
    message = r"parameter '1.weight' is a DTensor already, .*cannot be planned.*expert_"
    with pytest.raises(acc.UsageError, match=message):
        planned(model, total, torch.zeros(2, 8), gpus=2)
