"""What people usually did where ranks part: from what each rank says of itself to one clause of advice. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ADVICE = "ranks may call different units only in a forward that all of them begin alike; put what they do apart inside one unit."
ALL_TOGETHER = (
    "saves a checkpoint",
    "loads a checkpoint",
    "takes the full state dict",
    "shows full parameters",
    "clips gradients",
    "loads full tensors",
    "begins a backward",
)


def advice(said: Mapping[int, Mapping[str, Any]]) -> str:
    """The likely cause and what to do, where what ranks say of themselves shows one; else `ADVICE`.

    Each rank says `what` it does, and may say that it `evaluates` (its forward has no gradients), has `left_out` the backward of
    the forward before, has `caught` an error in one, or has steps that `adds_up` gradients without reducing them.
    """
    alone = {rank: one["what"] for rank, one in said.items() if str(one.get("what", "")).startswith(ALL_TOGETHER)}
    for key, text in (
        (
            "caught",
            "has caught an error and gone on ({}); what one rank catches all ranks must hear of, or the program must end",
        ),
        (
            "evaluates",
            "runs a forward without gradients and others do not; all ranks must evaluate, with equally many batches",
        ),
        ("left_out", "has left out the backward of its last forward; skip a batch on all ranks or on none"),
        ("adds_up", "runs its backward under no_sync and others do not; all ranks must"),
    ):
        ranks = [rank for rank, one in said.items() if one.get(key)]
        if ranks and len(ranks) < len(said):
            return f"{_each_of(ranks)} {text.format(said[ranks[0]][key])}."
    if alone and len(alone) < len(said):
        first = next(iter(alone))
        return f"{_each_of(list(alone))} {alone[first].split(',')[0]} alone; all ranks must do it."
    return ADVICE


def _each_of(ranks: list[int]) -> str:
    """One rank or several, as the subject of a verb in the singular."""
    return f"{'rank' if len(ranks) == 1 else 'each of ranks'} {', '.join(map(str, ranks))}"
