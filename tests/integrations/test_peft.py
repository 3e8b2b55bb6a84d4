"""Sharded PEFT models train as unsharded ones, start from a pretrained base, and are saved without it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import accordion as acc
from tests.integrations.jobs import (
    VOCABULARY,
    full,
    held,
    llama,
    mean,
    needs,
    on_first_rank,
    on_library_job,
    sizes_of_steps,
)
from tests.support.ranked import on_job
from tests.support.reference import local_of
from tests.support.sample import sampled

pytestmark = needs("peft", "transformers")

LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {  # class of its configuration, and the arguments
    "LoRA": ("LoraConfig", LORA),
    "DoRA": ("LoraConfig", {**LORA, "use_dora": True}),
    "rsLoRA, modules_to_save": ("LoraConfig", {**LORA, "use_rslora": True, "modules_to_save": ["lm_head"]}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "VeRA": ("VeraConfig", {"r": 4, "target_modules": ["q_proj"]}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
}


def config_of(name: str) -> Any:
    import peft

    kind, options = METHODS[name]
    return getattr(peft, kind)(**options, task_type="CAUSAL_LM")


def tuned(name: str, base: Any = None) -> Any:
    from peft import get_peft_model

    base = llama(tie_word_embeddings=False) if base is None else base
    torch.manual_seed(5)
    return get_peft_model(base, config_of(name))


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))


def logits(model: Any, step: int, rank: int = 0) -> Tensor:
    with torch.no_grad():
        return model(batch(rank, step)).logits


def most(params: Iterable[Tensor]) -> int:
    """Return the elements of half of the rows of each tensor, rounded up, since one row is on one of two ranks."""
    return sum(-(-p.shape[0] // 2) * p[0].numel() for p in params)


def learn(model: Any, ranks: list[int], steps: int = 3) -> list[float]:
    """Return the mean loss of each step over `ranks`, whose batches this process sees in full or in part."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for step in range(steps):
        loss = sum(model(input_ids=(x := batch(rank, step)), labels=x).loss for rank in ranks) / len(ranks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    "name",
    # LoRA itself is in most tests below.
    sampled(METHODS, {"DoRA", "rsLoRA, modules_to_save", "VeRA", "prefix tuning"}.__contains__),
)
@on_library_job(2)
def test_each_method_trains_as_unsharded_and_its_adapter_loads_elsewhere(mesh: Any, name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    rank = mesh.get_local_rank()
    plain, model = tuned(name), acc.shard(tuned(name), mesh)
    with sizes_of_steps() as whole:
        expected = learn(plain, [0, 1])
    with sizes_of_steps() as mine:
        found = learn(model, [rank])
    assert mean(found) == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(full(model), full(plain), rtol=1e-3, atol=1e-4)
    mine["all"], whole["all"] = held(model.parameters()), held(plain.parameters())
    shared = torch.tensor([mine[key] for key in whole])
    torch.distributed.all_reduce(shared)
    assert shared.tolist() == list(whole.values()), "all ranks together hold each element once"
    learned = most(p for p in plain.parameters() if p.requires_grad)
    limits = {"all": most(plain.parameters()), "parameters": learned, "gradients": learned, "states": 2 * learned}
    assert all(mine[key] <= limit for key, limit in limits.items()), (mine, limits)

    acc.save_pretrained(model, tmp_path / "adapter")
    assert not list(tmp_path.glob(".full-*"))
    again = PeftModel.from_pretrained(llama(tie_word_embeddings=False), tmp_path / "adapter").eval()
    model.eval()
    torch.testing.assert_close(logits(again, 7, rank), logits(model, 7, rank), rtol=1e-4, atol=1e-5)


# -- around a base that fits no rank


@pytest.mark.parametrize(
    "name", sampled(["LoRA", "DoRA", "rsLoRA, modules_to_save", "IA3"], {"rsLoRA, modules_to_save", "IA3"}.__contains__)
)
@on_library_job(2)
def test_a_pretrained_base_is_loaded_and_adapters_begin_as_pefts(mesh: Any, tmp_path: Path, name: str) -> None:
    on_first_rank(llama(3, tie_word_embeddings=False).save_pretrained, tmp_path)
    with torch.device("meta"):
        model = tuned(name, llama(tie_word_embeddings=False))
    model = acc.shard(model, mesh)
    torch.manual_seed(9)
    acc.load_pretrained(model, tmp_path)
    base, found = llama(3, tie_word_embeddings=False), full(model)
    for key, tensor in found.items():
        of_base = re.sub(r"base_layer\.|original_module\.|modules_to_save\.default\.", "", key)
        if of_base != key:
            expected = base.state_dict()[of_base.removeprefix("base_model.model.")]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
    assert all(not t.any() for key, t in found.items() if "lora_B" in key)
    assert all(t.any() for key, t in found.items() if "lora_A" in key)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model, 0), logits(base, 0))
    torch.testing.assert_close(logits(model, 0), logits(base, 0))  # adapters begin as nothing


# -- a part of the model


@on_library_job(2)
def test_trained_parameters_are_saved_and_gathered_alone(mesh: Any, tmp_path: Path) -> None:
    model = acc.shard(tuned("LoRA"), mesh)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(acc.full_state_dict(model, rank0_only=False, only="trained")) == trained
    assert set(acc.full_state_dict(model, rank0_only=False, only="*.lora_A.*")) == {n for n in trained if "lora_A" in n}
    assert (
        len(acc.full_state_dict(model, rank0_only=False, only=lambda name, _: name.endswith("embed_tokens.weight")))
        == 1
    )
    with pytest.raises(acc.UsageError, match="chooses none of the model's"):
        acc.full_state_dict(model, only="*.vera_*")
    with pytest.raises(acc.UsageError, match="only=7 is no choice"):
        acc.full_state_dict(model, only=7)  # type: ignore[arg-type]

    optimizer = acc.wrap_optimizer(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05))
    model(input_ids=batch(0, 0), labels=batch(0, 0)).loss.backward()
    optimizer.step()
    acc.save(tmp_path / "part", model, optimizer, only="trained")
    size = sum(p.stat().st_size for p in (tmp_path / "part").glob("*.safetensors"))
    assert size < 4 * 4 * sum(p.numel() for p in model.parameters() if p.requires_grad) + 20_000
    before = full(model)
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().add_(1.0)
    acc.load(tmp_path / "part", model, optimizer, only="trained")
    for name, tensor in full(model).items():
        torch.testing.assert_close(tensor, before[name] + float(name not in trained))
    with pytest.raises(acc.CheckpointError, match="missing in the checkpoint"):
        acc.load(tmp_path / "part", model, optimizer)


# -- whole models


@on_library_job(2)
def test_a_model_is_exported_one_tensor_at_a_time(mesh: Any, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    for tied in (True, False):
        model = acc.shard(llama(2, tie_word_embeddings=tied), mesh)
        with pytest.raises(acc.UsageError, match=r"call accordion\.save_pretrained"):
            model.save_pretrained(tmp_path / "no")
        acc.save_pretrained(model, tmp_path / "small", max_shard_size="20KB")
        again, expected = LlamaForCausalLM.from_pretrained(tmp_path / "small").state_dict(), full(model)
        assert (tmp_path / "small" / "model.safetensors.index.json").exists()
        assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
        with acc.full_params(model):
            if mesh.get_local_rank() == 0:
                model.save_pretrained(tmp_path / "inside")
    with pytest.raises(acc.UsageError, match="Linear has no save_pretrained"):
        acc.save_pretrained(acc.shard(torch.nn.Linear(4, 4), mesh), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(acc.CheckpointError):
        acc.save_pretrained(model, tmp_path / "file" / "below")


@on_library_job(2)
def test_adapters_are_merged_in_place_and_not_taken_out(mesh: Any) -> None:
    plain, model = tuned("LoRA"), acc.shard(tuned("LoRA"), mesh)
    for one in (plain, model):
        with torch.no_grad():
            for name, param in one.named_parameters():
                if "lora_B" in name:
                    local_of(param).fill_(0.1)
    expected = logits(plain, 0)
    calls: list[Callable[[], Any]] = [model.merge_and_unload, model.unload]
    for call in calls:
        with acc.full_params(model, write=True), pytest.raises(acc.UsageError, match=r"model\.merge_adapter"):
            call()
    with acc.full_params(model, write=True):
        model.merge_adapter()
    torch.testing.assert_close(logits(model, 0), expected, rtol=1e-4, atol=1e-5)
    merged = plain.merge_and_unload().state_dict()
    found = acc.full_state_dict(model, rank0_only=False, only=lambda name, _: "lora_" not in name)
    for name, tensor in found.items():
        key = name.removeprefix("base_model.model.").replace("base_layer.", "")
        torch.testing.assert_close(tensor, merged[key], rtol=1e-4, atol=1e-6)


MERGED = ("LoRA", "DoRA", "rsLoRA, modules_to_save", "IA3")


@on_library_job(2)
def test_adapters_are_streamed_merged_or_alone(mesh: Any) -> None:
    from peft import get_peft_model_state_dict

    for name in MERGED:
        plain, model = tuned(name), acc.shard(tuned(name), mesh)
        for one in (plain, model):
            with torch.no_grad():
                for param in [param for param in one.parameters() if param.requires_grad]:
                    local_of(param).mul_(1.5).add_(0.01)
        alone = dict(acc.stream_weights(model, adapters="alone"))
        expected = get_peft_model_state_dict(plain)
        assert alone.keys() == expected.keys()
        assert all(torch.equal(alone[key], tensor) for key, tensor in expected.items())
        before = logits(model, 0)
        merged = dict(acc.stream_weights(model, 2**14, changed_since="start"))
        base = plain.merge_and_unload().state_dict()
        assert merged.keys() == base.keys(), name
        for key, tensor in base.items():
            torch.testing.assert_close(merged[key], tensor, rtol=1e-4, atol=1e-6)
        assert torch.equal(logits(model, 0), before), "the adapters are not merged in the model itself"
    with pytest.raises(acc.UsageError, match="which no weight of the base model can take"):
        acc.stream_weights(acc.shard(tuned("prompt tuning"), mesh))


# -- several adapters, and bases of bytes


@on_library_job(2)
def test_several_adapters(mesh: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    rank, losses, states = mesh.get_local_rank(), [], []
    for sharded in (False, True):
        model = tuned("LoRA")
        model.add_adapter("second", config_of("rsLoRA, modules_to_save"))
        model = acc.shard(model, mesh) if sharded else model
        found = []
        for name in ("default", "second"):
            model.set_adapter(name)
            found += learn(model, [rank] if sharded else [0, 1])
        model.eval()
        with torch.no_grad():
            found += [float(model(input_ids=(x := batch(0, 5)), labels=x).loss)]
            with model.disable_adapter():
                found += [float(model(input_ids=x, labels=x).loss)]
        losses.append(found)
        states.append(full(model))
    assert mean(losses[1]) == pytest.approx(losses[0], rel=1e-4, abs=1e-5)
    torch.testing.assert_close(states[1], states[0], rtol=1e-3, atol=1e-4)
    acc.save_pretrained(model, tmp_path / "both")
    again = PeftModel.from_pretrained(llama(tie_word_embeddings=False), tmp_path / "both")
    again.load_adapter(tmp_path / "both" / "second", adapter_name="second")
    for name in ("default", "second"):
        for one in (again, model):
            one.set_adapter(name)
            one.eval()
        torch.testing.assert_close(logits(again, 6), logits(model, 6), rtol=1e-4, atol=1e-5)


class Bytes(torch.nn.Module):
    """A frozen linear layer of bytes with a scale, like those of quantised models, with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = torch.nn.Parameter(torch.randint(0, 256, (64, 32), dtype=torch.uint8), requires_grad=False)
        self.register_buffer("scale", torch.rand(64, 1) / 256)
        self.down, self.up = torch.nn.Linear(32, 4, bias=False), torch.nn.Linear(4, 64, bias=False)
        self.back = torch.nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        # As bitsandbytes does where a parameter is not of its class any more.
        self.packed = torch.nn.Parameter(self.packed.data, requires_grad=False)
        weight = (self.packed.to(x.dtype) - 128) * self.scale
        return x + self.back((x @ weight.T + self.up(self.down(x))).tanh())


@on_job(2)
def test_a_base_of_bytes_is_sharded(mesh: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*[Bytes() for _ in range(3)])
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Bytes() for _ in range(3)])
    model = acc.shard(model, mesh, units={Bytes}, checkpoint_activations="full")
    packed = model[0].packed
    assert packed.dtype == torch.uint8
    assert packed.to_local().shape == (32, 32), "each rank holds half of the bytes"
    inputs = torch.randn(2, 4, 32)
    rank = mesh.get_local_rank()
    for _ in range(3):
        for one, x in ((plain, inputs.flatten(0, 1)), (model, inputs[rank])):
            one(x).pow(2).mean().backward()
            with torch.no_grad():
                for param in one.parameters():
                    if param.grad is not None:
                        param.sub_(param.grad, alpha=0.1)
            one.zero_grad()
    torch.testing.assert_close(full(model), dict(plain.state_dict()))
    acc.save(tmp_path / "bytes", model)
    with torch.no_grad():
        packed.to_local().zero_()
    acc.load(tmp_path / "bytes", model)
    torch.testing.assert_close(full(model), dict(plain.state_dict()))
