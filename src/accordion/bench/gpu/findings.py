"""What a part has found so far: written down as it comes, so that what fails later takes nothing with it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from accordion.pages.page import Table, plain_data
from accordion.workers.ranks import World

CHECK_PATIENCE_S = 1800.0  # on a CPU nothing is measured, and no time is up


class Findings:
    """Owns a part's numbers, tables and failures. `keep` has them written.

    `end`: of time.monotonic(), no answer of a rank is waited for longer.
    """

    def __init__(
        self,
        write: Callable[[], None] = lambda: None,
        *,
        end: float = math.inf,
        patience_s: float = CHECK_PATIENCE_S,
    ) -> None:
        self.data: dict[str, Any] = {}
        self.tables: list[Table] = []
        self.failures: list[str] = []
        self.untold: list[str] = []
        self._write, self._end, self._patience_s = write, end, patience_s

    def keep(self, *tables: Table) -> None:
        """Write what is there; `tables` take the place of those of the same titles."""
        for table in tables:
            at = next((i for i, old in enumerate(self.tables) if old.title == table.title), len(self.tables))
            self.tables[at : at + 1] = [table]
        self._write()

    def fail(self, name: str, error: Exception) -> dict[str, str]:
        """Note that `name` does not run; what stands in its place among the numbers."""
        said = f"{type(error).__name__}: {error}"[:300]
        self.failures.append(f"{name}: {said}")
        return {"failed": said}

    def tell_not(self, line: str) -> None:
        """Note in one line what this device cannot tell, and which one can."""
        self.untold.append(line)

    def has(self, seconds: float) -> bool:
        """Whether so much time is left."""
        return time.monotonic() + seconds <= self._end

    def world(self, device: str, num_ranks: int = 1, threads: int = 8, **more: Any) -> World:
        """Ranks that share the device; on a CPU each takes one thread."""
        left_s = max(1.0, min(self._patience_s, self._end - time.monotonic()))
        threads = 1 if device == "cpu" else threads
        return World(num_ranks=num_ranks, device_type=device, threads=threads, patience_s=left_s, **more)

    def plain(self, **more: Any) -> dict[str, Any]:
        """As JSON takes it."""
        found = {"data": plain_data(self.data), "tables": plain_data(self.tables), **more}
        if self.untold:
            found["not told here"] = "; ".join(self.untold)
        return found | ({"failed": "; ".join(self.failures)} if self.failures else {})


def not_run(name: str, one: dict[str, Any], columns: Sequence[str]) -> list[str]:
    """The row of a table of `columns` for what does not run."""
    return [name, f"does not run: {one['failed']}"[:90], *[""] * (len(columns) - 2)]
