"""Examples as a table, for tests that need no data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from accordion.train.token_tables import Examples


def examples_of(ids: np.ndarray, answers: np.ndarray, ends: Sequence[int] | np.ndarray) -> Examples:
    """Return examples whose tokens and answers, (tokens,) each, follow each other; `ends`: of each example."""
    columns = {"ids": np.split(ids, ends)[:-1], "answers": np.split(answers, ends)[:-1]}
    columns["num_answers"] = [int(part.sum()) for part in columns["answers"]]
    return Examples(pa.table(columns), np.arange(len(ends)))
