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
    found = train("run", *TUNED, "--train.steps", "6", "--log.tensorboard", "true")
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


def test_it_goes_on_exactly_and_on_another_number_of_ranks(place: Path, run: str) -> None:
    flags = [*TUNED, "--train.schedule", "constant", "--train.global_batch", "4"]
    whole = train("whole", *flags, "--train.steps", "4", "--shard.checkpoint_activations", "full")
    train("cut", *flags, "--train.steps", "2", "--adapter.dropout", "0")
    assert train("cut", *flags, "--train.steps", "4") == pytest.approx(whole, rel=1e-4)
    resumed = ["--checkpoint.resume", "cut/checkpoints/step-000002", "--launch.nproc", "1"]
    assert train("one", *flags, "--train.steps", "4", *resumed) == pytest.approx(whole[2:], rel=1e-4)


def test_a_base_that_is_drawn_is_kept_beside_the_run(place: Path) -> None:
    """With other targets, and dropout, which draws the same again where a run goes on."""
    flags = ["--model.preset", "llama-tiny", "--adapter.targets", "q_proj, v_proj", "--adapter.dropout", "0.1"]
    flags += ["--train.schedule", "constant"]
    whole = train("drawn-whole", *flags, "--train.steps", "4")
    train("drawn", *flags, "--train.steps", "2")
    assert train("drawn", *flags, "--train.steps", "4") == whole
    assert cli.main(["export", "drawn", "drawn-merged"]) == 0
    import peft
    from transformers import AutoModelForCausalLM

    logits_of(AutoModelForCausalLM.from_pretrained("drawn-merged"))
    assert cli.main(["export", "drawn", "drawn-adapter", "--format", "peft"]) == 0
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("drawn/base"), "drawn-adapter")
    torch.testing.assert_close(
        logits_of(adapted), logits_of(AutoModelForCausalLM.from_pretrained("drawn-merged")), rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
def test_a_run_with_adapters_on_examples_plans_itself(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train("planned", *TUNED, "--train.steps", "2", "--plan", "auto")
    assert "plan: " in capfd.readouterr().out


BAD = {
    "options of none": (["--adapter.r", "8"], "adapter.r is 8, which adapter.kind 'none' does not use; it is for lora."),
    "no such kind": (["--adapter", "lore"], "did you mean 'lora'?"),
    "no rank": (["--adapter", "lora", "--adapter.r", "0"], "adapter.r is 0; it must be between 1"),
    "no scale": (["--adapter", "lora", "--adapter.alpha", "0"], "adapter.alpha is 0.0; it must be above 0"),
    "all dropped": (["--adapter", "lora", "--adapter.dropout", "1"], "must be at least 0 and below 1"),
    "no such layer": (["--adapter", "lora", "--adapter.targets", "q_porj"], "adapter.targets names 'q_porj', which is no layer"),
    "a layer of another kind": (["--adapter", "lora", "--adapter.targets", "act_fn"], "act_fn' cannot have adapters"),
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
