"""The model that a run trains: presets, folders, weights, the loss and samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, masking_utils

import accordion as acc
from accordion.models.language import language_model
from accordion.models.llama import TRAINED
from accordion.train.config import Config, DataConfig, ModelConfig
from accordion.train.data import IGNORED
from accordion.train.language_work import LanguageWork, label_losses
from accordion.train.model import check_folder, check_loss_of_head, configuration

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TINY = ModelConfig(preset="llama-tiny")
SMALL: dict[str, int] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(configuration(TINY, DataConfig()), dtype=torch.float32)  # type: ignore[no-any-return]


def filled(mesh: DeviceMesh, choices: list[tuple[ModelConfig, int]]) -> list[dict[str, torch.Tensor]]:
    """The weights of a run on one rank, for each choice and seed."""
    found = []
    for choice, seed in choices:
        model = acc.shard(language_model(configuration(choice, DataConfig()), "a test"), mesh)
        work = LanguageWork(config=Config(model=choice), files=None, generation={}, spec="")  # type: ignore[arg-type]
        work.fill(model, seed, on_meta=True)
        assert model.training
        found.append(acc.full_state_dict(model))
    return found


def test_presets_have_the_size_in_their_name() -> None:
    named = {"llama-10m": 10e6, "llama-30m": 30e6, "llama-125m": 125e6, "llama-1b": 1e9, "llama-8b": 8e9}
    sizes = {}
    for name in TRAINED:
        model = language_model(configuration(ModelConfig(preset=name), DataConfig(seq_len=8192)), name)
        assert next(model.parameters()).is_meta
        sizes[name] = sum(p.numel() for p in model.parameters())
    assert {name: sizes[name] for name in named} == pytest.approx(named, rel=0.2)
    assert sizes[ModelConfig().preset] == pytest.approx(10e6, rel=0.03)


def test_weights_come_from_the_seed(run_fake: Any, tiny: nn.Module) -> None:
    first, again, other = run_fake(1, 0, filled, [(TINY, 3), (TINY, 3), (TINY, 4)])
    assert first.keys() == tiny.state_dict().keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert all(value.dtype == torch.float32 for value in first.values())


def test_a_folder_is_read_from_scratch_and_pretrained(run_fake: Any, tiny: nn.Module, tmp_path: Path) -> None:
    tiny.save_pretrained(tmp_path)  # type: ignore[operator]
    assert check_folder(str(tmp_path))["vocab_size"] == 1024
    pretrained, scratch = ModelConfig(path=str(tmp_path), init="pretrained"), ModelConfig(path=str(tmp_path))
    loaded, drawn = run_fake(1, 0, filled, [(pretrained, 9), (scratch, 9)])
    for name, value in tiny.state_dict().items():
        assert torch.equal(value, loaded[name]), name
    assert not torch.equal(drawn["lm_head.weight"], loaded["lm_head.weight"])


def test_dropout_is_off(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 8, "n_layer": 1, "n_head": 1, "resid_pdrop": 0.3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    choice = ModelConfig(path=str(tmp_path))
    built = configuration(choice, DataConfig())
    assert (built.resid_pdrop, built.attn_pdrop, built.embd_pdrop) == (0, 0, 0)


def test_the_loss_in_chunks_is_that_of_the_logits(tiny: nn.Module) -> None:
    tokens = torch.randint(0, 1024, (3, 9))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}
    batch["labels"][1, 4:] = IGNORED
    results = []
    for kind in ("plain", "chunked", "head_rows"):
        tiny.zero_grad()
        total, count = label_losses(tiny, batch, kind=kind)
        total.backward()
        results.append([total, count, *(p.grad for p in tiny.parameters())])
    tiny.zero_grad()
    assert "forward" not in vars(tiny.get_output_embeddings())  # type: ignore[operator]
    for expected, *values in zip(*results, strict=True):
        for value in values:
            torch.testing.assert_close(value, expected)


def test_chunks_are_refused_if_the_logits_are_not_the_output_of_the_head() -> None:
    with torch.device("meta"):
        plain, capped = (
            AutoModelForCausalLM.from_config(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=soft_cap))
            for soft_cap in (None, 30.0)
        )
    check_loss_of_head(plain, "chunked", None)
    with pytest.raises(acc.UsageError, match=r"is tied.*take --model\.loss chunked"):
        check_loss_of_head(plain, "head_rows", None)
    with pytest.raises(acc.UsageError, match=r"take --model\.loss plain"):
        check_loss_of_head(capped, "chunked", None)


def test_forwards_do_not_search_for_packed_sequences(tiny: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of an accelerator would wait for that search; the attention is the same without it."""
    search = Mock(wraps=masking_utils.find_packed_sequence_indices)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", search)
    windowed = AutoModelForCausalLM.from_config(MistralConfig(**SMALL, sliding_window=3))
    for model, vocab in ((tiny, 1024), (windowed, 64)):
        batch = torch.randint(0, vocab, (2, 9))
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits.flatten(0, 1)
        assert search.call_count == 1
        expected = functional.cross_entropy(logits.float(), batch[:, 1:].flatten(), reduction="sum")
        assert torch.equal(label_losses(model, {"input_ids": batch[:, :-1], "labels": batch[:, 1:]})[0], expected)
        assert search.call_count == 1
        search.reset_mock()
    assert masking_utils.find_packed_sequence_indices is search
