"""`accordion train --adapter lora`: what is trained beside a base is kept, goes on, writes text, and goes out both ways."""

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
from tests.support.refused import refused, refused_before_ranks

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


def train(run_dir: str, *flags: str) -> list[float]:
    words = ["--data.path", "rows.jsonl", "--data.format", "prompt", "--data.seq_len", "32", "--train.micro_batch", "2"]
    words += ["--launch.device", "cpu", "--run.dir", run_dir, *forked.UNTRACKED]
    assert cli.main(["train", *words, *LORA, *flags]) == 0
    return losses_of(Path(run_dir))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(1, 17)[None]).logits


@pytest.fixture(scope="module")
def run(place: Path) -> str:
    found = train("run", *TUNED, *SIX)
    assert found[-1] < found[0]
    return "run"


def test_a_run_is_exported_both_ways_and_peft_loads_it(
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
    held = [
        name for name in json.loads((checkpoint / "manifest.json").read_text())["tensors"] if name.startswith("model/")
    ]
    assert all("lora_" in name for name in held)
    assert len(held) == 2 * 7 * 2


def test_a_run_writes_what_its_merged_model_writes(run: str, capfd: pytest.CaptureFixture[str]) -> None:
    if not Path("merged").exists():
        assert cli.main(["export", run, "merged"]) == 0
    written = []
    for source in (run, "merged"):
        capfd.readouterr()
        words = [source, "--prompt", "add 3", "--max-new-tokens", "6", "--json", "--device", "cpu", "--nproc", "2"]
        assert cli.main(["generate", *words]) == 0
        written.append(json.loads(capfd.readouterr().out.splitlines()[0])["text"])
    assert written[0] == written[1]


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_the_same_curve(place: Path, run: str, nproc: int) -> None:
    words = ["--checkpoint.resume", "run/checkpoints/step-000003", "--launch.nproc", str(nproc)]
    rest, found = losses_of(Path("run"))[3:], train(f"on-{nproc}", *TUNED, *SIX, *words)
    assert found == (rest if nproc == 2 else pytest.approx(rest, rel=1e-4))


BAD = {
    "options of none": (["--adapter.r", "8"], "adapter.r is 8, which adapter.kind 'none' does not use; it is for lora."),
    "no such kind": (["--adapter", "lore"], "did you mean 'lora'?"),
    "no rank": (["--adapter", "lora", "--adapter.r", "0"], "adapter.r is 0; it must be between 1"),
    "no scale": (["--adapter", "lora", "--adapter.alpha", "0"], "adapter.alpha is 0.0; it must be above 0"),
    "all dropped": (["--adapter", "lora", "--adapter.dropout", "1"], "must be at least 0 and below 1"),
    "no base": (["--adapter", "lora"], "adapter.kind is 'lora', which needs the weights of a model"),
    "no such layer": ([*TUNED, *LORA, "--adapter.targets", "q_porj"], "adapter.targets names 'q_porj', which is no layer"),
    "a layer of another kind": ([*TUNED, *LORA, "--adapter.targets", "act_fn"], "act_fn' cannot have adapters"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_before_ranks_start(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    words, expected = BAD[case]
    data = ["--model.path", "llama", "--data.path", "rows.jsonl", "--data.format", "prompt"]
    refused_before_ranks(capfd, monkeypatch, [*data, *words], expected)


def test_what_is_no_adapter_is_not_exported_as_one(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["export", "llama", "none", "--format", "peft"]
    refused(capfd, words, "--format peft takes an adapter, and SOURCE 'llama' has none")
