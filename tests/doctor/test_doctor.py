"""`accordion doctor` finds each simulated fault, with its meaning and a remedy, and finds none on a healthy machine."""

from __future__ import annotations

import json
import socket
import tomllib
from collections.abc import Callable
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
from accordion.workers.ranks import BenchError
from tests.devices import device
from tests.support import disks, forked, sick_ranks
from tests.support.ranked import on_world

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
Findings = dict[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def small_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_exam, "NUM_BLOCKS", 2)


@pytest.fixture
def examined(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Findings]]:
    """Return a function that runs `accordion doctor` on the disk of `folder`, and returns (exit code, findings by name)."""

    def run(folder: Path = tmp_path) -> tuple[int, Findings]:
        capfd.readouterr()
        code = cli.main(["doctor", "--device", "cpu", "--json", "--dir", str(folder)])
        data = json.loads(capfd.readouterr().out)
        severities = [finding["severity"] for finding in data["findings"]]
        assert data["counts"] == {kind: severities.count(kind) for kind in ("ok", "note", "warning", "problem")}
        for finding in data["findings"]:
            assert finding["found"]
            assert finding["means"]
            assert finding["do"] or finding["severity"] == "ok"
        return code, {finding["check"]: finding for finding in data["findings"]}

    return run


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
    own = {"host": "a", "torch": "2.13.0", "right": True}
    own |= {"gather_bytes": 10**7, "gather_s": 1.0}
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
