"""Examples as a person sees them before a run: what is learnt plain, what is masked dimmed."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from accordion.train.token_tables import Examples

SHOWN = 3  # examples
LONGEST = 1200  # characters of one; of a longer one the middle is left out
Part = tuple[str, bool]
"""A text, and whether it is learnt."""


def preview(examples: Examples, tokenizer: Any, seq_len: int) -> list[list[Part]]:
    """The first examples as they will be learnt, cut to `seq_len` labels."""
    return [_parts(examples, number, tokenizer, seq_len) for number in range(min(SHOWN, len(examples)))]


def _parts(examples: Examples, number: int, tokenizer: Any, seq_len: int) -> list[Part]:
    ids, learnt = (values[: seq_len + 1].copy() for values in examples[number])
    learnt[:1] = False  # nothing comes before it
    parts, end = list[Part](), 0
    whole = ""
    for is_learnt, run in groupby(range(len(ids)), key=lambda i: bool(learnt[i])):
        end = max(run) + 1
        text = tokenizer.decode(np.asarray(ids[:end]).tolist(), skip_special_tokens=False)
        parts.append((text[len(whole) :], is_learnt))
        whole = text
    return _shortened(parts)


def _shortened(parts: list[Part]) -> list[Part]:
    """The middle of long parts left out, so that a person sees where each begins and ends."""
    room = max(80, LONGEST // max(1, len(parts)))
    return [
        (text if len(text) <= room else f"{text[: room // 2]} […] {text[-room // 2 :]}", learnt)
        for text, learnt in parts
    ]
