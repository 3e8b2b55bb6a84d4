"""A trace in Chrome's JSON format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from accordion.observe.values import COMPUTE, UNITS, WAIT, RankTrace

LANES = (COMPUTE, WAIT, "gather", "reduce", "all-reduce", "fetch", "store", "host", "host step", "disk", "copy in")
FIRST_UNIT = 100  # thread number of the first unit's row


def as_perfetto(ranks: Sequence[RankTrace]) -> str:
    """Return the trace as Chrome JSON: a process per rank, a thread per lane and per unit, and counters of memory by kind."""
    return json.dumps({"traceEvents": [event for rank in ranks for event in _events(rank)], "displayTimeUnit": "ms"})


def _events(rank: RankTrace) -> Iterator[dict[str, Any]]:
    yield _name("process_name", rank.rank, 0, f"rank {rank.rank} ({rank.device})")
    for number, lane in enumerate(LANES):
        yield _name("thread_name", rank.rank, number, lane)
    for number, unit in enumerate(rank.units):
        yield _name("thread_name", rank.rank, FIRST_UNIT + number, f"full: {unit.name}")
    for span in rank.spans:
        is_unit = span.lane == UNITS
        kind = f"wait for {span.kind}" if span.lane == WAIT else span.kind
        yield {
            "name": f"{kind} {rank.units[span.unit].name}" if span.unit >= 0 else kind,
            "cat": span.lane,
            "ph": "X",
            "ts": span.start_us,
            "dur": span.us,
            "pid": rank.rank,
            "tid": FIRST_UNIT + span.unit if is_unit else LANES.index(span.lane),
        }
    for point in rank.memory:
        kinds = {"full parameters": point.full, "gradients": point.gradients, "activations": point.activations}
        kinds["other"] = point.other
        between = {"shards": rank.shard_bytes, "optimizer states": rank.state_bytes}
        yield {"name": "bytes", "ph": "C", "ts": point.time_us, "pid": rank.rank, "args": {**between, **kinds}}


def _name(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
