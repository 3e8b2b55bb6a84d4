"""`accordion train --data.format chat`: the mean over the answers of the global batch, on any number of ranks; exact resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from accordion import cli
from tests.e2e.jobs import losses_of
from tests.support import forked, language_folders
from tests.support.refused import refused_before_ranks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    language_folders.llama(place / "base")
    with (place / "talks.jsonl").open("w") as file:
        for i in range(40):
            talk = [
                {"role": "user", "content": f"add {i % 7}"},
                {"role": "assistant", "content": "so it is " * (1 + i % 4)},
            ]
            more = [{"role": "user", "content": "thanks"}, {"role": "assistant", "content": "ok"}] * (i % 3 == 0)
            file.write(json.dumps({"messages": talk + more}) + "\n")
    (place / "marked.jinja").write_text(TEMPLATE)
    return place


def train(run_dir: str, *flags: str) -> list[float]:
    """Return the loss of each step."""
    words = [
        "--model.path",
        "base",
        "--model.init",
        "pretrained",
        "--data.path",
        "talks.jsonl",
        "--data.format",
        "chat",
    ]
    words += ["--data.seq_len", "96", "--launch.device", "cpu", "--run.dir", run_dir, *forked.UNTRACKED, *flags]
    assert cli.main(["train", *words]) == 0
    return losses_of(Path(run_dir))


def test_ranks_and_micro_batches_make_the_mean_of_the_answers(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two ranks of two micro-batches each, against one rank with all of it; and each step's loss by plain transformers."""
    flags = ["--train.steps", "3", "--data.packing", "none", "--optimizer", "sgd", "--optimizer.lr", "0.05"]
    flags += ["--train.schedule", "linear"]  # SGD is as exact as its gradients; AdamW's first steps go by their signs
    parts = ["--train.micro_batch", "2", "--train.accumulate", "2", "--launch.nproc", "2"]
    two = train("two", *flags, *parts)
    shown = capfd.readouterr().out
    one = train("one", *flags, "--train.micro_batch", "8", "--launch.nproc", "1")
    assert two == pytest.approx(one, rel=1e-5)
    assert "example 3 (learnt: ⟦ ⟧)" in shown
    assert "<assistant>⟦so it is" in shown
    assert two[0] == pytest.approx(by_hand(place, 8), rel=1e-5)


@torch.no_grad()
def by_hand(place: Path, count: int) -> float:
    """The first step's loss: the talks of the order's first positions, rendered and masked by hand."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from accordion.train.data import permutation
    from accordion.train.sources import split_by_key

    model, words = AutoModelForCausalLM.from_pretrained(place / "base").eval(), AutoTokenizer.from_pretrained("base")
    lines = (place / "talks.jsonl").read_text().splitlines()
    kept = [line for i, line in enumerate(lines, 1) if split_by_key(f"talks.jsonl:{i}") == "train"]
    total, num = 0.0, 0
    for number in permutation(len(kept), 0)[:count]:
        ids, answers = list[int](), list[bool]()
        text = ""
        for m in json.loads(kept[number])["messages"]:
            for part, learnt in ((f"<{m['role']}>", False), (f"{m['content']}\n", m["role"] == "assistant")):
                text += part
                whole = words(text, add_special_tokens=False)["input_ids"]
                answers += [learnt] * (len(whole) - len(ids))
                ids = whole
        logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0]
        each = functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        total += float(each[torch.tensor(answers[1:])].sum())
        num += sum(answers[1:])
    return total / num


@pytest.mark.parametrize("packing", ["documents", pytest.param("length", marks=pytest.mark.slow)])
def test_a_run_goes_on_exactly_and_on_another_number_of_ranks(place: Path, packing: str) -> None:
    """With a template of one's own, which marks the answers."""
    flags = [
        "--data.packing",
        packing,
        "--data.chat_template",
        "marked.jinja",
        "--train.steps",
        "4",
        "--checkpoint.every",
        "2",
    ]
    flags += ["--train.warmup", "0", "--train.global_batch", "4", "--train.micro_batch", "2"]
    whole = train(f"{packing}-whole", *flags)
    for ranks in (2, 1):
        resumed = ["--checkpoint.resume", f"{packing}-whole/checkpoints/step-000002", "--launch.nproc", str(ranks)]
        found = train(f"{packing}-on-{ranks}", *flags, *resumed)
        assert found == (whole[2:] if ranks == 2 else pytest.approx(whole[2:], rel=1e-4))


TALKS = ["--data.path", "talks.jsonl", "--data.format", "chat"]
BAD = {
    "no data": (["--data.format", "chat"], "data.format chat takes JSON, JSONL, CSV, parquet"),
    "data of another kind": (["--data.path", "marked.jinja", "--data.format", "chat"], "is text, and data.format chat takes"),
    "no template": ([*TALKS, "--model.path", "plain"], "the tokenizer has no chat template; give"),
    "no template file": ([*TALKS, "--data.chat_template", "x"], "data.chat_template 'x' cannot be read"),
    "no tokenizer": ([*TALKS, "--data.tokenizer", "x"], "data.tokenizer 'x' is neither"),
    "no such field": (["--data.path", "talks.jsonl", "--data.format", "prompt"], "talks.jsonl' line 1 has no field 'prompt'"),
    "all cut": ([*TALKS, "--data.seq_len", "3"], "has an answer to learn among its first 3 tokens"),
    "no JSON": (["--data.path", "bad.jsonl", "--data.format", "chat"], "bad.jsonl' line 2 is no JSON"),
    "an array": (["--data.path", "array.jsonl", "--data.format", "chat"], "this file looks like one array"),
    "one example": (["--data.path", "single.jsonl", "--data.format", "chat"], "has one example; give at least two"),
    "a step larger than the data": ([*TALKS, "--train.micro_batch", "90", "--data.packing", "none"], "takes 180 examples"),
    "packing of text": (["--data.packing", "none"], "which data.format 'text' does not use; it is for chat or prompt."),
    "a template of text": (["--data.chat_template", "marked.jinja"], "which data.format 'text' does not use; it is for chat."),
    "a model that takes no positions": ([*TALKS, "--model.path", "bloom"], "takes no position ids"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_before_ranks_start(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    from transformers import BloomConfig

    words, expected = BAD[case]
    good = (place / "talks.jsonl").read_text().splitlines()[0]
    (place / "bad.jsonl").write_text(f"{good}\n{{\n")
    (place / "single.jsonl").write_text(good)
    (place / "array.jsonl").write_text("[\n1]")
    if not (place / "plain").exists():
        language_folders.llama(place / "plain")
        (place / "plain" / "chat_template.jinja").unlink()
        BloomConfig(vocab_size=400, hidden_size=8, n_layer=1, n_head=1).save_pretrained(place / "bloom")
    base = [] if "--model.path" in words else ["--model.path", "base"]
    refused_before_ranks(capfd, monkeypatch, [*base, *words], expected)
