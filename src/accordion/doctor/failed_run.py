"""Find the rank for which the others of a failed run waited, from what its ranks wrote into the run folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from accordion.doctor.findings import Finding
from accordion.safety.liveness import wording
from accordion.train.failures import FILES, Failure, failure_in
from accordion.train.run_files import config_of_run

SHOWN = 8  # ranks, or places of ranks
NO_ANSWER = "gave no answer: its process was stopped, hung or killed, or its machine is gone"
ENDED_OTHERWISE = "the run goes on or ended well; or it was ended from outside: by a signal, Ctrl-C or NCCL's watchdog"


def examined(run_dir: Path) -> list[Finding]:
    """Return a list of one finding about the run in `run_dir`: "ok" if no rank has written a failure. Otherwise it is a problem,
    which names the ranks for which the others waited, or, if no such rank is known, what each rank did. Raises `UsageError` if
    `run_dir` is no run folder, or if a rank's file cannot be read."""
    config_of_run(run_dir)
    failures = sorted(map(failure_in, run_dir.glob(FILES)), key=lambda failure: failure.rank)
    if not failures:
        return [Finding(check="run.ranks", severity="ok", found="no rank has written a failure", means=ENDED_OTHERWISE)]
    places = {rank: text for failure in failures for rank, text in failure.others.items()}
    places |= {failure.rank: failure.doing for failure in failures}
    absent = _absent(failures, places)
    others = [failure for failure in failures if failure.rank not in absent]
    waiting = wording.each_of({failure.rank: failure.doing for failure in others[:SHOWN]})
    texts = [f"rank {rank} {places.get(rank, NO_ANSWER)}" for rank in absent[:SHOWN]]
    return [
        Finding(
            check="run.ranks",
            severity="problem",
            found="; ".join(texts) + f"; the others waited for it: {waiting}" * bool(waiting) if texts else waiting,
            means="a collective ends when all of its ranks have joined it"
            + "; these wait in different ones" * (not texts),
            do="look at that place for an error, code that only some ranks run, a loop without end or a slow disk; raise "
            "launch.timeout_s if it was only slow. The same command resumes from the newest checkpoint.",
            data={"waited_for": absent, "errors": {failure.rank: failure.error for failure in failures}},
        )
    ]


def _absent(failures: Sequence[Failure], places: Mapping[int, str]) -> list[int]:
    """Return the ranks for which the others waited: the one rank that most `failures` name as their cause. If they name none,
    return the ranks without a failure, except those in the same place as a rank with one: they waited too, and were ended before
    they could write a failure. `places`: rank -> text on what the rank did."""
    causes = Counter(failure.caused_by for failure in failures if failure.caused_by is not None)
    if causes:
        return [causes.most_common(1)[0][0]]
    silent = set(range(failures[0].num_ranks)) - {failure.rank for failure in failures}
    waits = tuple(failure.doing for failure in failures)
    return [rank for rank in sorted(silent) if not places.get(rank, "").startswith(waits)]
