"""A finding: what was looked at, what was found, what it means for a training, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Severity = Literal["ok", "note", "warning", "problem"]
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "problem")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`check`: its name, `area.what`. `severity`: `problem` where a training fails or is wrong, `warning` where it is slow or
    may fail later, `note` for what only some need. `found`: in words, with the figures. `do`: "" where it is `ok`.
    `data`: the figures as plain data. `where`: the host or the ranks, where not all have it.
    """

    check: str
    severity: Severity
    found: str
    means: str
    do: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    def __post_init__(self) -> None:
        assert self.means, f"{self.check} does not say what it means"
        assert self.do or self.severity == "ok", f"{self.check} does not say what to do"

    @property
    def area(self) -> str:
        return self.check.partition(".")[0]


def on_host(findings: Iterable[Finding], host: str) -> list[Finding]:
    """The same, said of one host."""
    return [replace(finding, where=host) for finding in findings]


def as_data(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in findings]


def worst(findings: Iterable[Finding]) -> Severity:
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")
