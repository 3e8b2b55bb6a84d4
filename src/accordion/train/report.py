"""The page at the end of a run: loss, speed and memory, and what was planned beside what came."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from accordion.describe import Report
from accordion.pages.machine import describe as machine
from accordion.pages.page import Chart, Page, Table
from accordion.train.config import Config, flat
from accordion.train.prepare import Prepared
from accordion.train.screen import human, lasting, millions

NAME = "report"
MOST_POINTS = 1000  # of a curve; of more, every n-th is drawn, and the last
SPEEDS = ("tokens_per_s", "samples_per_s")


def page_of(
    prepared: Prepared,
    units: Report,
    lines: Sequence[dict[str, Any]],
    validations: Sequence[tuple[int, float]],
    device: str,
    ended: str,
) -> Page:
    """Return the page of a run. `lines`: of metrics.jsonl. `validations`: step and loss. `ended`: why the run ended."""
    config, every = prepared.config, max(1, -(-(len(lines) - 1) // (MOST_POINTS - 1)))
    thinned = [*lines[:-1:every], *lines[-1:]]

    def curve(key: str, scale: float = 1.0) -> dict[str, float]:
        return {str(line["step"]): line[key] * scale for line in thinned if line.get(key) is not None}

    loss = {"training": curve("loss")}
    if validations:
        loss["validation"] = {str(step): value for step, value in validations}
    speed = next((key for key in SPEEDS if any(key in line for line in lines)), SPEEDS[0])
    charts = [
        Chart(title="loss", unit="", series=loss),
        Chart(title="speed", unit=speed.replace("_per_s", "/s"), series={"all ranks": curve(speed)}),
        Chart(title="memory", unit="GiB", series={"largest peak of a rank": curve("peak_bytes", 2**-30)}),
        Chart(title="gradient norm", unit="", series={"before clipping": curve("grad_norm")}),
    ]
    here = machine(device)
    defaults = flat(Config())
    keys = [[key, str(value), str(defaults.get(key, ""))] for key, value in flat(config).items()]
    keys.sort(key=lambda row: row[1] == row[2])  # those that differ from their defaults first
    rows = _beside(prepared, lines, validations, device)
    name, done = Path(prepared.run_dir).resolve().name, lines[-1]["step"] if lines else 0
    return Page(
        name=NAME,
        title=f"{name}: {ended}, {done} of {config.train.steps} steps",
        notes=[
            f"model: {prepared.work.name}, {millions(units.total_params)} parameters, {units.strategy} over {units.world} ranks",
            f"machine: {socket.gethostname()}, {here['device']}, {here['cores']} cores, torch {here['torch']}",
            f"ended: {time.strftime('%Y-%m-%d %H:%M %Z')}",
        ],
        tables=[
            Table(title="planned and found", columns=["", "planned", "found"], rows=rows),
            Table(title="settings", columns=["key", "value", "default"], rows=keys),
        ],
        charts=charts,
        data={"machine": here},
    )


def _beside(
    prepared: Prepared, lines: Sequence[dict[str, Any]], validations: Sequence[tuple[int, float]], device: str
) -> list[list[str]]:
    """The first step makes optimizer state, and is left out of the median."""
    config, expected = prepared.config, prepared.expected
    peak = max((line["peak_bytes"] for line in lines), default=0)
    seconds = [line["step_s"] for line in lines]
    # On CPU ranks the plan counts tensors, and the record all that the process holds.
    planned_peak = "" if expected is None or device == "cpu" else human(expected.peak_bytes)
    rows = [
        ["steps", str(config.train.steps), str(lines[-1]["step"] if lines else 0)],
        ["time of all steps", f"{config.train.hours:g} h at most" if config.train.hours else "", lasting(sum(seconds))],
        ["steps left out (NaN, inf)", "0", str(sum(bool(line.get("skipped")) for line in lines))],
        ["peak memory of a rank", planned_peak, human(peak)],
    ]
    if seconds:
        planned = "" if expected is None else "{:.2g} to {:.2g} s".format(*expected.step_s)
        rows.append(["a step", planned, f"{median(seconds[1:] or seconds):.3g} s (median)"])
    if validations:
        step, best = min(validations, key=lambda pair: pair[1])
        rows.append(["lowest validation loss", "", f"{best:.4f} after {step} steps"])
    return rows
