"""Write a plan as one self-contained HTML file: memory along a step, and the streams."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import plotly.graph_objects as go  # type: ignore[import-untyped]

from accordion.errors import UsageError
from accordion.pages.show import HEAD, drawn, html_table, laid_out
from accordion.plan.cli.pages import of_plan
from accordion.plan.events import DISK_STREAM, FETCH, HOST, STEPPER, STORE, Category
from accordion.plan.hardware import GIB
from accordion.plan.replay.peak import curve_of, name_of
from accordion.plan.replay.timeline import Stretch
from accordion.plan.result import Plan, gib

STREAMS = (  # of the chart, bottom to top; the first five are used by offload, "all-reduce" and "copy in" by FSDP2
    *(DISK_STREAM, STEPPER, HOST, STORE, FETCH),
    *("all-reduce", "reduce", "gather", "copy in", "compute"),
)
PIECES = re.compile(r".{1,38}(?:[._ ]|$)|.{1,38}")  # parts of a label that are not wider than a phone
ROOM = 1.45  # height of the chart as a multiple of the curve's, to leave room for the label


def write(plan: Plan, path: Path) -> None:
    """Write the plan's HTML page to `path`. Raises `UsageError` if the file cannot be written."""
    try:
        path.write_text(as_html(plan), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"html {str(path)!r} cannot be written: {error.strerror}.") from None


def as_html(plan: Plan) -> str:
    """Return the plan's HTML page, with plotly's script inside; charts only if the plan was traced."""
    page = of_plan(plan)
    charts = [memory_chart(plan), streams_chart(plan)] if plan.log is not None else []
    verdict, *tables = map(html_table, page.tables)
    notes = "".join(f"<li>{escape(note)}</li>" for note in page.notes)
    body = "".join([verdict, *drawn(charts), *tables, f"<ul>{notes}</ul>"])
    return HEAD.format(title=escape(page.title)) + body + "</body></html>\n"


def peak_label(plan: Plan) -> str:
    """Return HTML text of the peak's size, phase, unit and operator, on lines short enough for a phone."""
    memory = plan.chosen.memory
    assert memory is not None
    peak = memory.peak
    place = " ".join(part for part in (peak.phase, peak.unit) if part)
    lines = (f"peak {gib(peak.num_bytes)} GiB", place, peak.operator)
    return "<br>".join(escape(piece) for line in lines for piece in PIECES.findall(line))


def memory_chart(plan: Plan) -> go.Figure:
    """Return the chart of allocated bytes along a step, stacked by category, with a label at the peak."""
    assert plan.log is not None
    curve = curve_of(plan.log)
    names = [f"{place.phase.value} {name_of(place, plan.log.units)}".strip() for place, _ in curve]
    chart = go.Figure()
    for category in Category:
        values = [live[category.value] / GIB for _, live in curve]
        chart.add_trace(
            go.Scatter(name=category.value, y=values, text=names, stackgroup="all", line={"width": 0.5},
                       hovertemplate="%{y:.2f} GiB %{fullData.name}<br>%{text}<extra></extra>")
        )  # fmt: skip
    totals = [sum(live.values()) / GIB for _, live in curve]
    top = max(range(len(totals)), key=totals.__getitem__)
    side = "right" if top > len(totals) / 2 else "left"
    # The label is placed in the frame, not at the point: next to a point at the end, it would make plotly extend the axis.
    chart.add_annotation(x=1 if side == "right" else 0, xref="x domain", y=1, yref="y domain", yanchor="top", showarrow=False,
                         text=peak_label(plan), xanchor=side, align=side, bgcolor="white", font={"size": 11})  # fmt: skip
    highest = max(totals) * ROOM
    chart.add_shape(type="line", x0=top, x1=top, y0=totals[top], y1=highest, line={"width": 1, "dash": "dot"})
    chart.update_layout(
        hovermode="closest", xaxis_title="events of a step, in order",
        xaxis_range=[0, max(1, len(totals) - 1)], yaxis_range=[0, highest],
    )  # fmt: skip
    return laid_out(chart, "allocated memory in a step", "GiB")


def streams_chart(plan: Plan) -> go.Figure:
    """Return the chart of the work of each stream over the time of a step, at middle rates."""
    steps = plan.chosen.steps
    assert steps is not None
    stretches = steps["middle"].stretches
    chart = go.Figure()
    shown = [stream for stream in STREAMS if any(s.stream == stream for s in stretches)]
    for stream in shown:
        bars: Sequence[Stretch] = [s for s in stretches if s.stream == stream]
        chart.add_trace(
            go.Bar(name=stream, orientation="h", y=[stream] * len(bars), base=[s.start_s * 1e3 for s in bars],
                   x=[s.seconds * 1e3 for s in bars], text=[s.label for s in bars], textposition="none",
                   hovertemplate="%{text}<br>from %{base:.2f} ms, %{x:.2f} ms<extra></extra>",
                   marker_line={"width": 0.5, "color": "white"})
        )  # fmt: skip
    chart.update_layout(barmode="overlay", xaxis_title="ms, at middle rates, uncalibrated", showlegend=False)
    return laid_out(chart, "streams", "", height=160 + 40 * len(shown))
