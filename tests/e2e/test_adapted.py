"""`accordion train --adapter lora`: adapters are saved without their base, resume, generate text, and are exported both ways."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from accordion import cli
from tests.e2e.jobs import losses_of
from tests.support import forked, language_folders
from tests.support.refused import refused

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="needs peft"),  # who collects imports it for a second
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
TUNED = ["--model.path", "llama", "--model.init", "pretrained"]
SIX = ["--train.steps", "6", "--train.global_batch", "4", "--checkpoint.every", "3"]
LORA = ["--adapter", "lora", "--adapter.r", "4", "--adapter.alpha", "8", "--train.lr", "0.02", "--train.warmup", "0"]


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    language_folders.llama(place / "llama")
    rows = [{"prompt": f"add {i % 9}", "completion": f" so it is {i % 5}"} for i in range(40)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def words_of(run_dir: str, *flags: str) -> list[str]:
    words = ["--data.path", "rows.jsonl", "--data.format", "prompt", "--data.seq_len", "32", "--train.micro_batch", "2"]
    words += ["--launch.device", "cpu", "--run.dir", run_dir, *forked.UNTRACKED]
    return ["train", *words, *LORA, *flags]


def train(run_dir: str, *flags: str) -> list[float]:
    assert cli.main(words_of(run_dir, *flags)) == 0
    return losses_of(Path(run_dir))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(1, 17)[None]).logits


@pytest.fixture(scope="module")
def run(place: Path) -> str:
    losses = train("run", *TUNED, *SIX)
    assert losses[-1] < losses[0]
    return "run"


def test_a_run_is_exported_both_ways_peft_loads_it_and_it_writes_what_its_merged_model_writes(
    run: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    assert cli.main(["export", run, "adapter", "--format", "peft"]) == 0
    assert cli.main(["export", run, "merged"]) == 0
    assert cli.main(["export", "adapter", "merged-again"]) == 0
    base = AutoModelForCausalLM.from_pretrained("llama")
    plain = logits_of(base)
    adapted = peft.PeftModel.from_pretrained(base, "adapter")
    assert adapted.peft_config["default"].base_model_name_or_path == str(place / "llama")
    expected = logits_of(adapted)
    assert not torch.allclose(expected, plain, atol=1e-2)
    for folder in ("merged", "merged-again"):
        merged = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(logits_of(merged), expected, rtol=1e-4, atol=1e-4)
    checkpoint = Path("run/checkpoints/step-000006")
    tensors = json.loads((checkpoint / "manifest.json").read_text())["tensors"]
    stored = [name for name in tensors if name.startswith("model/")]
    assert all("lora_" in name for name in stored)
    assert len(stored) == 2 * 7 * 2
    written = []
    for source in (run, "merged"):
        capfd.readouterr()
        words = [source, "--prompt", "add 3", "--max-new-tokens", "6", "--json", "--device", "cpu", "--nproc", "2"]
        assert cli.main(["generate", *words]) == 0
        written.append(json.loads(capfd.readouterr().out.splitlines()[0])["text"])
    assert written[0] == written[1]


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_same_curve(place: Path, run: str, nproc: int) -> None:
    words = ["--checkpoint.resume", "run/checkpoints/step-000003", "--launch.nproc", str(nproc)]
    rest, losses = losses_of(Path("run"))[3:], train(f"on-{nproc}", *TUNED, *SIX, *words)
    assert losses == (rest if nproc == 2 else pytest.approx(rest, rel=1e-4))


def test_layers_and_sources_without_adapters_are_refused(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for targets, message in (
        ("q_porj", "adapter.targets names 'q_porj', which is no layer"),
        ("act_fn", "act_fn' cannot have adapters"),
    ):
        refused(capfd, words_of("bad", *TUNED, "--adapter.targets", targets), message)
        assert not Path("bad").exists()
    words = ["export", "llama", "none", "--format", "peft"]
    refused(capfd, words, "--format peft takes an adapter, and SOURCE 'llama' has none")
