"""`failure-RANK.json` in the run folder: what a rank writes when it fails, for `accordion doctor`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from accordion.errors import DivergenceError, UsageError
from accordion.files import write_whole
from accordion.safety.liveness import wording
from accordion.safety.liveness.hub import hubs_of_job

FILES = "failure-*.json"
LETTERS, MOST_RANKS = 2000, 64  # of a text, and of ranks in `others`, so that a file stays below 200 kB


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a rank failed. `doing`: what it was doing in the job, such as "gathers unit 3 (layers.3) in the forward of step 7".
    `caused_by`: rank that failed first, if known. `others`: other rank -> what it did or how it had ended; {} if not asked."""

    rank: int
    num_ranks: int
    error: str
    doing: str
    caused_by: int | None
    others: Mapping[int, str]


@contextmanager
def recorded(run_dir: Path, rank: int, num_ranks: int) -> Iterator[None]:
    """Context manager that raises an `Exception` of its body again, after writing it into `failure-RANK.json` in `run_dir` if
    possible. If another rank may have caused it, first asks all others what they do, which takes a second if one is silent."""
    try:
        yield
    except Exception as error:
        with suppress(OSError, RuntimeError):  # must not hide the error
            hub = next(iter(hubs_of_job()), None)
            is_own = not isinstance(error, DivergenceError) and not wording.is_echo(error)
            doing = getattr(error, "doing", "") or wording.failure(error, "" if hub is None else hub.position.phase)
            others = {} if hub is None or is_own else {**hub.where(hub.ranks), **hub.ended}
            failure = Failure(
                rank=rank,
                num_ranks=num_ranks,
                error=" ".join(str(error).split())[:LETTERS],
                doing=doing[:LETTERS],
                caused_by=rank if is_own else getattr(error, "of_rank", None),
                others={other: text[:LETTERS] for other, text in sorted(others.items())[:MOST_RANKS] if other != rank},
            )
            write_whole(run_dir / FILES.replace("*", str(rank)), json.dumps(asdict(failure)))
        raise


def failure_in(path: Path) -> Failure:
    """Return the failure that `recorded` wrote into the file `path`. Raises `UsageError` if it cannot be read from there."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Failure(**{**values, "others": {int(rank): text for rank, text in values["others"].items()}})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"{str(path)!r} is not a whole file of a rank that failed; remove it to read the others."
        ) from None
