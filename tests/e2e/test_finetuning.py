"""`accordion train` on chats and prompts: the mean over the answers of the global batch, on any number of ranks; exact resume;
adapters are saved without their base, resume, generate text, and are exported both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from accordion import cli
from tests.e2e.jobs import CHAT, chat_data, losses_of
from tests.support import forked
from tests.support.refused import refused

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LORA = ["--model.path", "base", "--model.init", "pretrained", "--data.path", "rows.jsonl", "--data.format", "prompt"]
LORA += ["--data.seq_len", "32", "--train.micro_batch", "2", "--launch.device", "cpu", *forked.UNTRACKED]
LORA += ["--adapter", "lora", "--adapter.r", "4", "--adapter.alpha", "8", "--train.lr", "0.02", "--train.warmup", "0"]
SIX = ["--train.steps", "6", "--train.global_batch", "4", "--checkpoint.every", "3"]


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    chat_data(place)
    (place / "marked.jinja").write_text(TEMPLATE)
    rows = [{"prompt": f"add {i % 9}", "completion": f" so it is {i % 5}"} for i in range(40)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def train(run_dir: str, *words: str) -> list[float]:
    """Return the loss of each step."""
    assert cli.main(["train", "--run.dir", run_dir, *words]) == 0
    return losses_of(Path(run_dir))


def test_the_loss_is_the_mean_of_the_answers_and_the_run_resumes_exactly_and_on_another_number_of_ranks(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a template of the user, which marks the answers; two ranks of two micro-batches each, and one rank of four."""
    words = [*CHAT, "--data.chat_template", "marked.jinja", "--data.packing", "none", "--train.steps", "4"]
    words += ["--checkpoint.every", "2", "--train.warmup", "0", "--train.global_batch", "8", "--train.micro_batch", "2"]
    whole = train("whole", *words)
    shown = capfd.readouterr().out
    assert "example 3 (learnt: ⟦ ⟧)" in shown
    assert "<assistant>⟦so it is" in shown
    assert whole[0] == pytest.approx(by_hand(place, 8), rel=1e-5)
    for ranks in (2, 1):
        resumed = ["--checkpoint.resume", "whole/checkpoints/step-000002", "--launch.nproc", str(ranks)]
        losses = train(f"on-{ranks}", *words, *resumed)
        assert losses == (whole[2:] if ranks == 2 else pytest.approx(whole[2:], rel=1e-4))


@torch.no_grad()
def by_hand(place: Path, count: int) -> float:
    """Return the loss of the first step: chats at the first positions of the order, rendered and masked by hand."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from accordion.train.data import permutation
    from accordion.train.sources import split_by_key

    model, words = AutoModelForCausalLM.from_pretrained(place / "base").eval(), AutoTokenizer.from_pretrained("base")
    lines = (place / "talks.jsonl").read_text().splitlines()
    train_lines = [line for i, line in enumerate(lines, 1) if split_by_key(f"talks.jsonl:{i}") == "train"]
    total, num = 0.0, 0
    for number in permutation(len(train_lines), 0)[:count]:
        ids, answers = list[int](), list[bool]()
        text = ""
        for m in json.loads(train_lines[number])["messages"]:
            mine = m["role"] == "assistant"
            for part, learnt in ((f"<{m['role']}>", False), (m["content"] + "</s>" * mine, mine)):
                text += part
                whole = words(text, add_special_tokens=False)["input_ids"]
                answers += [learnt] * (len(whole) - len(ids))
                ids = whole
        logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0]
        each = functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        total += float(each[torch.tensor(answers[1:])].sum())
        num += sum(answers[1:])
    return total / num


# -- adapters


@pytest.fixture(scope="module")
def run(place: Path) -> list[float]:
    """Return the losses of a run in the folder "run", which trains adapters."""
    pytest.importorskip("peft")  # who collects would import it for a second
    losses = train("run", *LORA, *SIX)
    assert losses[-1] < losses[0]
    return losses


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=torch.arange(1, 17)[None]).logits


def test_a_run_is_exported_both_ways_peft_loads_it_and_it_writes_what_its_merged_model_writes(
    run: list[float], place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    for words in (["run", "adapter", "--format", "peft"], ["run", "merged"], ["adapter", "merged-again"]):
        assert cli.main(["export", *words]) == 0
    base = AutoModelForCausalLM.from_pretrained("base")
    plain = logits_of(base)
    adapted = peft.PeftModel.from_pretrained(base, "adapter")
    assert adapted.peft_config["default"].base_model_name_or_path == str(place / "base")
    expected = logits_of(adapted)
    assert not torch.allclose(expected, plain, atol=1e-2)
    for folder in ("merged", "merged-again"):
        merged = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(logits_of(merged), expected, rtol=1e-4, atol=1e-4)
    tensors = json.loads(Path("run/checkpoints/step-000006/manifest.json").read_text())["tensors"]
    stored = [name for name in tensors if name.startswith("model/")]
    assert all("lora_" in name for name in stored)
    assert len(stored) == 2 * 7 * 2
    texts = []
    for source in ("run", "merged"):
        capfd.readouterr()
        words = [source, "--prompt", "add 3", "--max-new-tokens", "6", "--json", "--device", "cpu", "--nproc", "2"]
        assert cli.main(["generate", *words]) == 0
        texts.append(json.loads(capfd.readouterr().out.splitlines()[0])["text"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_same_curve(run: list[float], nproc: int) -> None:
    words = ["--checkpoint.resume", "run/checkpoints/step-000003", "--launch.nproc", str(nproc)]
    losses = train(f"lora-on-{nproc}", *LORA, *SIX, *words)
    assert losses == (run[3:] if nproc == 2 else pytest.approx(run[3:], rel=1e-4))


def test_layers_and_sources_without_adapters_are_refused(run: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    for targets, message in (
        ("q_porj", "adapter.targets names 'q_porj', which is no layer"),
        ("act_fn", "act_fn' cannot have adapters"),
    ):
        refused(capfd, ["train", *LORA, "--run.dir", "bad", "--adapter.targets", targets], message)
        assert not Path("bad").exists()
    words = ["export", "base", "none", "--format", "peft"]
    refused(capfd, words, "--format peft takes an adapter, and SOURCE 'base' has none")
