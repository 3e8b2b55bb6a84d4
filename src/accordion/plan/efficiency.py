"""What training reaches of a card's peaks, by kind of card: read from `efficiency.json`, which published steps made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("efficiency.json")
ATTENTION = "fa2"  # the kernel that torch takes where nobody says another


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of a card's peaks that training reaches. `products`: of its arithmetic. `elementwise`: of its memory's bandwidth,
    by kernels that compute little. `attention`: of its arithmetic, by kernel, forward. `slow`, `fast`: of the speed that follows
    from these, what nine in ten steps of models that were not fitted lie between. `rows`: so many steps made this; 0: a guess.
    `cards`: those that ran them.
    """

    products: float
    elementwise: float
    attention: Mapping[str, float]
    slow: float
    fast: float
    rows: int = 0
    cards: tuple[str, ...] = field(default=())


_TOLD: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
MADE: str = _TOLD["made"]
BY_KIND: Mapping[str, Efficiency] = {
    kind: Efficiency(**{**figures, "cards": tuple(figures.get("cards", ()))})
    for kind, figures in _TOLD["kinds"].items()
}
GUESSED = BY_KIND["guessed"]


def efficiency_of(kind: str) -> Efficiency:
    """Of that kind of card, or the guess."""
    return BY_KIND.get(kind, GUESSED)
