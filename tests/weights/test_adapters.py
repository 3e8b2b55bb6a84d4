"""Adapters as PEFT puts them around layers: their initialisation on the meta device, alone and with pretrained weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from accordion.weights.export import load_exported
from tests.devices import device, here
from tests.support import families
from tests.support.ranked import on_num_ranks, on_world
from tests.support.reference import assert_close
from tests.weights.test_pretrained import write

WIDTH, RANK = 24, 4
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own
LAYERS = {"plain": "0", "llama": "model.layers.0.self_attn.q_proj"}  # with an adapter
SPREAD = 1 / math.sqrt(3 * WIDTH)  # of a uniform draw within 1 / sqrt(width)


class Gate(nn.Module):
    """A module of another package than the model's, with a `reset_parameters` of its own."""

    def __init__(self, inside: nn.Linear) -> None:
        super().__init__()
        self.inside, self.gate = inside, nn.Linear(WIDTH, WIDTH)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gate.weight, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) * self.gate(x)


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def llama() -> nn.Module:
    from transformers import LlamaForCausalLM

    config = {**families.FAMILIES["LlamaForCausalLM"].config, "hidden_size": WIDTH, "num_attention_heads": 4}
    return LlamaForCausalLM(type(families.FAMILIES["LlamaForCausalLM"].make().config)(**{**config, "head_dim": 6}))


def tuned(kind: str, begin: bool | str = True) -> nn.Module:
    """Return a model on meta with DoRA around one layer. `begin`: `init_lora_weights`."""
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        model = plain_model() if kind == "plain" else llama()
        if kind == "llama":
            attention = model.model.layers[1].self_attn
            attention.q_proj = Gate(attention.q_proj)
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules=[LAYERS[kind]], use_dora=True))
    model.peft_config["default"].init_lora_weights = begin
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    weights = acc.full_state_dict(model, rank0_only=False)
    return {name.removeprefix("base_model.model."): tensor for name, tensor in weights.items()}


def begins(weights: dict[str, Tensor], layer: str, spread: float) -> None:
    a, b = (weights[f"{layer}.lora_{x}.default.weight"] for x in "AB")
    assert not b.any()
    assert a.std().item() == pytest.approx(spread, rel=0.25)
    base = weights[f"{layer}.base_layer.weight"]
    torch.testing.assert_close(weights[f"{layer}.lora_magnitude_vector.default.weight"], base.norm(dim=1))
    assert base.any()


@pytest.mark.parametrize(("kind", "num_ranks"), [("plain", 1), ("plain", 3), ("llama", 2)])
@on_num_ranks
def test_adapters_and_modules_of_other_packages_are_initialised_by_their_own_method(mesh: Any, kind: str) -> None:
    layer = LAYERS[kind]
    for begin, spread in (("gaussian", 1 / RANK), (True, SPREAD)):
        model = acc.shard(tuned(kind, begin), mesh)
        torch.manual_seed(3)
        acc.initialise(model)
        weights = whole(model)
        begins(weights, layer, spread)
    model = acc.shard(tuned(kind, "pissa"), mesh)
    with pytest.raises(acc.UsageError, match=rf"1 adapters .* base_model.model.{layer}: init_lora_weights='pissa'"):
        acc.initialise(model)
    assert not any(p.to_local().any() for p in model.parameters())
    if kind == "llama":
        assert (weights["model.layers.1.self_attn.q_proj.gate.weight"] == 3.0).all()
        for name in ("0.self_attn.q_proj.base_layer", "1.self_attn.q_proj.inside", "0.self_attn.k_proj"):
            weight = weights[f"model.layers.{name}.weight"]
            assert weight.std().item() == pytest.approx(0.02, rel=0.2), name


# -- around pretrained weights


@pytest.fixture
def folder(tmp_path: Path, kind: str) -> Path:
    torch.manual_seed(1)
    model = plain_model() if kind == "plain" else llama()
    tensors = {
        n.replace("layers.1.self_attn.q_proj", "layers.1.self_attn.q_proj.inside"): t.clone()
        for n, t in model.state_dict().items()
    }
    write(tmp_path, tensors)
    return tmp_path


@pytest.mark.parametrize("kind", LAYERS)
@on_world(2)
def test_meta_parameters_that_a_load_ignores_are_initialised(mesh: Any, folder: Path, kind: str) -> None:
    layer = LAYERS[kind]
    ignore = ["*lora_*", "*.gate.*"]
    firsts = []
    for seed in (3, 3, 4):
        model = acc.shard(tuned(kind), mesh)
        torch.manual_seed(seed + (seed == 4 and mesh.get_local_rank()))  # the first rank's counts
        before = torch.get_rng_state()
        acc.load_pretrained(model, folder, ignore=ignore)
        assert torch.equal(before, torch.get_rng_state())
        weights = whole(model)
        begins(weights, layer, SPREAD)
        firsts.append(weights[f"{layer}.lora_A.default.weight"])
    assert torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[0], firsts[2])
    if kind == "plain":
        torch.manual_seed(8)
        x = torch.randn(3, WIDTH).to(device())
        plain = here(plain_model())
        plain.load_state_dict({n.replace("base_layer.", ""): t for n, t in weights.items() if "lora" not in n})
        torch.testing.assert_close(model(x), plain(x))
    else:
        assert (weights["model.layers.1.self_attn.q_proj.gate.weight"] == 3.0).all()
    # Parameters with a value keep it.
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name or ".gate." in name:
                param.to_local().fill_(0.5)
    acc.load_pretrained(model, folder, ignore=ignore)
    assert all((t == 0.5).all() for n, t in whole(model).items() if "lora_" in n or ".gate." in n)


@on_world(2)
def test_an_exported_adapter_is_loaded_and_one_of_other_layers_is_refused(mesh: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    def sharded(config: Any) -> nn.Module:
        return acc.shard(get_peft_model(llama(), config), mesh)

    # The names of prompts are those of no parameter.
    for config in (
        LoraConfig(target_modules=["q_proj"]),
        PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    ):
        model, other = sharded(config), sharded(config)
        acc.save_pretrained(model, tmp_path / config.peft_type.value)
        load_exported(other, tmp_path / config.peft_type.value)
        states = [acc.full_state_dict(each, rank0_only=False, only="trained") for each in (model, other)]
        assert_close(*states, 0.0)
    other = sharded(LoraConfig(target_modules=["k_proj"]))
    with pytest.raises(acc.CheckpointError, match=r"LORA has weights that .* lacks: .*layers.0.*q_proj.lora_A"):
        load_exported(other, tmp_path / "LORA")
