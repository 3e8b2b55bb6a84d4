"""`accordion watch`: one picture of runs, from files that are cut, replaced, foreign or absent."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from accordion import cli
from accordion.observe.trace import Trace
from accordion.observe.values import COMPUTE, RankTrace, TraceSpan, UnitFacts
from accordion.train import watch
from accordion.train.config import Config, as_yaml
from accordion.train.metrics import METRICS


def step(number: int, **more: Any) -> str:
    values = {"loss": 8.0 / number, "tokens_per_s": 1000.0 * number, "step_s": 0.5, "peak_bytes": 3 << 29}
    return json.dumps({"step": number, **values, **more}) + "\n"


def shown(*folders: Path, width: int = 80) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(watch.picture(folders, width))
    lines = captured.get().splitlines()
    assert all(len(line) <= width for line in lines)
    return "\n".join(lines)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "mine"
    path.mkdir()
    (path / "config.yaml").write_text(as_yaml(Config()))  # 100 steps
    return path


def test_a_run_from_its_start_over_its_restart_to_its_end(folder: Path) -> None:
    assert "no step yet" in shown(folder)
    metrics = folder / METRICS
    times_s = [0.1] * 12 + [0.4] * 7 + [30.0]
    metrics.write_text("".join(step(i, step_s=time_s) for i, time_s in enumerate(times_s, 1)) + step(21)[:20])
    for name in ("step-000009", "step-000010", "best", "abandoned-1"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    text = shown(folder)
    plain = " ".join(text.replace("│", "").split())
    # Step 21 is a line that is still being written, so step 20 is the newest.
    for words in (
        *("step 20 of 100 runs", "loss 0.4000", "tokens/s 20,000", "memory 1.5 GiB a rank", "time left 8 s"),
        *("checkpoints 2, newest step-000010, best", "0.1 s █", "█ 12 ", "█ 8 "),
    ):
        assert words in plain

    metrics.write_text("".join(map(step, range(1, 4))))  # resumed from an earlier step
    assert "step 3 of 100" in shown(folder)
    metrics.write_text("".join([step(100), "a foreign line\n", '{"step": 100, "loss": "x"}\n', "[]\n"]))
    assert "finished" in shown(folder)
    metrics.write_text(step(4, loss=None))
    os.utime(metrics, (time.time() - 7200,) * 2)
    assert "no step for 2:00 h" in shown(folder)
    (folder / "failure-1.json").write_text("{}")
    assert "failed: accordion doctor" in shown(folder, width=200)
    assert metrics.read_text() == step(4, loss=None)


def test_several_runs_are_side_by_side_if_they_fit(folder: Path) -> None:
    (folder / METRICS).write_text("".join(map(step, range(1, 60))))
    heights = [len(shown(folder, folder, width=width).splitlines()) for width in (40, 80, 200)]
    assert heights[0] == 2 * heights[1] == 2 * heights[2]


def test_the_newest_trace_names_the_straggler(folder: Path) -> None:
    def rank(number: int, busy_us: float) -> RankTrace:
        unit = UnitFacts(name="layers.0", full_bytes=8, shard_bytes=4)
        span = TraceSpan(lane=COMPUTE, kind="forward", unit=0, start_us=0, end_us=busy_us)
        return RankTrace(
            rank=number, device="cpu", strategy="no_shard", units=[unit], steps=[(0, 9000)], spans=[span], memory=[],
            memory_step=-1, shard_bytes=0, state_bytes=0,
        )  # fmt: skip

    (folder / "trace-100.json").write_text("{")
    assert "'trace-100.json'" in shown(folder, width=200).replace(str(folder) + "/", "")
    os.utime(folder / "trace-100.json", (1, 1))
    Trace([rank(0, 3000.0), rank(1, 9000.0)]).save(folder / "trace-200.json")
    assert "trace-200.json: rank 1 computes for 9.0 ms in a step" in shown(folder, width=200)


def test_the_command(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / METRICS).write_text(step(1))
    assert cli.main(["watch", str(folder), "--once"]) == 0
    assert "step 1 of 100" in capfd.readouterr().out
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("{")
    for words, wrong in (
        ([str(tmp_path)], "is no folder of a run"),
        ([str(folder), str(tmp_path / "absent")], "is no folder of a run"),
        ([str(tmp_path / "other")], "is no YAML"),
        ([], "takes folders of runs"),
        ([str(folder), "--onse"], "did you mean '--once'?"),
    ):
        assert cli.main(["watch", *words]) == 2
        error = capfd.readouterr().err
        assert wrong in error
        assert len(error.splitlines()) == 1
