"""A trace: what `observe` recorded on all ranks, and its forms: a page, a Perfetto file, a summary, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from statistics import median

from accordion.errors import UsageError
from accordion.observe.findings import findings
from accordion.observe.page import as_html
from accordion.observe.perfetto import as_perfetto
from accordion.observe.values import RankTrace

FORMAT = 1
SHOWN = 3  # findings in a summary
NOTHING = "nothing in these steps would gain more than 1 % of their time"


@dataclass(slots=True)
class Trace:
    """The recorded steps of all ranks. `observe` fills `ranks` when its block ends. Methods that read the steps raise
    `UsageError` if no step was recorded. Methods that write a file also raise it if the file cannot be written."""

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
        """Write the trace as one self-contained HTML page. `plan`: `acc.plan(...).trace()`, whose memory is drawn as well."""
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
        """Read a trace that `save` wrote. Raises `UsageError` if the file cannot be read or is no such trace."""
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
