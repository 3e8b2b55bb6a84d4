"""The shares of a card's peak speeds that training reaches, by kind of card, read from `efficiency.json` (fitted)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("efficiency.json")
ATTENTION = "fa2"  # the kernel that torch uses by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The shares of a card's peak speeds that training reaches."""

    products: float  # matrix products: share of peak flops
    elementwise: float  # kernels with little arithmetic: share of peak memory bandwidth
    attention: Mapping[str, float]  # forward of attention by kernel: share of peak flops
    # Nine in ten steps of models that were not in the fit have a speed between `slow` and `fast` times the predicted one.
    slow: float
    fast: float
    rows: int = 0  # number of published steps that were fitted; 0: a guess
    cards: tuple[str, ...] = field(default=())  # the cards that ran them


_DATA: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
MADE: str = _DATA["made"]  # date of the fit
BY_KIND: Mapping[str, Efficiency] = {
    kind: Efficiency(**{**figures, "cards": tuple(figures.get("cards", ()))})
    for kind, figures in _DATA["kinds"].items()
}
GUESSED = BY_KIND["guessed"]


def efficiency_of(kind: str) -> Efficiency:
    """Return the efficiency of a kind of card; the guess if the kind is unknown."""
    return BY_KIND.get(kind, GUESSED)
