"""A trace: what `observe` recorded on all ranks, and its forms: a page, a Perfetto file, a summary, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from accordion.errors import UsageError
from accordion.observe.findings import findings, unit_times
from accordion.observe.values import LANES, UNITS, WAIT, RankTrace

FORMAT = 1
MOST_BYTES = 1_700_000  # of spans and points, so that the page stays below 2 MB
PLACE = "/*TRACE*/"  # in page.html, whose script draws the page
FIRST_UNIT = 100  # thread number of the first unit's row in a Perfetto file
SHOWN = 3  # findings in a summary
NOTHING = "nothing in these steps would gain more than 1 % of their time"


@dataclass(slots=True)
class Trace:
    """The recorded steps of all ranks. `observe` fills `ranks` when its block ends. Methods that read the steps raise
    `UsageError` if no step was recorded. Methods that write a file also raise `UsageError` if the file cannot be written."""

    ranks: list[RankTrace] = field(default_factory=list)

    def recorded(self) -> Sequence[RankTrace]:
        """Return `ranks`. Raises `UsageError` if no step was recorded."""
        if not any(rank.steps for rank in self.ranks):
            raise UsageError(
                "this trace has no step: an optimizer step of the observed model must end inside the block of observe."
            )
        return self.ranks

    def lines(self) -> list[str]:
        """Return a line with the median time of a step, then up to three lines with the changes that would save most. Changes
        that save less than 1 % of a step are left out; if none is left, a line says so."""
        ranks = self.recorded()
        durations = [end - start for rank in ranks for start, end in rank.steps]
        title = f"{len(ranks[0].steps)} steps on {len(ranks)} ranks, {median(durations) / 1e3:.1f} ms each (median)"
        texts = [finding.text for finding in findings(ranks)[:SHOWN]] or [NOTHING]
        return [title, *(f"- {text}" for text in texts)]

    def summary(self) -> None:
        """Print the median time of a step, and up to three changes that would save most."""
        print("\n".join(self.lines()))

    def html(self, path: str | Path, plan: Trace | None = None) -> None:
        """Write the trace as one self-contained HTML page. `plan`: `acc.plan(...).trace()`, to draw its memory too."""
        write_text(path, as_html(self.recorded(), None if plan is None else plan.recorded()[0]))

    def _repr_html_(self) -> str:
        """Return HTML of a frame with the page. A notebook shows it if a cell ends with the trace."""
        return f'<iframe srcdoc="{escape(as_html(self.recorded()))}" style="width: 100%; height: 800px; border: 0"></iframe>'

    def perfetto(self, path: str | Path) -> None:
        """Write the trace as Chrome JSON, for ui.perfetto.dev."""
        write_text(path, as_perfetto(self.recorded()))

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON, which `Trace.open` reads."""
        ranks = [asdict(rank) for rank in self.recorded()]
        write_text(path, json.dumps({"accordion_trace": FORMAT, "ranks": ranks}, separators=(",", ":")))

    @classmethod
    def open(cls, path: str | Path) -> Trace:
        """Return the trace that `save` wrote to the file `path`. Raises `UsageError` if it is unreadable or no trace."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if values["accordion_trace"] != FORMAT:
                raise UsageError(
                    f"{str(path)!r} is a trace of format {values['accordion_trace']!r}; this reads {FORMAT}."
                )
            return cls([RankTrace.from_json(rank) for rank in values["ranks"]])
        except OSError as error:
            raise UsageError(f"the trace {str(path)!r} cannot be read: {error.strerror}.") from None
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{str(path)!r} is not a whole trace that Trace.save wrote.") from None


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to the file `path`. Raises `UsageError` if that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror}.") from None


# -- the page


def as_html(ranks: Sequence[RankTrace], planned: RankTrace | None = None) -> str:
    """Return the HTML page of `ranks`, one or more. The memory of the step in `planned` is drawn over that of the recorded step.
    To stay below 2 MB, the page omits the last steps, then the last ranks, and says so; one step of the first rank stays."""
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


# -- the Perfetto file


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
