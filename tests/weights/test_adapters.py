"""Adapters as PEFT puts them around layers: their initialisation on the meta device, alone and with pretrained weights."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from tests.devices import device, here
from tests.support import families
from tests.support.ranked import on_world
from tests.weights.test_pretrained import of_rank, write

WIDTH, RANK = 24, 4
SPREAD = 1 / math.sqrt(3 * WIDTH)  # of a uniform draw within 1 / sqrt(width)


class Magnitude(nn.Module):
    """A magnitude vector as DoRA's, whose `weight` is computed from the base layer and the adapter."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows))

    def update_layer(self, *, base_layer: nn.Module, lora_A: Tensor, lora_B: Tensor, scaling: float) -> None:
        self.weight = nn.Parameter(torch.linalg.norm(base_layer.weight + scaling * (lora_B @ lora_A), dim=1))


class Adapter(nn.Module):
    """A module with the structure of a LoRA layer of PEFT."""

    adapter_layer_names: tuple[str, ...] = ("lora_A", "lora_B")

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        rows, columns = base_layer.weight.shape
        self.lora_A = nn.ModuleDict({"default": nn.Linear(columns, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, rows, bias=False)})
        self.lora_magnitude_vector = nn.ModuleDict({"default": Magnitude(rows)})
        self.scaling = {"default": 2.0}

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    def reset_lora_parameters(self, adapter_name: str, init_lora_weights: bool | str) -> None:
        if init_lora_weights == "gaussian":
            nn.init.normal_(self.lora_A[adapter_name].weight, std=5.0)
        elif init_lora_weights:
            nn.init.kaiming_uniform_(self.lora_A[adapter_name].weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B[adapter_name].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


class Gate(nn.Module):
    """A module of another package than the model's, with a `reset_parameters` of its own."""

    def __init__(self, inside: nn.Linear) -> None:
        super().__init__()
        self.inside, self.gate = inside, nn.Linear(WIDTH, WIDTH)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gate.weight, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) * self.gate(x)


class Tuner(nn.Module):
    """A wrapper as PEFT's: names of the model's parameters begin with `base_model.model.`."""

    def __init__(self, model: nn.Module, begin: bool | str = True) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.base_model.peft_config = {"default": SimpleNamespace(init_lora_weights=begin)}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model").model, name)

    def forward(self, x: Tensor) -> Any:
        return self.base_model.model(x)


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def llama() -> nn.Module:
    from transformers import LlamaForCausalLM

    config = {**families.FAMILIES["LlamaForCausalLM"].config, "hidden_size": WIDTH, "num_attention_heads": 4}
    return LlamaForCausalLM(type(families.FAMILIES["LlamaForCausalLM"].make().config)(**{**config, "head_dim": 6}))


def tuned(kind: str, begin: bool | str = True) -> Tuner:
    with torch.device("meta"):
        model = plain_model() if kind == "plain" else llama()
        if kind == "plain":
            model[0] = Adapter(model[0])
        else:
            attention = model.model.layers[0].self_attn
            attention.q_proj = Adapter(attention.q_proj)
            model.model.layers[1].self_attn.q_proj = Gate(model.model.layers[1].self_attn.q_proj)
        return Tuner(model, begin)


def whole(model: nn.Module) -> dict[str, Tensor]:
    found = acc.full_state_dict(model, rank0_only=False)
    return {name.removeprefix("base_model.model."): tensor for name, tensor in found.items()}


def begins(found: dict[str, Tensor], layer: str, spread: float) -> None:
    a, b = (found[f"{layer}.lora_{x}.default.weight"] for x in "AB")
    assert not b.any()
    assert a.std().item() == pytest.approx(spread, rel=0.25)
    base = found[f"{layer}.base_layer.weight"]
    torch.testing.assert_close(found[f"{layer}.lora_magnitude_vector.default.weight"], base.norm(dim=1))
    assert base.any()


def initialised(mesh: Any, kind: str) -> dict[str, Tensor]:
    layer = "0" if kind == "plain" else "model.layers.0.self_attn.q_proj"
    for begin, spread in ((True, SPREAD), ("gaussian", 5.0)):
        model = acc.shard(tuned(kind, begin), mesh)
        torch.manual_seed(3)
        acc.initialise(model)
        begins(whole(model), layer, spread)
    model = acc.shard(tuned(kind, "pissa"), mesh)
    with pytest.raises(acc.UsageError, match=rf"1 adapters .* base_model.model.{layer}: init_lora_weights='pissa'"):
        acc.initialise(model)
    assert not any(p.to_local().any() for p in model.parameters())
    model = acc.shard(tuned(kind), mesh)
    torch.manual_seed(3)
    acc.initialise(model)
    return whole(model)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_adapter_is_initialised_by_its_own_method(world, num_ranks):
    world.run(num_ranks, initialised, "plain")


def test_modules_of_other_packages_inside_a_family_are_initialised_by_their_own_method(world):
    pytest.importorskip("transformers")
    for found in world.run(2, initialised, "llama"):
        assert (found["model.layers.1.self_attn.q_proj.gate.weight"] == 3.0).all()
        for name in (
            "layers.0.self_attn.q_proj.base_layer",
            "layers.1.self_attn.q_proj.inside",
            "layers.0.self_attn.k_proj",
        ):
            assert found[f"model.{name}.weight"].std().item() == pytest.approx(0.02, rel=0.2), name


# -- around pretrained weights


class Bare(nn.Module):
    """A module without a method that initialises its weight."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.extra = inside, nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def loaded(mesh: Any, path: Path, kind: str) -> None:
    layer = "0" if kind == "plain" else "model.layers.0.self_attn.q_proj"
    ignore = ["*lora_*", "*.gate.*"]
    firsts = []
    for seed in (3, 3, 4):
        model = acc.shard(tuned(kind), mesh)
        torch.manual_seed(seed + (seed == 4 and mesh.get_local_rank()))  # the first rank's counts
        before = torch.get_rng_state()
        acc.load_pretrained(model, path, ignore=ignore)
        assert torch.equal(before, torch.get_rng_state())
        found = whole(model)
        begins(found, layer, SPREAD)
        firsts.append(found[f"{layer}.lora_A.default.weight"])
    assert torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[0], firsts[2])
    if kind == "plain":
        torch.manual_seed(8)
        x = torch.randn(3, WIDTH).to(device())
        plain = here(plain_model())
        plain.load_state_dict({n.replace("base_layer.", ""): t for n, t in found.items() if "lora" not in n})
        torch.testing.assert_close(model(x), plain(x))
    else:
        assert (found["model.layers.1.self_attn.q_proj.gate.weight"] == 3.0).all()
    # Parameters with a value keep it.
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name or ".gate." in name:
                param.to_local().fill_(0.5)
    acc.load_pretrained(model, path, ignore=ignore)
    assert all((t == 0.5).all() for n, t in whole(model).items() if "lora_" in n or ".gate." in n)


def saved(path: Path, kind: str) -> None:
    torch.manual_seed(1)
    model = plain_model() if kind == "plain" else llama()
    tensors = {
        n.replace("layers.1.self_attn.q_proj", "layers.1.self_attn.q_proj.inside"): t
        for n, t in model.state_dict().items()
    }
    write(path, {n: t.clone() for n, t in tensors.items()})


@pytest.mark.parametrize("kind", ["plain", "llama"])
def test_meta_parameters_that_a_load_ignores_are_initialised(world, tmp_path, kind):
    if kind == "llama":
        pytest.importorskip("transformers")
    saved(tmp_path, kind)
    world.run(2, loaded, tmp_path, kind)


@on_world(2)
def test_ignored_parameters_that_nothing_initialises_are_named(mesh: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    tensors = plain_model().state_dict()
    folder = of_rank(
        mesh, tmp_path, {n.replace("0.", "0.inside.", 1) if n[0] == "0" else n: t for n, t in tensors.items()}
    )
    with torch.device("meta"):
        model = plain_model()
        model = Tuner(nn.Sequential(Bare(Adapter(model[0])), model[1], model[2]))
    names = dict(model.named_parameters())
    assert "base_model.model.0.extra" in names
    model = acc.shard(model, mesh)
    with pytest.raises(acc.AccordionError, match=r"1 buffers and parameters .* base_model.model.0.extra; compute them"):
        acc.load_pretrained(model, folder, ignore=["*lora_*", "*.extra"])
    assert not model.base_model.model[2].weight.to_local().any()


@on_world(2)
def test_a_real_parameter_of_zeros_is_kept(mesh: Any, tmp_path: Path) -> None:
    """A parameter that is real and zero has a value, and is not initialised."""
    folder = of_rank(mesh, tmp_path, plain_model().state_dict())
    model = plain_model()
    with torch.no_grad():
        model[0].bias.zero_()
    model = acc.shard(model, mesh)
    acc.load_pretrained(model, folder, ignore=["0.bias"])
    assert not whole(model)["0.bias"].any()
