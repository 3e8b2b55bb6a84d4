"""Plain values of a trace: spans, memory and units of one rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

COMPUTE, WAIT, UNITS = "compute", "wait", "units"
"""Lanes of a trace that are no side streams: the compute stream, its waits for side streams, and times when units are full."""
LANES = (COMPUTE, WAIT, "gather", "reduce", "all-reduce", "fetch", "store", "host", "host step", "disk", "copy in")
"""All lanes but `UNITS`, in the order in which a trace is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """Name and sizes of a unit: bytes of its full parameters, and of this rank's shard in the dtype in which it is stored."""

    name: str
    full_bytes: int
    shard_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """Work from `start_us` to `end_us`, in microseconds after the first recorded step began. `lane`: `COMPUTE`, `WAIT`,
    `UNITS`, or the name of a side stream or of host work. `kind`: on `COMPUTE` "forward", "backward", "optimizer" or "other";
    on `WAIT` the lane that is waited for; on `UNITS` "full"; else the lane. `unit`: index, in `RankTrace.units`, of the unit
    that the work is for; -1 if it is for none."""

    lane: str
    kind: str
    unit: int
    start_us: float
    end_us: float

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Bytes on the device of a rank `time_us` after the step began, by kind. `full`: full parameters. `activations`, `other`: the
    rest without shards and optimizer states. In a recorded step, `activations` was allocated since the step began (temporaries
    too) and `other` before (0 on CPU); in a planned one, `activations` was allocated by forwards and recomputations."""

    time_us: float
    full: int
    gradients: int
    activations: int
    other: int

    @property
    def total(self) -> int:
        """Sum of the four kinds in bytes, without shards and optimizer states."""
        return self.full + self.gradients + self.activations + self.other


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The recorded steps of one rank. `device`: type, such as "cuda". `units`: in the order of their indices. `steps`: (start,
    end) of each step, in microseconds after the first step began. `spans`: of all lanes, in no particular order.

    `memory`: memory over one step. `memory_step`: the index of that step in `steps`. It is -1 on CPU, where memory is recorded
    in an earlier step that is not in `steps`, because counting allocations takes time. `shard_bytes`, `state_bytes`: bytes of
    this rank's shards of parameters, and of its optimizer states on the device, between steps.
    """

    rank: int
    device: str
    strategy: str
    units: Sequence[UnitFacts]
    steps: Sequence[tuple[float, float]]
    spans: Sequence[TraceSpan]
    memory: Sequence[MemoryPoint]
    memory_step: int
    shard_bytes: int
    state_bytes: int

    def as_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankTrace:
        return cls(
            **{
                **values,
                "units": [UnitFacts(**unit) for unit in values["units"]],
                "steps": [tuple(step) for step in values["steps"]],
                "spans": [TraceSpan(**span) for span in values["spans"]],
                "memory": [MemoryPoint(**point) for point in values["memory"]],
            }
        )
