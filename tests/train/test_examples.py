"""Examples with answers: which token is learnt, held one by one against a rendering by hand, and what no example is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accordion.errors import UsageError
from accordion.train.config import DataConfig
from accordion.train.examples import Encoder
from accordion.train.preview import preview
from accordion.train.rows import DataRow
from accordion.train.sources import find
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
TALK = [
    {"role": "user", "content": "the quick fox?"},
    {"role": "assistant", "content": "jumps over — ünïcode 🦊 too"},
    {"role": "user", "content": "and\n\nthe dog?"},
    {"role": "assistant", "content": "sleeps  lazily"},
]


def tokenizer(template: str | None) -> Any:
    made = language_folders.tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


def row(**values: Any) -> DataRow:
    return DataRow(where="'x.jsonl' line 7", values=values, split="train")


def by_hand(kind: str, messages: list[dict[str, str]]) -> list[tuple[str, bool]]:
    """The conversation in parts, and whether each is the model's."""
    parts = [("<|im_start|>system\nBe kind.<|im_end|>\n", False)] if kind == "chatml" else []
    for i, m in enumerate(messages):
        parts.append((f"<|im_start|>{m['role']}\n", False))
        mine = m["role"] == "assistant"
        thought = "<think>\n\n</think>\n\n" if kind == "thinking" and i == len(messages) - 1 else ""
        blank = " " if kind == "marked" and mine else ""
        parts += [(f"{thought}{blank}{m['content']}<|im_end|>", mine), ("\n", False)]
    return parts


@pytest.mark.parametrize(("kind", "template"), [("chatml", CHATML), ("marked", MARKED), ("thinking", THINKING)])
def test_each_token_of_a_talk_is_the_models_or_not(kind: str, template: str) -> None:
    """Where a token begins is found by bytes, which no tokenizer tells: each character is the model's or not."""
    words = tokenizer(template)
    found = Encoder(words, "chat").example(row(messages=TALK))
    parts = by_hand(kind, TALK)
    text = "".join(part for part, _ in parts)
    assert words.decode(found.ids) == text
    mine = [flag for part, flag in parts for _ in part.encode()]
    at = 0
    for number, answer in zip(found.ids, found.answers, strict=True):
        piece = words.convert_ids_to_tokens(int(number))
        length = len(piece.encode()) if number in words.all_special_ids else len(piece)  # else a character is a byte
        assert answer == mine[at], (kind, at, piece)
        at += length
    assert at == len(mine)
    assert found.answers.sum() == sum(found.answers)
    assert 0 < found.answers.sum() < len(found.ids)


def test_marks_are_those_of_transformers() -> None:
    """Where it finds them: not where an answer begins with a blank that its token does not tell of."""
    words = tokenizer(MARKED.replace("' ' + m.content", "m.content"))
    theirs = words.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    found = Encoder(words, "chat").example(row(messages=TALK))
    assert found.ids.tolist() == theirs["input_ids"]
    assert found.answers.astype(int).tolist() == theirs["assistant_masks"]


@pytest.mark.parametrize(("prompt", "completion"), [("the quick", " brown fox"), ("the qu", "ick brown"), ("", "fox")])
def test_a_completion_is_learnt_and_its_end(prompt: str, completion: str) -> None:
    """Also where the prompt ends within a token of the whole: it is shown as it will be when it is asked."""
    words = tokenizer(None)
    found = Encoder(words, "prompt").example(row(prompt=prompt, completion=completion))
    before = words(prompt)["input_ids"]
    assert found.ids[: len(before)].tolist() == before
    assert words.decode(found.ids[len(before) : -1]) == completion
    assert found.ids[-1] == words.eos_token_id
    assert found.answers.tolist() == [False] * len(before) + [True] * (len(found.ids) - len(before))


SAY = {"role": "user", "content": "a"}
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no list": ("chat", {"messages": "hi"}, "field 'messages' is str; it takes a list"),
    "no message": ("chat", {"messages": []}, "field 'messages' is empty"),
    "a message that is text": ("chat", {"messages": ["hi"]}, "message 1 is str"),
    "no role": ("chat", {"messages": [{"content": "a"}]}, "message 1 has no role; it takes one of system"),
    "wrong role": ("chat", {"messages": [SAY, {"role": "assistent", "content": "b"}]}, "message 2 has role 'assistent'; did you"),
    "no content": ("chat", {"messages": [SAY, {"role": "assistant"}]}, "message 2, of the assistant, has no content"),
    "content of parts": ("chat", {"messages": [{"role": "user", "content": []}]}, "has content that is list; it takes text"),
    "an empty answer": ("chat", {"messages": [SAY, {"role": "assistant", "content": " "}]}, "message 2, of the assistant, is"),
    "no answer": ("chat", {"messages": [SAY]}, "has no message of the assistant"),
    "half a character": ("chat", {"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
    "an empty completion": ("prompt", {"prompt": "a", "completion": ""}, "field 'completion' is empty"),
    "a prompt that is a number": ("prompt", {"prompt": 3, "completion": "a"}, "field 'prompt' is int, not text"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_example_is_told_with_its_line(case: str) -> None:
    kind, values, expected = BAD[case]
    with pytest.raises(UsageError) as error:
        Encoder(tokenizer(CHATML), kind).example(row(**values))
    assert str(error.value).startswith("'x.jsonl' line 7")
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_templates_that_refuse_or_cannot_be_told_apart_are_told() -> None:
    refuses = CHATML.replace("{%- for m", "{{ raise_exception('no such talk') }}{%- for m", 1)
    with pytest.raises(UsageError, match="line 7: the chat template refuses it: no such talk"):
        Encoder(tokenizer(refuses), "chat").example(row(messages=TALK))
    counts = CHATML.replace("m.content +", "m.content + messages|length|string +")
    with pytest.raises(UsageError, match="message 2 cannot be told apart"):
        Encoder(tokenizer(counts), "chat").example(row(messages=TALK))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets", "folder"])
def test_rows_are_read_from_each_format(tmp_path: Path, kind: str) -> None:
    talks = [{"messages": [SAY, {"role": "assistant", "content": str(i)}], "more": i} for i in range(30)]
    if kind in ("jsonl", "folder"):
        path = tmp_path / "x.jsonl"
        path.write_text("\n".join(map(json.dumps, talks)) + "\n\n")
        (tmp_path / "README.md").write_text("beside it")
        path = tmp_path if kind == "folder" else path
    elif kind == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(talks), path := tmp_path / "x.parquet")
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(talks).save_to_disk(path := tmp_path / "set")
    found = list(find(DataConfig(path=str(path), format="chat")).rows())
    assert [r.values for r in found] == [{"messages": talk["messages"]} for talk in talks]
    assert {r.split for r in found} <= {"train", "validation"}
    assert all(str(i + (kind != "datasets")) in r.where for i, r in enumerate(found))


def test_what_is_learnt_is_shown(tmp_path: Path) -> None:
    import numpy as np

    from accordion.train.example_files import Examples

    words = tokenizer(CHATML)
    made = Encoder(words, "chat").example(row(messages=TALK))
    examples = Examples(made.ids, made.answers, np.array([len(made.ids)]))
    (parts,) = preview(examples, words, 512)
    assert [part for part, learnt in parts if learnt] == [
        "jumps over — ünïcode 🦊 too<|im_end|>",
        "sleeps  lazily<|im_end|>",
    ]
    assert "".join(part for part, _ in parts) == words.decode(made.ids)
