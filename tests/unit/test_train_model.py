"""The model that a run trains: presets, folders, weights; the loss and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from accordion.errors import UsageError
from accordion.train.config import PRESETS, DataConfig, ModelConfig
from accordion.train.data import IGNORED
from accordion.train.evaluate import token_losses
from accordion.train.model import build, check_folder, configuration, on_meta

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TINY = ModelConfig(preset="llama-tiny")


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    return build(configuration(TINY, DataConfig()), TINY, seed=3)


def test_the_default_has_about_ten_million_parameters() -> None:
    model = on_meta(configuration(ModelConfig(), DataConfig()), "preset")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(10e6, rel=0.03)


def test_presets_can_be_built() -> None:
    for name in PRESETS:
        assert next(
            on_meta(configuration(ModelConfig(preset=name), DataConfig(seq_len=8192)), name).parameters()
        ).is_meta


def test_weights_come_from_the_seed(tiny: nn.Module) -> None:
    again = build(configuration(TINY, DataConfig()), TINY, seed=3)
    other = build(configuration(TINY, DataConfig()), TINY, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(tiny.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(tiny.parameters(), other.parameters(), strict=True))
    assert tiny.training
    assert all(p.dtype == torch.float32 for p in tiny.parameters())


def test_a_folder_is_read_from_scratch_and_pretrained(tiny: nn.Module, tmp_path: Path) -> None:
    tiny.save_pretrained(tmp_path)  # type: ignore[operator]
    assert check_folder(str(tmp_path), pretrained=True)["vocab_size"] == 1024
    choice = ModelConfig(path=str(tmp_path), init="pretrained")
    loaded = build(configuration(choice, DataConfig()), choice, seed=9)
    for (name, a), (_, b) in zip(tiny.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    scratch = ModelConfig(path=str(tmp_path))
    drawn = build(configuration(scratch, DataConfig()), scratch, seed=9)
    assert not torch.equal(next(drawn.parameters()), next(loaded.parameters()))


def test_absent_weights_are_named(tiny: nn.Module, tmp_path: Path) -> None:
    tiny.save_pretrained(tmp_path)  # type: ignore[operator]
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "num_hidden_layers": 3}))
    choice = ModelConfig(path=str(tmp_path), init="pretrained")
    with pytest.raises(UsageError, match=r"lack 9 tensors of the model: model.layers.2"):
        build(configuration(choice, DataConfig()), choice, seed=0)


def test_dropout_is_off(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 8, "n_layer": 1, "n_head": 1, "resid_pdrop": 0.3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    choice = ModelConfig(path=str(tmp_path))
    built = configuration(choice, DataConfig())
    assert (built.resid_pdrop, built.attn_pdrop, built.embd_pdrop) == (0, 0, 0)


def test_the_loss_is_that_of_the_next_token(tiny: nn.Module) -> None:
    batch = torch.randint(0, 1024, (3, 9))
    batch[1, 5:] = IGNORED
    batch[2] = IGNORED
    expected = 0.0
    with torch.no_grad():
        for row in (batch[0], batch[1, :5]):
            logits = tiny(input_ids=row[None, :-1]).logits[0]
            expected += functional.cross_entropy(logits, row[1:], reduction="sum").item()
        assert token_losses(tiny, batch).item() == pytest.approx(expected, rel=1e-5)
