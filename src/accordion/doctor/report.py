"""Findings on the screen, area by area as they come, or as one JSON object at the end."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec

from accordion.doctor.findings import SEVERITIES, Finding, Severity, as_data, worst
from accordion.version import VERSION

COLOURS: dict[Severity, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}
WIDTH = 110  # where there is no terminal to ask
LEFT = 10  # columns of the severity


class DoctorReport:
    """Owns what was found so far. Everything needs the core alone: colours are there where `rich` is."""

    def __init__(self, *, as_json: bool, head: str) -> None:
        self._as_json, self._head, self._findings, self._area = as_json, head, list[Finding](), ""
        if not as_json:
            self._line(f"accordion doctor {VERSION}: {head}", "bold")

    def add(self, findings: Sequence[Finding]) -> None:
        """Show findings, in the order of their areas, and keep them."""
        self._findings += findings
        if self._as_json:
            return
        for finding in findings:
            if finding.area != self._area:
                self._area = finding.area
                self._line(f"\n{self._area}", "bold")
            self._show(finding)

    def end(self) -> int:
        """Say how it came out; the exit code: 1 where there is a problem."""
        counts = {kind: sum(f.severity == kind for f in self._findings) for kind in SEVERITIES}
        code = int(worst(self._findings) == "problem")
        if self._as_json:
            data = {"accordion": VERSION, "about": self._head, "counts": counts, "findings": as_data(self._findings)}
            print(json.dumps(data, indent=2))
            return code
        said = [f"{counts[kind]} {kind}{'s' * (counts[kind] != 1)}" for kind in reversed(SEVERITIES[1:])]
        self._line(f"\n{', '.join(said)}; {counts['ok']} checks are ok", COLOURS[worst(self._findings)])
        return code

    def _show(self, finding: Finding) -> None:
        where = f" [{finding.where}]" if finding.where else ""
        self._entry(finding.severity, finding.found + where, COLOURS[finding.severity])
        if finding.severity != "ok":
            self._entry("", f"means: {finding.means}", "")
            self._entry("", f"do: {finding.do}", "")

    def _entry(self, name: str, text: str, colour: str) -> None:
        width = shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
        lines = textwrap.wrap(text, max(40, width - LEFT - 2), break_long_words=False, break_on_hyphens=False)
        for i, line in enumerate(lines or [""]):
            self._line(f"  {(name if i == 0 else '').ljust(LEFT)}{line}", colour, len(name) if i == 0 else 0)

    def _line(self, text: str, colour: str, num_coloured: int | None = None) -> None:
        """`num_coloured`: how many letters after the margin have the colour; None: all."""
        if colour and num_coloured != 0 and sys.stdout.isatty() and find_spec("rich") is not None:
            from rich.console import Console
            from rich.text import Text

            shown = Text(text)
            shown.stylize(colour, 0, None if num_coloured is None else 2 + num_coloured)
            Console(highlight=False, soft_wrap=True).print(shown)
            return
        print(text, flush=True)
