"""Findings of checks, with their meaning for a training and a remedy; printed as lines or as JSON."""

from __future__ import annotations

import json
import platform
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from accordion.version import VERSION

Severity = Literal["ok", "note", "warning", "problem"]
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "problem")
WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    `check`: its name, such as `disk.space`. `severity`: `problem` if a training fails or is wrong, `warning` if it is slow or
    may fail later, `note` if it concerns only some users, else `ok`. `found`: text on the result. `data`: name -> figure in
    that text. `means`: the effect on a training. `do`: the remedy, not shown for `ok`. `where`: host name; "" for this host.
    """

    check: str
    severity: Severity
    found: str
    means: str
    do: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""


def report(findings: Sequence[Finding], *, about: str, as_json: bool) -> int:
    """Print `findings`, as lines or as one JSON object, and return the exit code: 1 if a finding is a problem, otherwise 0.
    `about`: text on what was examined."""
    software = {"accordion": VERSION, "torch": torch.__version__, "python": platform.python_version()}
    counts = {severity: sum(f.severity == severity for f in findings) for severity in SEVERITIES}
    if as_json:
        entries = [asdict(f) | ({"do": ""} if f.severity == "ok" else {}) for f in findings]
        print(json.dumps({**software, "about": about, "counts": counts, "findings": entries}, indent=2))
    else:
        print(f"{', '.join(f'{name} {version}' for name, version in software.items())}: {about}")
        for finding in findings:
            where = f" [{finding.where}]" if finding.where else ""
            more = (f"means: {finding.means}", f"do: {finding.do}") if finding.severity != "ok" else ()
            for name, text in zip((finding.severity, "", ""), (finding.found + where, *more), strict=False):
                print(textwrap.fill(text, WIDTH, initial_indent=f"  {name:<10}", subsequent_indent=" " * 12))
        print(", ".join(f"{severity}: {count}" for severity, count in reversed(counts.items())), flush=True)
    return int(counts["problem"] > 0)
