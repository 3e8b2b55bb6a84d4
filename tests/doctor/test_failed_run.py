"""`accordion doctor RUN_DIR`: names the rank that the others waited for."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from accordion import cli
from accordion.train.failures import LETTERS, Failure
from tests.e2e.jobs import of_task
from tests.support import forked

GATHERS = "gathers unit 3 (layers.3) in the forward of step 7"
HANGS = "is outside of the model after the backward of step 6 at mine.py:9 `fetch()`"
WAITED = Failure(
    rank=0, num_ranks=3, error="this rank ...", doing=GATHERS, caused_by=None, others={1: HANGS, 2: f"{GATHERS} at x"}
)


def finding(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capfd.readouterr()
    code = cli.main(["doctor", str(run_dir), "--json"])
    shown = json.loads(capfd.readouterr().out)["findings"]
    assert code == (shown[0]["severity"] == "problem")
    assert len(shown) == 1
    return dict(shown[0])


@pytest.mark.parametrize(
    ("failures", "words", "waited_for"),
    [
        ([WAITED], f"rank 1 {HANGS}; the others waited for it: rank 0 {GATHERS}", [1]),
        ([replace(WAITED, others={})], "rank 1 gave no answer", [1, 2]),
        (
            [replace(WAITED, rank=2, caused_by=1), replace(WAITED, rank=1, doing="failed: ValueError: x", caused_by=1)],
            f"rank 1 failed: ValueError: x; the others waited for it: rank 2 {GATHERS}",
            [1],
        ),
        (
            [replace(WAITED, num_ranks=2), replace(WAITED, rank=1, num_ranks=2, doing="clips gradients")],
            f"rank 0 {GATHERS}; rank 1 clips gradients",
            [],
        ),
        ([], "no rank has written a failure", None),
    ],
    ids=["hangs", "stopped", "fails", "diverged", "none"],
)
def test_the_rank_that_is_waited_for(
    failures: list[Failure], words: str, waited_for: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("train: {steps: 9}")
    for failure in failures:
        (tmp_path / f"failure-{failure.rank}.json").write_text(json.dumps(asdict(failure)))
    shown = finding(tmp_path, capfd)
    assert words in shown["found"]
    assert shown["data"].get("waited_for") == waited_for


def test_what_is_no_run_or_cut_off_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(tmp_path)]) == 2
    assert "is no folder of a run" in capfd.readouterr().err
    (tmp_path / "config.yaml").write_text("train: {steps: 9}")
    for text in (json.dumps(asdict(WAITED))[:40], "[]", '{"others": {}}'):
        (tmp_path / "failure-0.json").write_text(text)
        assert cli.main(["doctor", str(tmp_path)]) == 2
        error = capfd.readouterr().err
        assert "is not a whole file" in error
        assert len(error.splitlines()) == 1


def test_a_run_with_a_rank_that_hangs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--launch.nproc", "2", "--launch.timeout_s", "5", "--train.steps", "4", "--checkpoint.every", "1"]
    run_dir = tmp_path / "run"
    with forked.commands_in(tmp_path):
        assert cli.main(of_task("Hangs", run_dir, *words)) != 0
        shown = finding(run_dir, capfd)
        assert shown["found"].startswith("rank 1 is outside of the model after the backward of step 2 at own_tasks.py:")
        assert "time.sleep" in shown["found"]
        assert "the others waited for it: rank 0 gathers unit 0 (root) in the forward of step 3" in shown["found"]
        assert all(path.stat().st_size < 5 * LETTERS for path in run_dir.glob("failure-*.json"))
        assert cli.main(of_task("Hangs", run_dir, *words, "--task.step", "0")) == 0
    assert not list(run_dir.glob("failure-*.json")), "of an earlier start"
