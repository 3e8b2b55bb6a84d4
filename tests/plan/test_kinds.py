"""Models that a function of the user makes, micro-batches that do not reduce, and samples that share a row."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import accordion as acc
from accordion import _torch, cli
from accordion.tasks.errors import TaskError
from tests.plan.builders import planned

ONE = {
    "strategy": "full_shard",
    "checkpoint_activations": "none",
    "offload": "none",
    "gpus": 2,
    "units": acc.only_blocks(),
}
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
TEXTS = {"vocab_size": 512, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 2, **SMALL}


def folder_of(tmp_path, kind, **sizes):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes}))
    return str(tmp_path)


@pytest.mark.parametrize("kind", ["vit", "clip", "whisper", "t5"])
def test_other_kinds_of_configurations_are_refused_with_the_way_to_plan_them(tmp_path, kind):
    with pytest.raises(acc.UsageError, match=f"{kind}.*from Python, (as|with) accordion.Workload"):
        planned(folder_of(tmp_path, kind), seq=48, micro_batch=2, **ONE)


CODE = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(512, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.head = nn.Linear(64, 512, bias=False)
    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def build(): return Own()
def narrow(): return nn.Sequential(nn.Embedding(512, 64), nn.Flatten())
def text(): return "a model"
def fails(): raise ZeroDivisionError("nothing to divide")
def without(): return nn.Linear(4, 4)
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    file = tmp_path_factory.mktemp("code") / "own_for_plan.py"
    file.write_text(CODE)
    return str(file)


def test_a_function_of_a_file_gives_the_model(code):
    made = planned(f"{code}:build", seq=32, micro_batch=4, **ONE)
    assert made.num_params == 2 * 512 * 64 + 3 * (2 * 64 * 256 + 256 + 64)
    products = 4 * 32 * (3 * 2 * 64 * 256 + 64 * 512) * 2 * 3  # forward, and two gradients
    assert made.chosen.steps["middle"].flops == pytest.approx(products)
    assert made.task.counted == "tokens"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "names no function; write .*own_for_plan.py:build"),
        (":nothing", "nothing"),
        (":text", "returned a str; text\\(\\) must return an nn.Module"),
        (":without", "has no nn.Embedding, so it reads no tokens; plan it as a task"),
        (":narrow", r"is of shape \(1, 2048\); a language model returns a tensor of shape \(1, 32\)"),
    ],
)
def test_what_gives_no_language_model_is_told_of(code, name, said):
    with pytest.raises(acc.UsageError, match=said):
        planned(code + name, seq=32, micro_batch=1, **ONE)


def test_a_function_that_fails_shows_its_own_lines(code, capsys):
    with pytest.raises(TaskError):
        planned(f"{code}:fails", seq=32, **ONE)
    assert cli.main(["plan", "--model", f"{code}:fails", "--gpus", "2"]) == 1
    said = capsys.readouterr().err
    assert "nothing to divide" in said
    assert "accordion/plan" not in said


def test_micro_batches_that_do_not_reduce_send_gradients_once(code):
    options = {"seq": 32, "micro_batch": 1, "accumulate": 5, **ONE, "gpus": 16}
    each, once = (planned(f"{code}:build", no_sync=alone, **options) for alone in (False, True))

    def reduced(plan):
        kinds = ("scatter_sum", "exchange")
        return sum(e.num_bytes for e in plan.log.events if getattr(e, "kind", "") in kinds)

    assert reduced(each) == 2 * reduced(once)  # two micro-batches are traced, and of these three the last alone reduces
    steps = [plan.chosen.steps["middle"] for plan in (each, once)]
    assert steps[0].by_kind["scatter_sum"] == pytest.approx(5 * steps[1].by_kind["scatter_sum"], rel=1e-6)
    full, each_rank = 4 * once.num_params, 4 * once.num_params / 16
    more = once.chosen.memory.peak.highest["gradients"] - each.chosen.memory.peak.highest["gradients"]
    assert 0.4 * (full - each_rank) < more < 1.1 * full  # unreduced, in the dtype of the computation or wider
    assert "without reducing" in str(once.chosen.choice)
    assert once.as_dict()["config"]["no_sync"]
    for wrong, said in (
        ({"accumulate": 1}, "give accumulate, 2 or more"),
        ({"offload": "params=host,optimizer=host"}, "leave offload 'params=host,optimizer=host' out"),
    ):
        with pytest.raises(acc.UsageError, match=said):
            planned(f"{code}:build", no_sync=True, **{**options, **wrong})


def test_samples_that_fill_a_row_look_at_themselves_alone(tmp_path):
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 4, **TEXTS, "max_position_embeddings": 64}
    folder = folder_of(tmp_path, "llama", **sizes)
    options = {"seq": 64, "micro_batch": 2, **ONE}
    whole, packed = planned(folder, **options), planned(folder, mean_tokens=16, packed=True, **options)

    def attention(plan):
        return sum(e.flops for e in plan.log.events if "attention" in getattr(e, "name", ""))

    assert attention(packed) == pytest.approx(attention(whole) / 4)
    assert packed.space.tokens == 64  # all of a row count
    assert packed.chosen.memory.peak.num_bytes == whole.chosen.memory.peak.num_bytes
    with pytest.raises(acc.UsageError, match="packed samples need the mean of their lengths"):
        planned(folder, packed=True, **options)


def test_a_model_that_lies_over_a_mesh_already_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    dist.init_process_group("fake", store=_torch.fake_store(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"1": ColwiseParallel()})
    finally:
        dist.destroy_process_group()
    with pytest.raises(
        acc.UsageError, match=r"parameter '1.weight' is a DTensor already, .*cannot be planned.*expert_parallel"
    ):
        planned(model, lambda m, x: m(x).sum(), torch.zeros(2, 8), gpus=2)
