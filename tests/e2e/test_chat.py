"""`accordion train --data.format chat`: the mean over the answers of the global batch, on any number of ranks; exact resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from accordion import cli
from tests.e2e.jobs import CHAT, chat_data, losses_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    chat_data(place)
    (place / "marked.jinja").write_text(TEMPLATE)
    return place


def train(run_dir: str, *flags: str) -> list[float]:
    """Return the loss of each step."""
    assert cli.main(["train", *CHAT, "--run.dir", run_dir, *flags]) == 0
    return losses_of(Path(run_dir))


def test_the_loss_is_the_mean_of_the_answers_and_the_run_resumes_exactly_and_on_another_number_of_ranks(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a template of the user, which marks the answers; two ranks of two micro-batches each, and one rank of four."""
    flags = ["--data.chat_template", "marked.jinja", "--data.packing", "none", "--train.steps", "4"]
    flags += ["--checkpoint.every", "2", "--train.warmup", "0", "--train.global_batch", "8", "--train.micro_batch", "2"]
    whole = train("whole", *flags)
    shown = capfd.readouterr().out
    assert "example 3 (learnt: ⟦ ⟧)" in shown
    assert "<assistant>⟦so it is" in shown
    assert whole[0] == pytest.approx(by_hand(place, 8), rel=1e-5)
    for ranks in (2, 1):
        resumed = ["--checkpoint.resume", "whole/checkpoints/step-000002", "--launch.nproc", str(ranks)]
        losses = train(f"on-{ranks}", *flags, *resumed)
        assert losses == (whole[2:] if ranks == 2 else pytest.approx(whole[2:], rel=1e-4))


@torch.no_grad()
def by_hand(place: Path, count: int) -> float:
    """Return the loss of the first step: chats at the first positions of the order, rendered and masked by hand."""
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
