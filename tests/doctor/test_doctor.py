"""`accordion doctor` finds each simulated fault of a machine, of ranks and of a run, and none on a healthy machine."""

from __future__ import annotations

import json
import socket
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.torch_version import TorchVersion

from accordion import cli
from accordion.devices import Devices
from accordion.doctor import command, ranks
from accordion.doctor import machine as machine_exam
from accordion.errors import UsageError
from accordion.train.failures import LETTERS, Failure
from accordion.workers.ranks import BenchError
from tests.devices import device
from tests.e2e.jobs import of_task
from tests.support import disks, forked, sick_ranks
from tests.support.ranked import on_world

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
Findings = dict[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def small_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_exam, "NUM_BLOCKS", 2)


def examine(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, Findings]:
    """Run `accordion doctor --json` with `words`, and return (exit code, findings by name)."""
    capfd.readouterr()
    code = cli.main(["doctor", "--json", *words])
    data = json.loads(capfd.readouterr().out)
    severities = [finding["severity"] for finding in data["findings"]]
    assert data["counts"] == {kind: severities.count(kind) for kind in ("ok", "note", "warning", "problem")}
    for finding in data["findings"]:
        assert finding["found"]
        assert finding["means"]
        assert finding["do"] or finding["severity"] == "ok"
    return code, {finding["check"]: finding for finding in data["findings"]}


@pytest.fixture
def examined(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Findings]]:
    """Return a function that examines this machine's CPU and the disk of `folder`."""
    return lambda folder=tmp_path: examine(capfd, "--device", "cpu", "--dir", str(folder))


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate the ranks that the command starts by one that answers at once."""
    team = mock.MagicMock()
    answer = {"host": "a", "torch": torch.__version__, "right": True}
    team.return_value.__enter__.return_value.ask.return_value = [answer]
    monkeypatch.setattr(command, "WorkerTeam", team)


def assert_found(findings: Findings, check: str, severity: str, *words: str) -> None:
    assert findings[check]["severity"] == severity, findings[check]
    for word in words:
        assert word in json.dumps(findings[check]), (word, findings[check])


# -- a healthy machine


def test_two_healthy_ranks(examined: Any, tmp_path: Path) -> None:
    code, findings = examined()
    assert code == 0
    assert "problem" not in {finding["severity"] for finding in findings.values()}
    assert {f"ranks.{name}" for name in ("group", "messages", "gather", "exchange")} <= set(findings)
    for check in ("ranks.gather", "ranks.exchange"):
        assert 1e5 < findings[check]["data"]["bytes_per_s"] < 1e12
    assert "over 2 ranks" in findings["ranks.exchange"]["found"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("one_rank")
def test_the_screen_shows_the_remedy_of_a_warning(tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_exam, "SLOW", 1e15)
    assert cli.main(["doctor", "--device", "cpu", "--dir", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert "warning   " in out
    assert "means: a checkpoint of a billion parameters with AdamW takes" in out
    assert "do: use a faster disk for --run.dir" in out
    assert max(map(len, out.splitlines())) <= 110
    assert "problem: 0, " in out.splitlines()[-1]


def test_ranks_of_torchrun_run_one_exam(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "--device", "cpu", "--dir", str(tmp_path), "--json"]
    code, shown = forked.under_torchrun(words, 2), capfd.readouterr()
    assert code == 0, shown.err
    data = json.loads(shown.out)
    findings = {finding["check"]: finding for finding in data["findings"]}
    assert "of torchrun" in data["about"]
    assert findings["ranks.messages"]["severity"] == "ok"
    assert findings["disk.space"]["where"] == socket.gethostname()


# -- faults of ranks


@pytest.mark.parametrize(
    ("ranks", "check", "severity", "words"),
    [
        (sick_ranks.slow, "ranks.gather", "warning", ["usual: ", "steps wait for it"]),
        (sick_ranks.slow_exchange, "ranks.exchange", "warning", ["attention waits for it", "top"]),
        (sick_ranks.wrong_messages, "ranks.messages", "problem", ["wrong numbers to ranks 0, 1", "wrong weights"]),
        (sick_ranks.dies, "ranks.group", "problem", ["rank"]),
    ],
    ids=["slow", "slow exchange", "wrong", "dies"],
)
def test_faults_of_ranks_are_found(
    ranks: Any, check: str, severity: str, words: list[str], examined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "start", ranks)
    code, findings = examined()
    assert code == (severity == "problem")
    assert_found(findings, check, severity, *words)


def test_faults_between_machines() -> None:
    """The answers are those of several machines."""
    own = {"host": "a", "torch": "2.13.0", "right": True, "gather_bytes": 10**7, "gather_s": 1.0}
    group, _, rate = ranks.judged([own, {**own, "host": "b", "torch": "2.12.1"}], "cuda")
    assert (group.severity, "2.12.1 and 2.13.0" in group.found) == ("problem", True)
    assert rate.severity == "warning"
    assert "InfiniBand" in rate.found
    (failed,) = ranks.judged([own, {"error": "RuntimeError: no kernel for this"}], "cuda")
    assert (failed.severity, "rank 1 failed: RuntimeError: no kernel" in failed.found) == ("problem", True)


@on_world(4)
def test_machines_with_other_numbers_of_ranks_time_no_all_to_all(mesh: Any) -> None:
    answer = ranks.RankExam(mesh.get_rank(), 4, device(), 2 if mesh.get_rank() < 2 else 1).gathers()
    assert answer["right"]
    assert "num_near" not in answer


def test_an_error_of_the_process_group_is_a_finding(examined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error = BenchError("contender 'doctor' did not answer within 5 s on rank 1.")
    monkeypatch.setattr(command, "WorkerTeam", mock.Mock(side_effect=error))
    code, findings = examined()
    assert code == 1
    assert_found(findings, "ranks.group", "problem", "ranks stopped: did not answer within 5 s on rank 1", "open files")


# -- faults of devices and disks


def test_devices_that_torch_does_not_find_are_a_problem(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    cpu = Devices("cpu", 0)
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    findings = {f.check: f for f in machine_exam.devices_findings(cpu, 10**4, tmp_path)}
    assert findings["devices.accelerators"].severity == "problem"
    assert "nvidia0" in findings["devices.accelerators"].found
    assert findings["devices.cores"].severity == "warning"


@pytest.mark.parametrize("rank", [0, 1])
def test_each_of_too_many_ranks_is_refused(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(command, "devices_here", lambda: Devices("cuda", 1))
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **address}
    message = "2 ranks were started and this machine has 1 device of type 'cuda'; start fewer"
    with pytest.raises(UsageError, match=message):
        command.run([], environ)


@pytest.mark.parametrize(("version", "severity"), [("2.9.1", "problem"), ("2.11.0", "ok"), ("2.16.0", "problem")])
def test_a_torch_that_is_not_supported_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, version: str, severity: str
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    finding = machine_exam.torch_version()
    assert finding.severity == severity
    assert version in finding.found


def test_the_supported_versions_of_torch_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert "torch>={},<{}".format(*machine_exam.TORCH) in project["dependencies"]


@pytest.mark.usefixtures("one_rank")
def test_a_full_disk_is_a_problem(examined: Any, tmp_path: Path) -> None:
    with disks.mounted(tmp_path / "memory", "size=4m") as folder:
        disks.fill(folder)
        code, findings = examined(folder)
    assert code == 1
    assert_found(findings, "disk.write", "problem", "No space left")
    assert_found(findings, "disk.space", "problem", "free space")


GATHERS = "gathers unit 3 (layers.3) in the forward of step 7"
HANGS = "is outside of the model after the backward of step 6 at mine.py:9 `fetch()`"
WAITED = Failure(
    rank=0, num_ranks=3, error="this rank ...", doing=GATHERS, caused_by=None, others={1: HANGS, 2: f"{GATHERS} at x"}
)


def finding(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code, findings = examine(capfd, str(run_dir))
    (shown,) = findings.values()
    assert code == (shown["severity"] == "problem")
    return shown


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
