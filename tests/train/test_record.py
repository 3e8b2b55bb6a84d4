"""The record and the output of a run: metrics, tables, progress, trackers, and `accordion watch`."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accordion import cli
from accordion.describe import Report, UnitReport
from accordion.observe.trace import Trace
from accordion.observe.values import COMPUTE, RankTrace, TraceSpan, UnitFacts
from accordion.train import trackers, watch
from accordion.train.config import Config, LogConfig, as_yaml
from accordion.train.metrics import METRICS, MetricsLog, StepMetrics, Validation, peak_bytes, steps_in, text_of
from accordion.train.screen import Screen
from accordion.train.trackers import trackers_of
from tests.support.disks import fill, mounted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def line(step: int, loss: float = 2.5) -> StepMetrics:
    return StepMetrics(
        step=step, loss=loss, grad_norm=1.0, lr=1e-3, tokens_per_s=2000.0, step_s=0.5, peak_bytes=3 << 29, skipped=False
    )


def scalars(folder: Path, name: str) -> dict[int, float]:
    board = EventAccumulator(str(folder))
    board.Reload()
    return {event.step: event.value for event in board.Scalars(name)}


def record(folder: Path, first_step: int = 0) -> MetricsLog:
    """A log with TensorBoard, as runs have it."""
    return MetricsLog(folder, first_step, pytest.fail, trackers_of(Config(), folder, first_step, pytest.fail))


def test_a_line_and_scalars_for_each_step(tmp_path: Path) -> None:
    with record(tmp_path) as log:
        log.step(line(1))
        log.step(line(2, math.nan))
        log.validation(2, Validation(loss=2.25))
    first, second = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert list(first) == ["step", "loss", "grad_norm", "lr", "tokens_per_s", "step_s", "peak_bytes", "skipped"]
    assert (first["step"], first["loss"], first["peak_bytes"]) == (1, 2.5, 3 << 29)
    assert second["loss"] is None
    assert scalars(tmp_path, "loss") == {1: 2.5}
    assert scalars(tmp_path, "tokens_per_s") == {1: 2000, 2: 2000}
    assert scalars(tmp_path, "validation_loss") == {2: 2.25}


def test_a_resumed_record_has_each_step_once(tmp_path: Path) -> None:
    for first, last, loss in ((0, 6, 2.5), (3, 5, 7.0)):
        with record(tmp_path, first) as log:
            for step in range(first + 1, last):
                log.step(line(step, loss))
    expected = {1: 2.5, 2: 2.5, 3: 2.5, 4: 7.0}
    found = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(entry["step"], entry["loss"]) for entry in found] == list(expected.items())
    assert scalars(tmp_path, "loss") == expected


def test_without_tensorboard_a_line_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert not trackers_of(Config(), tmp_path, 0, said.append)
    assert said[0].startswith("not recorded in tensorboard: it is not installed here; pip install tensorboard")
    assert not trackers_of(Config(log=LogConfig(tensorboard=False)), tmp_path, 0, pytest.fail)


def test_a_resumed_record_is_kept_if_the_disk_is_full(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k") as disk:
        with MetricsLog(disk, 0, print, {}) as log:
            for step in range(1, 6):
                log.step(line(step))
        fill(disk)
        before = (disk / "metrics.jsonl").read_text()
        with pytest.raises(OSError, match="No space left"):
            MetricsLog(disk, 3, print, {})
        assert (disk / "metrics.jsonl").read_text() == before


def test_a_full_disk_is_reported_once(tmp_path: Path) -> None:
    said: list[str] = []
    with mounted(tmp_path / "disk", "size=64k") as disk, MetricsLog(disk, 0, said.append, {}) as log:
        log.step(line(1))
        fill(disk)
        for step in range(2, 40):
            log.step(line(step))
        assert said == [f"no longer recorded in {disk}/metrics.jsonl: No space left on device; training goes on"]
        whole = [content["step"] for _, content in steps_in(text_of(disk / "metrics.jsonl"))]
        assert whole == list(range(1, len(whole) + 1))


def test_peak_bytes_grows_with_allocations() -> None:
    before = peak_bytes(torch.device("cpu"))
    held = torch.ones(before // 4 + (64 << 20) // 4)
    assert peak_bytes(torch.device("cpu")) >= held.nbytes


def unit(name: str, num_params: int) -> UnitReport:
    sizes = {"parameter_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 4, "full_bytes": 4}  # of a parameter
    known: dict[str, Any] = {key: num_bytes * num_params for key, num_bytes in sizes.items()}
    known |= {"name": name, "kind": name.partition(".")[0], "num_params": num_params}
    return UnitReport(**{field.name: 0 for field in fields(UnitReport)} | known)


def table(name: str, num_blocks: int, block_params: int) -> list[str]:
    """Return the lines that report a root unit of 2**20 parameters and `num_blocks` blocks."""
    units = (unit("(root)", 1 << 20), *(unit(f"{name}.{i}", block_params) for i in range(num_blocks)))
    total = sum(one.num_params for one in units)
    sizes = {"total_params": total, "unsharded_bytes": 16 * total, "units": units}
    return str(Report(strategy="full_shard", world=2, device="cuda:1", **sizes)).splitlines()


def test_the_table_sums_up_and_compares() -> None:
    title, head, *lines = table("layers", 4, 1 << 18)
    assert title == "full_shard over 2 ranks, this one on cuda:1: bytes on each rank"
    cells = {name: rest for name, *rest in (re.split(r"  +| (?=\d)", line) for line in lines)}
    assert cells["layers.0-3"] == ["1.05 M", "2.0 MiB", "2.0 MiB", "4.0 MiB", "8.0 MiB", "1.0 MiB"]
    assert cells["all units"] == ["2.10 M", "4.0 MiB", "4.0 MiB", "8.0 MiB", "16.0 MiB", "4.0 MiB"]
    assert cells["without sharding"] == ["2.10 M", "8.0 MiB", "8.0 MiB", "16.0 MiB", "32.0 MiB"]
    assert len(head) == len(lines[1]), "numbers end below their names"


def test_the_table_fits_a_narrow_terminal() -> None:
    assert max(map(len, table("model.layers", 40, 1 << 28))) <= 80


def test_without_a_terminal_progress_is_about_a_hundred_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen() as screen:
        screen.start(0, 1050)
        for step in range(1, 1051):
            screen.step(line(step))
    shown = capsys.readouterr().out.splitlines()
    assert 90 <= len(shown) <= 120
    assert shown[-1].startswith("step 1050/1050  loss 2.500  lr 1.0e-03  2,000 tok/s  1.5 GiB/rank")


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen(speaks=False) as screen:
        screen.start(0, 1)
        screen.note("words")
        screen.step(line(1))
        screen.sample("a", "b")
    assert capsys.readouterr() == ("", "")


def test_lines_that_are_no_steps_are_skipped_by_all_readers_of_the_record(tmp_path: Path) -> None:
    whole = [json.dumps({"step": step, "loss": 2.0}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(["7", whole[0], "[1]", "{}", whole[1], '{"step": 3, "lo']))
    assert [content["step"] for _, content in steps_in(text_of(tmp_path / "metrics.jsonl"))] == [1, 2]
    MetricsLog(tmp_path, 2, print, {}).__exit__(None, None, None)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == whole


# -- trackers


def test_figures_are_logged_to_wandb_until_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package that records its calls."""
    wandb = mock.MagicMock()
    wandb.init.return_value.id = "abc"
    wandb.init.return_value.log.side_effect = lambda values: 1 / (values["step"] != 3)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config, said = Config(log=LogConfig(wandb="mine", tensorboard=False)), list[str]()
    for goes_on in (False, True):
        opened = trackers_of(config, tmp_path, int(goes_on), said.append)
        with MetricsLog(tmp_path, 0, said.append, opened) as log:
            log.step(line(1))
            log.validation(1, Validation(loss=2.0))
            if goes_on:
                log.step(line(3))
                log.step(line(4))
    begun = [(words["project"], words["id"], words["resume"]) for _, words in wandb.init.call_args_list]
    assert begun == [("mine", None, None), ("mine", "abc", "allow")]
    run = wandb.init.return_value
    logged = [
        (values["step"], values.get("loss", values.get("validation_loss"))) for (values,), _ in run.log.call_args_list
    ]
    assert logged == [(1, 2.5), (1, 2.0), (1, 2.5), (1, 2.0), (3, 2.5)]
    assert run.finish.mock_calls == [mock.call(exit_code=0)]
    assert said == ["no longer recorded in wandb: division by zero; training goes on"]
    assert not list(tmp_path.glob("events*"))


class Mlflow:
    """The functions of mlflow 3 that a run calls, with its parameters. tests/installed.py runs with the package itself."""

    def set_experiment(self, experiment_name=None, experiment_id=None): ...

    def start_run(
        self, run_id=None, experiment_id=None, run_name=None, nested=False, parent_run_id=None, tags=None
    ): ...

    def log_params(self, params, synchronous=None, run_id=None): ...

    def log_metrics(self, metrics, step=None, synchronous=None, run_id=None, timestamp=None): ...

    def end_run(self, status="FINISHED"): ...


def test_a_resumed_run_continues_its_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = mock.create_autospec(Mlflow, instance=True)
    mlflow.start_run.return_value = mock.Mock(info=mock.Mock(run_id="r"), data=mock.Mock(params={"train.seed": "0"}))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    config = Config(log=LogConfig(mlflow="mine", tensorboard=False))
    for done in (0, 1):
        with MetricsLog(tmp_path, done, pytest.fail, trackers_of(config, tmp_path, done, pytest.fail)) as log:
            log.step(line(done + 1))
            log.validation(done + 1, Validation(loss=2.0))
    assert mlflow.set_experiment.mock_calls == [mock.call("mine")] * 2
    assert [call.kwargs["run_id"] for call in mlflow.start_run.mock_calls] == [None, "r"]
    (settings,) = mlflow.log_params.mock_calls[0].args
    assert settings["log.mlflow"] == "mine"
    assert "train.seed" not in settings, "the server has it already"
    assert mlflow.log_metrics.mock_calls[3] == mock.call({"validation_loss": 2.0}, step=2, synchronous=False)
    assert [call.kwargs["step"] for call in mlflow.log_metrics.mock_calls] == [1, 1, 2, 2]
    assert mlflow.end_run.mock_calls == [mock.call("FINISHED")] * 2


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
