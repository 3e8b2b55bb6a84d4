"""Layers that neighbours of a node share, in a plan: messages beside those of torch's DTensors, memory and time by arithmetic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import accordion as acc
from accordion import _torch
from accordion.plan.events import TENSOR, Collective, Op
from accordion.plan.hardware import GB, GPUS, REACHED, Cluster
from accordion.plan.replay.cost import costs_of
from accordion.plan.replay.timeline import OF_LAYERS
from accordion.plan.result import Plan
from accordion.plan.trace.setup import TrainingSetup
from accordion.plan.trace.trace import trace
from accordion.plan.trained_models import Kernels, configuration, language_subject
from tests.plan.counted import styles_of

SEQ, WIDTH, MLP, LAYERS, VOCAB, OVER = 256, 128, 256, 3, 512, 4
ACTIVATIONS = 2 * SEQ * WIDTH  # bytes of what goes from layer to layer, in bf16
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": MLP, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FIXED: dict[str, Any] = {
    "strategy": "full_shard", "checkpoint_activations": "none", "micro_batch": 1, "offload": "none", "gpus": 16, "seq": SEQ,
    "units": acc.only_blocks(),
}  # fmt: skip
FAMILIES = [
    ("qwen3", {"head_dim": 16}),
    ("phi3", {"pad_token_id": 0}),
    ("gpt_neox", {}),
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return written(tmp_path)


def written(folder: Path, **changed: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **changed}))
    return str(path)


def sent(events: Sequence[Any], *kinds: str, axis: str) -> list[int]:
    return [e.num_bytes for e in events if isinstance(e, Collective) and e.kind in kinds and e.axis == axis]


def products(plan: Plan) -> float:
    return sum(e.flops for e in plan.log.events if isinstance(e, Op))


def held(plan: Plan, category: str) -> int:
    return sum(alloc.num_bytes for alloc, _ in plan.log.held if alloc.category.value == category)


def test_layers_over_four_of_sixteen_gpus(file: str) -> None:
    plain = acc.plan(file, **{**FIXED, "gpus": 4})  # as many ranks with data of their own
    shared = acc.plan(file, **FIXED, tensor_parallel=OVER)
    # Of each layer what attention and feed-forward make, and gradients of what goes into five products; an embedding, a head.
    assert sent(shared.log.events, "sum", axis=TENSOR).count(ACTIVATIONS) == (2 + 5) * LAYERS + 2
    assert sent(shared.log.events, "gather", axis=TENSOR) == [2 * SEQ * VOCAB]
    for kinds in (("gather",), ("scatter_sum", "exchange")):  # over ranks with other data, of parts
        whole, part = (sum(sent(p.log.events, *kinds, axis="shard")) for p in (plain, shared))
        assert whole / OVER == pytest.approx(part, rel=0.02)
    assert products(plain) / OVER == pytest.approx(products(shared))
    for category in ("parameters", "optimizer"):
        assert held(plain, category) / OVER == pytest.approx(held(shared, category), rel=0.03)
    step = shared.chosen.steps["middle"]
    costs = costs_of(shared.cluster, REACHED["middle"], 4, hybrid=False, tensor=OVER)
    by_hand = [costs.of_collective(e) for e in shared.log.events if isinstance(e, Collective) and e.axis == TENSOR]
    assert step.by_kind[OF_LAYERS] == pytest.approx(sum(by_hand))
    assert OF_LAYERS not in plain.chosen.steps["middle"].by_kind
    assert shared.chosen.tokens_per_s(SEQ) == pytest.approx(SEQ / OVER / step.seconds)
    assert shared.as_dict()["config"]["tensor_parallel"] == OVER
    assert "layers over 4" in str(shared.chosen.choice)


def test_a_recomputation_sums_again(file: str) -> None:
    full = acc.plan(file, **{**FIXED, "checkpoint_activations": "full"}, tensor_parallel=OVER)
    assert sent(full.log.events, "sum", axis=TENSOR).count(ACTIVATIONS) == (
        (2 + 5) * LAYERS + 2 + LAYERS
    )  # that of attention


def test_ranks_of_a_node_share_its_links() -> None:
    cluster, rates, num_bytes = Cluster(gpu=GPUS["h100"], node=8, network_gbps=50.0), REACHED["middle"], 1 << 30
    costs = costs_of(cluster, rates, 8, hybrid=False, tensor=OVER)
    assert [(costs.axes[a].ranks, costs.axes[a].on_node) for a in (TENSOR, "shard")] == [(4, 4), (8, 2)]
    seconds = costs.of_collective(Collective("sum", num_bytes, TENSOR, "compute"))
    assert seconds == pytest.approx(2 * num_bytes * 3 / 4 / (450 * GB * rates.link) + GPUS["h100"].latency_s)
    assert costs.gbps(costs.axes["shard"]) == pytest.approx(min(2 * 50.0 * rates.network, 450 * rates.link))
    assert costs.on_machine == 8


class Heard(TorchDispatchMode):
    """What torch's own collectives say, as (kind, bytes of the full tensors)."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does inside comes by
        out = func(*args, **(kwargs or {}))
        kinds = {"all_reduce": "sum", "all_gather_into_tensor": "gather"}
        if func.namespace == "_c10d_functional" and (kind := kinds.get(func.__name__.partition(".")[0])):
            self.said.append((kind, out.nbytes))
        return out


def test_messages_are_those_of_torchs_own_tensor_parallelism(file: str) -> None:
    config = configuration(file, SEQ)
    subject = language_subject(config, "a test", micro_batch=2, seq=SEQ)
    run = TrainingSetup(ranks=1, node=1, tensor_parallel=2, device="cpu")
    events = trace(subject, run).events
    planned = [(e.kind, e.num_bytes) for e in events if isinstance(e, Collective) and e.axis == TENSOR]
    dist.init_process_group("fake", store=_torch.fake_store(), rank=0, world_size=2)
    try:
        model = subject.make().to_empty(device="cpu")
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data.zero_()
        parallelize_module(model, init_device_mesh("cpu", (2,)), styles_of(model))
        with Heard() as mode:
            subject.loss(model, subject.batch()).backward()
    finally:
        dist.destroy_process_group()
    assert planned == mode.said
    assert len(planned) == (2 + 5) * LAYERS + 3


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changed"), FAMILIES)
def test_other_families_are_cut_by_their_own_plans(tmp_path: Path, family: str, changed: dict[str, Any]) -> None:
    """Where a plan gathers what attention takes, each rank attends to all heads."""
    file = written(tmp_path, model_type=family, **changed)
    plain = acc.plan(file, **{**FIXED, "gpus": 4})
    shared = acc.plan(file, **FIXED, tensor_parallel=OVER)
    attention = sum(e.flops for e in plain.log.events if isinstance(e, Op) and "attention" in e.name)
    once = attention if family == "phi3" else 0.0
    assert products(shared) == pytest.approx((products(plain) - once) / OVER + once, rel=1e-6)


@pytest.mark.slow
def test_a_search_and_a_calibration_know_of_shared_layers(file: str) -> None:
    options = {**FIXED, "global_batch": 8, "tensor_parallel": OVER, "gpus": [2, 16]}
    found = acc.plan(file, **{**options, "micro_batch": None})
    tried = {(c.choice.gpus, c.choice.micro_batch, c.choice.accumulate) for c in found.found.candidates}
    assert tried == {(16, 1, 2), (16, 2, 1)}  # no layers of four ranks on two GPUs
    step_s = 3 * found.chosen.steps["middle"].seconds
    measured = acc.plan(file, **{**options, "micro_batch": found.chosen.choice.micro_batch}, measured_step_s=step_s)
    assert measured.chosen.steps["middle"].seconds == pytest.approx(step_s, rel=1e-2)


@pytest.mark.parametrize(
    ("options", "changed", "said"),
    [
        ({"tensor_parallel": 3}, {}, r"tensor_parallel is 3, which does not divide 16 GPUs; take a divisor"),
        ({"tensor_parallel": 16}, {}, r"tensor_parallel is 16, which does not divide the 8 GPUs of a node"),
        ({"tensor_parallel": 0}, {}, r"tensor_parallel is 0; it takes 1 or more"),
        ({}, {"num_attention_heads": 2, "num_key_value_heads": 2}, r"does not divide the num_attention_heads of .*, 2"),
        (
            {},
            {"num_key_value_heads": 2},
            r"which does not divide the num_key_value_heads of .*config.json, 2; take a div",
        ),
        ({}, {"intermediate_size": 250}, r"does not divide the intermediate_size of .*, 250; take a divisor"),
        ({}, {"vocab_size": 510}, r"does not divide the 510 rows of model\.embed_tokens\.weight of .*; take a divisor"),
        ({}, {"model_type": "gpt2"}, r"names no plan of its layers, .* which cannot be guessed; leave it out"),
        ({}, {"model_type": "mixtral"}, r"experts of .* is shared in the style 'moe_tp_experts', which is not planned"),
        ({"strategy": "hybrid_shard"}, {}, r"tensor_parallel with strategy 'hybrid_shard' is not planned"),
        ({"engine": "fsdp2"}, {}, r"tensor_parallel with engine 'fsdp2' is not planned"),
        ({"secondary": 2}, {}, r"tensor_parallel with secondary=2 is not planned"),
        ({"expert_parallel": 2}, {}, r"tensor_parallel with expert_parallel=2 is not planned"),
        ({"kernels": Kernels(loss="chunked")}, {}, r"tensor_parallel with loss 'chunked' is not planned"),
        ({"kernels": Kernels(lora_rank=8)}, {}, r"tensor_parallel with lora_rank=8 is not planned"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_traced(
    tmp_path: Path, options: dict[str, Any], changed: dict[str, Any], said: str
) -> None:
    def told(text: str) -> None:
        raise AssertionError(text)

    with pytest.raises(acc.UsageError, match=said) as raised:
        acc.plan(written(tmp_path, **changed), **{**FIXED, "tensor_parallel": OVER, **options}, say=told)
    assert "\n" not in str(raised.value)


def test_the_layers_of_a_plain_module_cannot_be_guessed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(acc.UsageError, match="Sequential names no plan of its layers"):
        acc.plan(model, lambda m, x: m(x).sum(), torch.zeros(2, 8), gpus=8, tensor_parallel=2)
