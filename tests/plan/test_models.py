"""Models that are planned: presets of the published sizes, and models other than one decoder stack."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from accordion import cli
from accordion.models.llama import PUBLISHED, LlamaShape
from accordion.plan.hardware import Cluster
from accordion.plan.search.suggest import attempts
from accordion.sharding import offload_words
from tests.plan.builders import OFFLOADS, planned, space

FOUR = Cluster(gpus=4, node=4)
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


def test_changes_grow_from_what_costs_least():
    fixed = {"strategies": ["no_shard"], "checkpointing": ["none"], "micro_batches": [8], "offloads": ["none"]}
    flags = [text for text, _ in attempts(space(**fixed, cluster=FOUR))]
    first = "--micro-batch 1"
    second = f"{first} --checkpoint-activations full"
    third = f"{second} --strategy full_shard"
    tiers = [f"{third} --offload {OFFLOADS[tier]}" for tier in ("optimizer", "all", "disk")]
    memory = f"{third} --offload {OFFLOADS['all']} --gpu h100,host_memory_gib=2048"
    assert flags[:8] == [first, second, third, *tiers, memory, f"{third} --gpus 8"]
    assert flags[-1] == f"{third} --gpus 64x8"


def test_changes_are_such_that_the_command_takes_them():
    """FSDP2 is planned without offload; replicas go with the hybrid; what was fixed and is not named stays."""
    fixed = {"checkpointing": ["full"], "micro_batches": [1], "offloads": ["none"], "cluster": FOUR}
    tried = list(attempts(space(strategies=["full_shard"], **fixed, engine="fsdp2", global_batch=8)))
    assert [(text, wider.cluster.node) for text, wider in tried[:2]] == [
        ("--gpus 8 --global-batch 16", 8),
        ("--gpus 2x8 --global-batch 32", 8),
    ]
    hybrid = space(strategies=["hybrid_shard"], **fixed, replicas=2)
    assert next(attempts(hybrid))[0] == "--strategy full_shard without --replicas"
    tried = list(attempts(space(strategies=["full_shard"], **{**fixed, "offloads": [OFFLOADS["all"]]})))
    assert [(text, [offload_words(o) for o in other.search.offloads]) for text, other in tried[:3]] == [
        (f"--offload {OFFLOADS['disk']}", [OFFLOADS["disk"]]),
        ("--gpu h100,host_memory_gib=2048", [OFFLOADS["all"]]),
        ("--gpus 8", [OFFLOADS["all"]]),
    ]


def test_a_model_that_can_be_built_but_not_run_is_told_of_in_one_line(tmp_path, capsys):
    """Three heads of keys for eight of queries."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    words = ["--model", str(tmp_path), "--gpus", "2", "--seq", "64", "--strategy", "full_shard"]
    assert cli.main(["plan", *words, "--micro-batch", "1", "--checkpoint-activations", "none"]) == cli.BAD_INPUT
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("accordion: model ")
    assert "can be built, but not run: " in said


def test_a_folder_of_another_kind_of_model_says_how_to_plan_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "wav2vec2"}')
    said = r"type 'wav2vec2', .*from Python, with accordion\.Workload\(model, loss, batch\)"
    with pytest.raises(acc.UsageError, match=said):
        planned(str(tmp_path), gpus=2)


class Experts(nn.Module):
    """Each token goes to two of four experts, all of which see all tokens: shapes do not depend on values."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.router(x).softmax(-1).topk(2)
        weights = torch.zeros_like(x[..., :4]).scatter(-1, chosen, best)
        return x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def sums(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def translates(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch).float().square().mean()


@pytest.mark.parametrize(
    ("make", "loss", "batch"),
    [
        (lambda: nn.Sequential(*[Experts() for _ in range(7)]), sums, torch.zeros(2, 32, 64)),
        pytest.param(
            lambda: nn.Transformer(64, 4, 7, 3, 128, 0.0, batch_first=True),
            translates,
            (torch.zeros(2, 16, 64), torch.zeros(2, 8, 64)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["experts", "encoder-decoder"],
)
def test_other_models_are_planned(make, loss, batch):
    fixed = {"gpus": 2, "strategy": "full_shard", "checkpoint_activations": "none", "units": None}
    made = planned(make(), loss, batch, **fixed)
    found = made.as_dict()
    assert found["fits"] is True
    assert found["model"]["num_params"] == sum(p.numel() for p in make().parameters())
    shards = found["breakdown_bytes"]["parameters"]
    assert shards == pytest.approx(4 * found["model"]["num_params"] / 2, rel=0.15)
