"""A trace as one self-contained HTML page, drawn by the script in `page.html`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from accordion.observe.findings import findings, unit_times
from accordion.observe.perfetto import LANES
from accordion.observe.values import UNITS, RankTrace

MOST_BYTES = 1_700_000  # of spans and points, so that the page stays below 2 MB
PLACE = "/*TRACE*/"  # in the template


def as_html(ranks: Sequence[RankTrace], planned: RankTrace | None = None) -> str:
    """Return the HTML page of the recorded `ranks`, one or more. The memory of the step in `planned` is drawn over that of the
    recorded step. To stay below 2 MB, the page leaves out the last steps, then the last ranks, and says so; the first step of
    the first rank always stays."""
    template = resources.files("accordion.observe").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(page_data(ranks, planned), separators=(",", ":")).replace("</", "<\\/")
    return template.replace(PLACE, data)


def page_data(ranks: Sequence[RankTrace], planned: RankTrace | None = None) -> dict[str, Any]:
    """Return the data that the page's script draws. "ranks": units, steps, spans and memory of each rank as compact lists; last
    steps and last ranks are left out if the lists of all would exceed `MOST_BYTES`. "all_ranks", "all_steps": the numbers of
    all ranks and steps, also those left out. "findings": texts. "plan": (fraction of the planned step's time, bytes) of each
    point, or None. "lanes": names."""
    drawn: list[dict[str, Any]] = []
    left = MOST_BYTES
    num_steps = len(ranks[0].steps)
    while num_steps > 1 and _size(_rank_data(ranks[0], num_steps)) > MOST_BYTES / min(len(ranks), 2):
        num_steps -= 1
    for rank in ranks:
        data = _rank_data(rank, num_steps)
        left -= _size(data)
        if left < 0 and drawn:
            break
        drawn.append(data)
    curve = None
    if planned is not None:
        (start_us, end_us), between = planned.steps[0], planned.shard_bytes + planned.state_bytes
        curve = [(round((p.time_us - start_us) / (end_us - start_us), 4), between + p.total) for p in planned.memory]
    return {
        "lanes": [*LANES, UNITS],
        "ranks": drawn,
        "plan": curve,
        "findings": [finding.text for finding in findings(ranks)],
        "all_ranks": len(ranks),
        "all_steps": len(ranks[0].steps),
    }


def _rank_data(rank: RankTrace, num_steps: int) -> dict[str, Any]:
    lanes = [*LANES, UNITS]
    end_us = rank.steps[:num_steps][-1][1] if rank.steps else 0.0
    kinds = sorted({span.kind for span in rank.spans})
    return {
        "rank": rank.rank,
        "device": rank.device,
        "strategy": rank.strategy,
        "units": [[unit.name, unit.full_bytes, unit.shard_bytes] for unit in rank.units],
        "steps": [[round(start), round(end)] for start, end in rank.steps[:num_steps]],
        "kinds": kinds,
        "spans": [
            [lanes.index(span.lane), kinds.index(span.kind), span.unit, round(span.start_us), round(span.us, 1)]
            for span in rank.spans
            if span.start_us < end_us
        ],
        "memory": [[round(p.time_us), p.full, p.gradients, p.activations, p.other] for p in rank.memory],
        "memory_step": rank.memory_step if rank.memory_step < num_steps else -1,
        "between": [rank.shard_bytes, rank.state_bytes],
        "times": [list(asdict(times).values()) for times in unit_times(rank)],
    }


def _size(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":")))
