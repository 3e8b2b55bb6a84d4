"""`metrics.jsonl`: its name, and what its lines say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

METRICS = "metrics.jsonl"  # in the run folder


def lines_in(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line of a step, as it stands and what it says; one that was cut off, or is none of ours, is passed over."""
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and isinstance(said.get("step"), int):
            yield line, said
