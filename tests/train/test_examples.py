"""Examples with answers: the tokens that are learnt, and the losses of an example in a row of several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import AddedToken, processors
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from accordion.errors import UsageError
from accordion.models.stored import end_of_turn
from accordion.train import language_work
from accordion.train.config import Config, DataConfig, ModelConfig
from accordion.train.examples import Encoder, Message
from accordion.train.language_work import LanguageWork, check_enough, generation_settings, trained_model
from accordion.train.packing import Collate, ExampleRows, packed, preview
from accordion.train.sources import DataRow
from accordion.train.token_tables import Examples
from tests.support import language_folders

CHATML = (  # as Qwen2.5 has it, without its tools
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
MARKED = (  # the same with marks, and a blank at the beginning of an answer
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}"
    "{% generation %}{{- ' ' + m.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
THINKING = (  # as Qwen3 has it: what comes before the last question is shown without thoughts, the last answer with them
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- m.content + '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}{{ c.arguments | tojson }}{% endfor %}"
    "{{ m.content or '' }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "user", "content": "the quick fox?"},
    {"role": "assistant", "content": "jumps over — ünïcode 🦊 too"},
    {"role": "user", "content": "and\n\nthe dog?"},
    {"role": "assistant", "content": "sleeps  lazily"},
]


def tokenizer(template: str | None = CHATML) -> Any:
    made = language_folders.tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


def example(words: Any, **values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, answers) of a row in which the fields `values` are in line 7 of a file."""
    kind = "chat" if "messages" in values else "prompt"
    return Encoder(words, kind).example(DataRow(where="'x.jsonl' line 7", values=values, split="train"))


def examples_of(ids: np.ndarray, answers: np.ndarray, ends: Sequence[int] | np.ndarray) -> Examples:
    """Return examples whose tokens and answers, (tokens,) each, follow each other; `ends`: of each example."""
    columns = {"ids": np.split(ids, ends)[:-1], "answers": np.split(answers, ends)[:-1]}
    columns["num_answers"] = [int(part.sum()) for part in columns["answers"]]
    return Examples(pa.table(columns), np.arange(len(ends)))


def learnt_of(template: str, messages: list[Message], **values: Any) -> tuple[str, str]:
    """Return the whole text of a chat, and the part that is learnt."""
    words = tokenizer(template)
    ids, answers = example(words, messages=messages, **values)
    return words.decode(ids), words.decode(ids[answers])


def by_hand(kind: str, messages: list[dict[str, str]]) -> list[tuple[str, bool]]:
    """Return the conversation in parts, each with whether the assistant wrote it."""
    parts = [("<|im_start|>system\nBe kind.<|im_end|>\n", False)] if kind == "chatml" else []
    for i, m in enumerate(messages):
        parts.append((f"<|im_start|>{m['role']}\n", False))
        mine = m["role"] == "assistant"
        thought = "<think>\n\n</think>\n\n" if kind == "thinking" and i == len(messages) - 1 else ""
        blank = " " if kind == "marked" and mine else ""
        parts += [(f"{thought}{blank}{m['content']}<|im_end|>", mine), ("\n", False)]
    return parts


@pytest.mark.parametrize(("kind", "template"), [("chatml", CHATML), ("marked", MARKED), ("thinking", THINKING)])
def test_tokens_of_answers_in_a_chat_are_learnt(kind: str, template: str) -> None:
    """Compares characters, because tokenizers report no starts of tokens in bytes."""
    words = tokenizer(template)
    ids, answers = example(words, messages=TALK)
    parts = by_hand(kind, TALK)
    text = "".join(part for part, _ in parts)
    assert words.decode(ids) == text
    mine = [flag for part, flag in parts for _ in part.encode()]
    at = 0
    for number, answer in zip(ids, answers, strict=True):
        piece = words.convert_ids_to_tokens(int(number))
        length = len(piece.encode()) if number in words.all_special_ids else len(piece)  # else a character is a byte
        assert answer == mine[at], (kind, at, piece)
        at += length
    assert at == len(mine)
    assert 0 < answers.sum() < len(ids)


def test_marked_answers_are_those_of_transformers() -> None:
    """Except answers that begin with a blank that is missing from its token's span."""
    words = tokenizer(MARKED.replace("' ' + m.content", "m.content"))
    theirs = words.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    ids, answers = example(words, messages=TALK)
    assert ids.tolist() == theirs["input_ids"]
    assert answers.astype(int).tolist() == theirs["assistant_masks"]


@pytest.mark.parametrize("around", [False, True], ids=["plain", "tokens around a text"])
@pytest.mark.parametrize(("prompt", "completion"), [("the quick", " brown fox"), ("the qu", "ick brown"), ("", "fox")])
def test_a_completion_is_learnt_and_its_end(prompt: str, completion: str, around: bool) -> None:
    """Also if the prompt ends within a token of the whole text: the prompt is tokenized as it will be at generation."""
    words = tokenizer(None)
    if around:
        special = [(word, words.convert_tokens_to_ids(word)) for word in ("b", words.eos_token)]
        template = processors.TemplateProcessing(single=f"b $A {words.eos_token}", special_tokens=special)
        words.backend_tokenizer.post_processor = template
    ids, answers = example(words, prompt=prompt, completion=completion)
    before = words(prompt)["input_ids"]
    before = before[:-1] if around else before
    assert ids[: len(before)].tolist() == before
    assert words.decode(ids[len(before) : -1]) == completion
    assert ids[-1] == words.eos_token_id
    assert answers.tolist() == [False] * len(before) + [True] * (len(ids) - len(before))


SAY = {"role": "user", "content": "a"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"arguments": {"city": "Oslo"}}]}
RAISES = CHATML.replace("{%- for m", "{{ raise_exception('no such talk') }}{%- for m", 1)
COUNTS = CHATML.replace("m.content +", "m.content + messages|length|string +")
WITHOUT_PROMPT = CALLS.partition("{% if add_generation_prompt")[0]
LOST = "cannot be found in the rendered conversation; mark answers"
BAD: dict[str, tuple[Any, ...]] = {  # fields, error, template if not CHATML
    "no list": ({"messages": "hi"}, "field 'messages' is str; it takes a list"),
    "no message": ({"messages": []}, "field 'messages' is empty"),
    "a message that is text": ({"messages": ["hi"]}, "message 1 is str"),
    "no role": ({"messages": [{"content": "a"}]}, "message 1 has no role; it takes one of system"),
    "wrong role": ({"messages": [SAY, {"role": "assistent", "content": "b"}]}, "message 2 has role 'assistent'; did you"),
    "no content": ({"messages": [SAY, {"role": "assistant"}]}, "message 2, of the assistant, has no content"),
    "content of parts": ({"messages": [{"role": "user", "content": []}]}, "has content that is list; it takes text"),
    "an empty answer": ({"messages": [SAY, {"role": "assistant", "content": " "}]}, "message 2, of the assistant, is"),
    "no answer": ({"messages": [SAY]}, "has no message of the assistant"),
    "half a character": ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
    "a weight": ({"messages": [SAY, TALK[1] | {"weight": 0.5}]}, "message 2 has weight 0.5; it takes 0 or 1"),
    "an empty completion": ({"prompt": "a", "completion": ""}, "field 'completion' is empty"),
    "a prompt that is a number": ({"prompt": 3, "completion": "a"}, "field 'prompt' is int, not text"),
    "a template that raises": ({"messages": TALK}, "the chat template fails: no such talk", RAISES),
    "an answer of a count": ({"messages": TALK}, f"message 2 {LOST}", COUNTS),
    "tool calls without a prompt": ({"messages": [CALL, *TALK]}, f"message 1 {LOST}", WITHOUT_PROMPT),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_examples_and_templates_are_reported_with_the_line(case: str) -> None:
    values, expected, *template = BAD[case]
    with pytest.raises(UsageError) as error:
        example(tokenizer(*template), **values)
    assert str(error.value).startswith("'x.jsonl' line 7")
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_are_shown_to_the_template(as_text: bool) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}, "strict": None}]
    given = json.dumps(tools) if as_text else tools
    text, learnt = learnt_of(TOOLS + CHATML, TALK, tools=given)
    assert text.startswith('<|im_start|>system\n[{"type": "function", "function": {"name": "weather"}}]<|im_end|>')
    assert "weather" not in learnt
    assert "weather" not in learnt_of(TOOLS + CHATML, TALK, tools=None)[0]


def test_null_fields_of_arrow_are_removed() -> None:
    calls = [{"name": "look", "arguments": {"city": "Oslo", "a": None, "deep": [{"b": None, "c": [None, 1]}]}}]
    talk = [SAY, {"role": "assistant", "content": None, "tool_calls": calls}]
    text, _ = learnt_of(CALLS, talk)
    assert '{"city": "Oslo", "deep": [{"c": [null, 1]}]}' in text


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_messages_of_weight_zero_are_not_learnt(template: str) -> None:
    for flags in ({"weight": 0}, {"train": False}, {"weight": 1, "train": False}, {"weight": 0.0}):
        talk = [TALK[0], TALK[1] | flags, TALK[2] | {"weight": None}, TALK[3] | {"weight": 1}]
        _, learnt = learnt_of(template, talk)
        assert learnt.strip() == "sleeps  lazily<|im_end|>"


def test_a_token_with_the_blank_before_an_answer_is_learnt() -> None:
    """Templates that write "assistant: " end a prompt with a blank, which becomes part of the first token of the answer."""
    messages = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    template = messages + "{% if add_generation_prompt %}assistant: {% endif %}"
    talk = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "the quick brown"}]
    assert learnt_of(template, talk)[1].strip() == "the quick brown<|im_end|>"


def test_validation_data_without_answers_to_learn_is_refused() -> None:
    ids = np.arange(1, 9)
    rows = {
        split: ExampleRows(examples_of(ids, ids == learnt, [4, 8]), 4, "none")
        for split, learnt in (("train", 3), ("validation", 0))
    }
    with pytest.raises(UsageError, match=r"no validation example of data has an answer to learn among"):
        check_enough(rows, DataConfig(format="chat", packing="none"), 2, "data")


@pytest.mark.parametrize("template", [CHATML, MARKED, THINKING, CALLS])
def test_the_assistant_may_open_a_conversation(template: str) -> None:
    _, learnt = learnt_of(template, TALK[1:])
    assert "".join(learnt.split()).startswith("jumpsover—ünïcode🦊too<|im_end|>")
    assert learnt.endswith("sleeps  lazily<|im_end|>")


def test_the_end_of_a_turn_is_known_by_the_backend_too() -> None:
    """A special token without a name in transformers: text after it is not learnt, and generation stops at it."""
    own = language_folders.tokenizer().backend_tokenizer
    own.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    words = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<|endoftext|>", chat_template=CHATML)
    ids, answers = example(words, messages=TALK[:2])
    assert words.decode(ids[answers]) == "jumps over — ünïcode 🦊 too<|im_end|>"
    assert end_of_turn(words) == words.convert_tokens_to_ids("<|im_end|>")
    assert end_of_turn(language_folders.tokenizer()) is None


def test_the_preview_shows_what_is_learnt() -> None:
    words = tokenizer()
    ids, answers = example(words, messages=TALK)
    (parts,) = preview(examples_of(ids, answers, [len(ids)]), words, 512)
    assert [part for part, learnt in parts if learnt] == [f"{TALK[i]['content']}<|im_end|>" for i in (1, 3)]
    assert "".join(part for part, _ in parts) == words.decode(ids)


def test_the_end_of_an_answer_is_added_to_the_end_tokens(tmp_path: Path) -> None:
    """After the base's own end tokens, the first of which ends a document."""
    folder = language_folders.llama(tmp_path / "llama")
    config = Config(model=ModelConfig(path=str(folder)))
    model = trained_model(config)
    assert generation_settings(config, [7])["eos_token_id"] == [0, 7]
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 0], "temperature": 0.7}')
    settings = generation_settings(config, [7])
    assert settings == {"eos_token_id": [9, 0, 7], "temperature": 0.7}
    files: Any = SimpleNamespace(digest="a", tokenizer_digest="b")
    stored = LanguageWork(config=config, files=files, generation=settings, spec="").progress(model)
    assert stored["generation_config"] == settings
    assert stored["model_config"]["eos_token_id"] == [0, 9, 7]


SEQ = 24


def examples(count: int = 40, longest: int = 20) -> Examples:
    draws = np.random.default_rng(0)
    lengths = draws.integers(3, longest, count)
    tokens = draws.integers(1, 300, lengths.sum())
    answers = draws.random(lengths.sum()) < 0.4
    ends = np.cumsum(lengths)
    answers[ends - 1] = True
    return examples_of(tokens, answers, ends)


def test_packed_rows_have_each_example_once_and_little_padding() -> None:
    lengths = np.random.default_rng(1).integers(1, 65, 500)
    rows = packed(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(lengths[row].sum() <= 64 for row in rows)
    assert len(rows) <= 1.05 * lengths.sum() / 64
    assert packed(np.array([64, 64]), 64) == [[0], [1]]


def test_examples_that_are_cut_are_counted() -> None:
    held = examples(200, longest=60)
    rows = ExampleRows(held, SEQ, "none")
    kept = [i for i in range(len(held)) if held[i][1][1 : SEQ + 1].any()]
    num_long = sum(len(held[i][0]) > SEQ + 1 for i in range(len(held)))
    assert rows.indices.tolist() == kept
    assert rows.lengths.max() == SEQ
    assert f"{num_long} of 200 examples are longer" in str(rows.note())
    assert f"; {200 - len(kept)} of them have no answer left" in str(rows.note())
    assert ExampleRows(examples(), SEQ, "none").note() is None


def alone(model: Any, held: Examples, number: int) -> tuple[float, int]:
    """Return the sum of the answers' losses of one example, computed by plain transformers."""
    ids, answers = (torch.tensor(values) for values in held[number])
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
    losses = functional.cross_entropy(logits, ids[1:], reduction="none")
    return float(losses[answers[1:]].sum()), int(answers[1:].sum())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {"llama": language_folders.llama(place / "llama"), "gpt2": language_folders.gpt2(place / "gpt2")}


@pytest.mark.parametrize(
    ("packing", "kind", "attention", "flat"),
    [
        ("documents", "llama", "sdpa", False),
        ("documents", "llama", "eager", False),
        ("documents", "llama", "sdpa", True),
        ("documents", "gpt2", "sdpa", False),
        ("none", "llama", "sdpa", False),
    ],
)
@torch.no_grad()
def test_losses_of_rows_are_those_of_each_example_alone(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, packing: Any, kind: str, attention: str, flat: bool
) -> None:
    """`flat`: the batch as one row, as flash attention needs it; here with the same kernels."""
    model = AutoModelForCausalLM.from_pretrained(folders[kind], attn_implementation=attention).eval()
    monkeypatch.setattr(language_work, "in_one_row", lambda model: flat)
    held = examples(14)
    rows = ExampleRows(held, SEQ, packing)
    collate = Collate(SEQ, packing)
    assert (len(rows) < len(held)) == (packing == "documents")
    for at in range(0, len(rows), 4):
        numbers = [int(rows.indices[i]) for row in rows.rows[at : at + 4] for i in row]
        expected = [alone(model, held, number) for number in numbers]
        batch = collate([rows[i] for i in range(at, min(at + 4, len(rows)))])
        total, count = language_work.label_losses(model, batch)
        assert float(total) == pytest.approx(sum(loss for loss, _ in expected), rel=1e-4)
        assert int(count) == sum(n for _, n in expected)
        assert int(batch["num_tokens"]) == sum(held.lengths[n] - 1 for n in numbers)
        if packing == "none":
            assert batch["input_ids"].shape[1] == max(held.lengths[n] - 1 for n in numbers)
