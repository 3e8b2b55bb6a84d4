"""Options for common trainings: each changes the trace by as much as arithmetic says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import accordion as acc
from accordion.plan.events import Alloc
from accordion.plan.hardware import GPUS
from accordion.plan.result import Plan
from accordion.plan.trained_models import LOSSES, Kernels
from tests.plan import builders
from tests.plan.builders import OFFLOADS, ONE_CHOICE, config_in, held, peak, sent

SEQ, WIDTH, LAYERS, MLP, VOCAB = 512, 256, 2, 768, 32000
LOGITS = 4 * SEQ * VOCAB  # bytes in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": MLP}
    return config_in(tmp_path_factory.mktemp("model"), **sizes, max_position_embeddings=SEQ)


def planned(folder, **options: object) -> Plan:
    return builders.planned(folder, seq=SEQ, **{**ONE_CHOICE, **options})


@pytest.fixture(scope="module")
def plain(folder) -> Plan:
    return planned(folder)


def test_losses_differ_in_the_logits_and_rows_of_the_head_that_they_hold(folder):
    ways = {loss: planned(folder, micro_batch=4, units=None, kernels=Kernels(loss=loss)) for loss in LOSSES}
    plain, fused, chunked, rows = ways.values()
    # In float32: log-probabilities, their gradient, and that of the copy.
    assert peak(plain) - peak(fused) >= 1.9 * 4 * LOGITS
    for other in (chunked, rows):
        assert not [e for e in other.log.events if isinstance(e, Alloc) and e.num_bytes in (4 * LOGITS, 2 * LOGITS)]
    flops = {loss: way.chosen.steps["middle"].flops for loss, way in ways.items()}
    assert flops["plain"] == pytest.approx(flops["fused"], rel=1e-3) == pytest.approx(flops["chunked"], rel=1e-3)
    product = 2 * 4 * SEQ * WIDTH * VOCAB  # the logits are computed again in the backward
    assert flops["head_rows"] - flops["plain"] == pytest.approx(product, rel=0.01)
    head = 2 * WIDTH * VOCAB  # bytes in bf16
    assert sum(sent(rows, "gather")) - sum(sent(chunked, "gather")) == pytest.approx(head, rel=0.01)
    assert reduced(rows) == pytest.approx(reduced(chunked), rel=0.01)
    with pytest.raises(acc.UsageError, match="planned with engine accordion alone; take --loss chunked"):
        planned(folder, engine="fsdp2", kernels=Kernels(loss="head_rows"))


def test_attention_kernels_differ_in_time_and_eager_in_memory_too(folder, plain):
    seconds = {}
    for kernel in ("fa1", "fa3"):
        plan = planned(folder, kernels=Kernels(attention=kernel), gpu=replace(GPUS["h100"], tflops=1.0))
        assert peak(plan) == peak(plain)
        seconds[kernel] = plan.chosen.steps["middle"].by_kind["attention"]
    assert seconds["fa1"] > 1.1 * seconds["fa3"]
    eager = planned(folder, kernels=Kernels(attention="eager"))
    assert peak(eager) > peak(plain)
    assert "attention" not in eager.chosen.steps["middle"].by_kind


def reduced(plan: Plan) -> int:
    return sum(sent(plan, "scatter_sum", "exchange"))


def test_gradients_reduced_in_bf16_halve_the_messages(folder):
    wide, narrow = (
        planned(folder, gpus=16, precision=acc.Precision(params=torch.bfloat16, reduce=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert reduced(narrow) * 2 == reduced(wide)


def test_optimizer_states_in_fewer_bits_take_fewer_bytes(folder, plain):
    own = plain.num_params / 2  # of two ranks
    for optimizer, each in (("adamw", 8), ("adamw_ema", 12), ("adamw_8bit", 2 + 8 / 256), ("sgd", 4)):
        plan = plain if optimizer == "adamw" else planned(folder, optimizer=optimizer)
        assert held(plan, "optimizer") == pytest.approx(own * each, rel=0.01), optimizer


def test_bf16_pure_has_no_masters(folder, plain):
    pure = planned(folder, precision=acc.Precision(params=torch.bfloat16, master=None), kernels=Kernels(pure=True))
    for category in ("parameters", "optimizer"):
        assert held(pure, category) == pytest.approx(held(plain, category) / 2, rel=0.01)


def test_lora_trains_only_adapters_and_frozen_weights_may_have_four_bits(folder, plain):
    lora, narrow, double = (
        planned(folder, kernels=Kernels(lora_rank=8, quantize=bits)) for bits in (None, "nf4", "nf4-double")
    )
    per_block = 4 * (WIDTH + WIDTH) + 3 * (WIDTH + MLP)  # attention's four products and the three of the MLP
    trained = 8 * per_block * LAYERS
    assert held(lora, "optimizer") == pytest.approx(8 * trained / 2, rel=0.02)
    assert held(plain, "optimizer") > 20 * held(lora, "optimizer")
    frozen = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * MLP) / 2
    assert held(lora, "parameters") - held(narrow, "parameters") == pytest.approx(frozen * (4 - 0.5 - 4 / 64), rel=0.02)
    assert held(narrow, "parameters") - held(double, "parameters") == pytest.approx(frozen * 3 / 64, rel=0.05)
    flops = [p.chosen.steps["middle"].flops for p in (plain, lora, narrow)]
    assert flops[0] > 1.2 * flops[1]  # no gradients of weights
    assert flops[1] == pytest.approx(flops[2], rel=1e-3)
    one = planned(folder, kernels=Kernels(lora_rank=8, lora_targets="q_proj,v_proj"))
    assert held(one, "optimizer") < held(lora, "optimizer") / 2
    with pytest.raises(acc.UsageError, match=r"lora_targets names 'q_prj'.*q_proj"):
        planned(folder, kernels=Kernels(lora_rank=8, lora_targets="q_prj"))


def test_the_parts_of_the_time_sum_up_to_the_step(folder, plain):
    parts = plain.as_dict()["time"]
    step = plain.chosen.steps["middle"]
    assert sum(p["seconds"] for p in parts["by_kind"] if not p["hidden"]) == pytest.approx(step.seconds, rel=1e-6)
    assert sum(p["seconds"] for p in parts["by_unit"]) == pytest.approx(step.seconds, rel=1e-6)
    assert sum(p["waited"] for p in parts["by_unit"]) == pytest.approx(step.exposed_s, rel=1e-6, abs=1e-9)
    assert any(f"model.layers.*, {LAYERS} of them" in p["name"] for p in parts["by_unit"])
    four = planned(folder, accumulate=4)
    kinds, step = four.as_dict()["time"]["by_kind"], four.chosen.steps["middle"]
    assert sum(p["seconds"] for p in kinds if not p["hidden"]) == pytest.approx(step.seconds, rel=0.02)
    assert step.by_kind["products"] == pytest.approx(4 * plain.chosen.steps["middle"].by_kind["products"], rel=1e-3)


def test_tokens_and_a_price_give_the_cost_of_a_run(folder, plain):
    plan = planned(folder, tokens=1e9, price=2.5)
    cost = plan.run_cost
    hours, gpu_hours = cost["hours"], cost["gpu_hours"]
    slow = plan.chosen.tokens_per_s(SEQ, "low")
    assert hours[1] == pytest.approx(1e9 / (2 * slow) / 3600)
    assert gpu_hours[1] == pytest.approx(2 * hours[1])
    assert cost["dollars"] == pytest.approx([2.5 * h for h in gpu_hours])
    assert plain.run_cost is None


def test_the_command_takes_all_options_of_workload_and_cluster(folder, capsys):
    more = "--loss fused --gpu h100,price=2 --tokens 1e9 --seq 256 --lora 8,targets=q_proj+v_proj --precision bf16,reduce=bf16"
    data = json.loads(builders.command(capsys, folder, *more.split(), "--json"))
    inputs = data["inputs"]
    assert (inputs["seq"], inputs["loss"], inputs["lora_rank"]) == (256, "fused", 8)
    assert (inputs["precision"]["params"], inputs["precision"]["reduce"]) == ("bfloat16", "bfloat16")
    assert set(inputs["versions"]) >= {"accordion", "torch", "transformers", "python"}
    assert data["run"]["dollars"] == pytest.approx([2 * hours for hours in data["run"]["gpu_hours"]])
    shown = builders.command(capsys, folder, *more.split())
    for part in ("where the time goes, by kind", "where the bytes go", "dollars"):
        assert part in shown


WITHOUT_HYBRIDS = "without hybrid strategies, replicas and secondary shards"
REFUSED = [  # a type of model, options and the error
    ("llama", {"gpu": "v100-16"}, "does not compute with bf16; take --precision fp16"),
    ("llama", {"engine": "fsdp2", "reduce_op": "sum"}, "fsdp2 takes units, strategy"),
    ("llama", {"meshes": {"*": None}}, "meshes is set, but a plan creates its own.*expert_parallel"),
    ("llama", {"sequence": 0}, "sequence is 0; it takes 1 or more"),
    ("llama", {"sequence": 3}, "sequence is 3, which does not divide 16 GPUs; take a divisor"),
    ("llama", {"sequence": 4, "seq": 510}, "sequence is 4, which does not divide the 510 tokens of --seq"),
    ("llama", {"sequence": 16}, "4 attention heads cannot be divided over the 16 ranks of a sequence"),
    ("llama", {"sequence": 2, "engine": "fsdp2"}, "is planned for a language model .* with engine accordion"),
    ("linear", {"sequence": 2}, "by name or config"),
    ("linear", {"units": ["Foo"]}, "Foo"),
    ("llama", {"no_sync": True}, "give accumulate, 2 or more"),
    (
        "llama",
        {"no_sync": True, "accumulate": 5, "offload": OFFLOADS["all"]},
        "leave offload 'params=host,optimizer=host' out",
    ),
    ("mixtral", {"strategy": None, "strategies": ["hybrid_shard"], "expert_parallel": 2}, "none of the strategies"),
    ("mixtral", {"sequence": 2, "expert_parallel": 2}, "and without expert_parallel"),
    ("mixtral", {"expert_parallel": 0}, "expert_parallel is 0; it takes 1 or more"),
    ("mixtral", {"expert_parallel": 3}, "expert_parallel is 3, which does not divide 16 GPUs; take a divisor"),
    (
        "mixtral",
        {"expert_parallel": 16},
        r"not divide the 8 experts of .model\.layers\.0\.mlp\.experts.; take a divisor",
    ),
    ("mixtral", {"expert_parallel": 4, "strategy": "hybrid_shard"}, WITHOUT_HYBRIDS),
    ("mixtral", {"expert_parallel": 4, "secondary": 8}, WITHOUT_HYBRIDS),
    ("mixtral", {"expert_parallel": 4, "engine": "fsdp2"}, "expert_parallel is planned with engine accordion"),
    ("llama3-8b", {"expert_parallel": 4}, "and llama3-8b has no experts that can be spread"),
    ("llama", {"offload": "activations=hots"}, r"Offload\(activations='hots'\) is no place; .*'host'"),
    ("llama", {"offload": "activations=host"}, "inputs of recomputed units .* is 'none'"),
    (
        "llama",
        {"offload": "activations=disk:/x", "checkpoint_activations": None, "engine": "fsdp2"},
        "fsdp2 with offload=activations=disk:/x cannot be planned",
    ),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_unsupported_combinations_raise_one_sentence_before_a_trace(folder, tmp_path, kind, options, message):
    models = {
        "llama": [folder],
        "linear": [nn.Linear(4, 4), builders.total, torch.ones(2, 4)],
        "llama3-8b": ["llama3-8b"],
    }
    if kind == "mixtral":
        models[kind] = [config_in(tmp_path, kind, num_local_experts=8, num_experts_per_tok=2)]
    fixed = {**ONE_CHOICE, "gpus": 16, "seq": SEQ, **options}
    with pytest.raises(acc.UsageError, match=message) as raised:
        builders.planned(*models[kind], **fixed, say=pytest.fail)
    assert "\n" not in str(raised.value)


def test_quantized_weights_of_a_configuration_are_refused(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    for quantized in ({"quant_method": "fp8"}, {"quant_method": "bitsandbytes", "load_in_4bit": True}):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
        with pytest.raises(acc.UsageError, match=r"quantized weights .*--lora 16 --quantize nf4"):
            planned(tmp_path)


def test_micro_batches_that_do_not_reduce_send_gradients_once(folder):
    options = {"accumulate": 5, "gpus": 16}
    each, once = (planned(folder, no_sync=alone, **options) for alone in (False, True))
    assert reduced(each) == 2 * reduced(once)  # two micro-batches are traced, and of these three the last alone reduces
    steps = [plan.chosen.steps["middle"] for plan in (each, once)]
    assert steps[0].by_kind["scatter_sum"] == pytest.approx(5 * steps[1].by_kind["scatter_sum"], rel=1e-6)
    full, each_rank = 4 * once.num_params, 4 * once.num_params / 16
    more = once.chosen.memory.peak.highest["gradients"] - each.chosen.memory.peak.highest["gradients"]
    assert 0.4 * (full - each_rank) < more < 1.1 * full  # unreduced, in the dtype of the computation or wider
    assert "without reducing" in str(once.chosen.choice)
    assert once.as_dict()["config"]["no_sync"]
