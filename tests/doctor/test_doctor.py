"""`accordion doctor` finds each fault that is planted, says what it means and what to do, and finds none on a healthy machine."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accordion import cli
from accordion.devices import Devices
from accordion.doctor import command, disk, judged, limits, network, software
from accordion.doctor.findings import Finding
from accordion.workers.ranks import BenchError
from tests.support import disks, forked, sick_ranks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SMALL = ["--device", "cpu", "--nproc", "2", "--disk-mib", "8", "--message-mib", "1"]
Found = dict[str, dict[str, Any]]


def examined(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, Found]:
    """Exit code and findings by name."""
    capfd.readouterr()
    code = cli.main(["doctor", *SMALL, "--json", *words])
    data = json.loads(capfd.readouterr().out)
    assert data["counts"] == {
        kind: sum(f["severity"] == kind for f in data["findings"]) for kind in ("ok", "note", "warning", "problem")
    }
    for finding in data["findings"]:
        assert finding["found"]
        assert finding["means"]
        assert finding["do"] or finding["severity"] == "ok"
    return code, {finding["check"]: finding for finding in data["findings"]}


@pytest.fixture
def machine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, Found]]:
    """The command as it looks at the machine, without ranks."""

    class NoTeam:
        def __init__(self, *_: Any) -> None:
            self.ask = None

        def __enter__(self) -> NoTeam:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(command, "WorkerTeam", NoTeam)
    monkeypatch.setattr(command, "_between", lambda *_: [])
    return lambda *words: examined(capfd, *(words if "--dir" in words else ("--dir", str(tmp_path), *words)))


def said(found: Found, check: str, severity: str, *words: str) -> None:
    assert found[check]["severity"] == severity, found[check]
    for word in words:
        assert word in json.dumps(found[check]), (word, found[check])


# -- a healthy machine


def test_two_healthy_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, found = examined(capfd, "--dir", str(tmp_path))
    assert code == 0
    assert "problem" not in {finding["severity"] for finding in found.values()}
    ranks = {"group", "gather", "exchange", "latency", "clocks", "steps"}
    assert {f"ranks.{name}" for name in ranks} <= set(found)
    assert found["ranks.steps"]["data"]["exact"]
    assert len(found["ranks.steps"]["data"]["losses"][0]) == 5
    rate = found["ranks.gather"]["data"]["bytes_per_s"]
    assert 1e5 < rate < 1e12
    assert list(tmp_path.iterdir()) == []


def test_the_screen_says_what_to_do_where_something_is_to_be_done(
    machine: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "USUAL_FILES", 10**9)
    assert cli.main(["doctor", *SMALL, "--dir", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert "\nlimits\n  warning   " in out
    assert "means: a rank fails with `Too many open files`" in out
    assert "do: ulimit -n 65536" in out
    assert max(map(len, out.splitlines())) <= 110
    assert "0 problems, 1 warning" in out.splitlines()[-1] or "warnings" in out.splitlines()[-1]


def torchrun(words: list[str], nproc: int) -> int:
    """The command itself, whose ranks import for seconds what the tests' fork server has."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), "-m"]
    return subprocess.run([*run, "accordion", *words], check=False, stdin=subprocess.DEVNULL).returncode


@pytest.mark.parametrize("run", [forked.under_torchrun, pytest.param(torchrun, marks=pytest.mark.slow)])
def test_ranks_of_torchrun_look_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], run: Callable[[list[str], int], int]
) -> None:
    words = ["doctor", "--device", "cpu", "--disk-mib", "8", "--message-mib", "1", "--dir", str(tmp_path), "--json"]
    code, shown = run(words, 2), capfd.readouterr()
    assert code == 0, shown.err
    data = json.loads(shown.out)
    found = {finding["check"]: finding for finding in data["findings"]}
    assert "started by torchrun" in data["about"]
    assert found["ranks.steps"]["severity"] == "ok"
    assert found["disk.locks"]["where"] == socket.gethostname()
    assert "network.port" not in found, "torchrun's own store has it"


# -- faults of ranks


def test_faults_of_ranks_are_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock ahead, slow gathers, and an engine whose gradients are wrong."""
    monkeypatch.setattr(command, "START", sick_ranks.skewed_slow_and_wrong)
    code, found = examined(capfd, "--dir", str(tmp_path))
    assert code == 1
    said(found, "ranks.clocks", "warning", "clock of rank 1 is 30.0 s ahead", "set-ntp")
    assert found["ranks.clocks"]["data"]["clocks"][0]["ahead_s"] == pytest.approx(sick_ranks.AHEAD_S, abs=0.5)
    said(found, "ranks.gather", "warning", "usual is", "steps wait for it")
    said(found, "ranks.steps", "problem", "apart by", "learns something else")


def test_wrong_messages_and_errors_of_ranks_are_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "START", sick_ranks.wrong_messages)
    code, found = examined(capfd, "--dir", str(tmp_path))
    assert code == 1
    said(found, "ranks.messages", "problem", "wrong numbers to ranks 0, 1", "in silence")
    said(found, "ranks.steps", "problem", "ranks 0, 1 failed: RuntimeError: no kernel for this")


def test_a_rank_that_dies_is_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "START", sick_ranks.dies)
    code, found = examined(capfd, "--dir", str(tmp_path))
    assert code == 1
    said(found, "ranks.gather", found["ranks.gather"]["severity"])  # what came before is told all the same
    said(found, "ranks.group", "problem", "rank")


def test_what_is_wrong_between_machines() -> None:
    """Of answers as several machines would give them."""
    own = {"host": "a", "torch": "2.13.0", "open_files": 20, "device": "cpu"}
    (found,) = judged.about([own, {**own, "host": "b", "torch": "2.12.1"}])
    assert (found.severity, "2.12.1 and 2.13.0" in found.found) == ("problem", True)
    seconds = {"small": 0.1, "gather": 1.0, "exchange": 1.0, "copy": 0.01}
    answers = [{"seconds": seconds, "bytes": 10**7, "right": True}] * 2
    wide = judged.messages(answers, device_type="cuda", device_name="NVIDIA H100 80GB HBM3", num_hosts=2)
    assert [finding.severity for finding in wide] == ["warning"] * 3
    assert "InfiniBand" in wide[0].found
    near = judged.usual_rate("cuda", "NVIDIA H100 80GB HBM3", 1, 0.0)
    assert near[0] == pytest.approx(0.55 * 450e9)
    assert judged.usual_rate("cuda", "NVIDIA H100 PCIe", 1, 0.0)[0] < near[0] / 5
    slow = judged.about([{**own, "pin_s": 5.0}])[1]
    assert (slow.check, slow.severity) == ("ranks.pinned-memory", "warning")
    nan = judged.steps([{"exact": False, "largest": float("nan"), "losses": [[], []]}])
    assert nan[0].severity == "problem"
    rounded = judged.steps([{"exact": False, "largest": 1e-7, "losses": [[], []]}])
    assert rounded[0].severity == "ok"


def test_an_error_of_the_group_is_a_finding(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise BenchError("contender 'doctor' did not answer within 5 s on rank 1.")

    monkeypatch.setattr(command, "WorkerTeam", fails)
    code, found = machine()
    assert code == 1
    said(found, "ranks.group", "problem", "ranks stopped: did not answer within 5 s on rank 1", "open files")


# -- faults of what is installed


def test_an_unsupported_torch_and_other_packages(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    versions = {"numpy": None, "transformers": "4.57.0", "gguf": None}
    real = metadata.version

    def version(name: str) -> str:
        if name in versions and versions[name] is None:
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(software, "PYTHON", (3, 99))
    code, found = machine()
    assert code == 1
    said(found, "software.torch", "problem", "2.9.1", ">= 2.11, < 2.16", "pip install")
    said(found, "software.numpy", "problem", "numpy is not installed")
    said(found, "software.extra-train", "warning", "transformers 4.57.0 (>= 5)")
    said(found, "software.python", "problem", "3.99")
    monkeypatch.setitem(versions, "transformers", real("transformers"))
    said(machine()[1], "software.extra-export", "note", "not installed: gguf", "pip install 'accordion-fsdp[export]'")


def test_a_package_that_is_not_installed_is_told(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", nothing)
    said(machine()[1], "software.package", "note", "not installed")


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.11", True),
        ("2.15.9+cu130", True),
        ("2.16.0", False),
        ("2.16.0a0+git1", False),
        ("2.10.2", False),
        ("3", False),
    ],
)
def test_ranges_of_versions(version: str, fits: bool) -> None:
    assert software.requirement_of("torch<2.16,>=2.11").takes(version) == fits


def test_every_own_requirement_is_read() -> None:
    for line in metadata.requires(software.NAME) or []:
        need = software.requirement_of(line)
        assert str(need).replace(" ", "").startswith(need.package)
        asked = line.partition(";")[0].rpartition("]")[2].split(",")
        assert len(need.bounds) == sum(bool({*"<>=!"} & {*one}) for one in asked), line


def test_devices_that_torch_does_not_see(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    cpu = Devices("cpu", 0)
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    found = {f.check: f for f in software.devices(cpu, 10**4, tmp_path)}
    assert found["devices.accelerators"].severity == "problem"
    assert "nvidia0" in found["devices.accelerators"].found
    assert found["devices.cores"].severity == "warning"


def test_backends_threads_and_memory(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    monkeypatch.setattr(command, "free_bytes", lambda *_: 2**30)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    code, found = machine()
    assert code == 1
    said(found, "devices.gloo", "problem", "built without gloo")
    said(found, "devices.threads", "warning", "64")
    said(found, "devices.host-memory", "warning", "1.0 GiB")


# -- faults of the network


def test_names_that_do_not_resolve(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "nobody.invalid")
    code, found = machine("--master", "nobody.invalid:29500")
    assert code == 1
    said(found, "network.own-name", "warning", "nobody.invalid", "/etc/hosts")
    said(found, "network.master", "problem", "nobody.invalid", "getent hosts")
    monkeypatch.setenv("MASTER_ADDR", "nobody.invalid")
    said(machine()[1], "network.master", "problem", "MASTER_ADDR")
    monkeypatch.setenv("MASTER_PORT", "70000")
    said(machine()[1], "network.master", "problem", "between 1 and 65535")


def test_a_rank_whose_master_has_no_address_says_so(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it waits for the others until the time-out."""
    for key, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nobody.invalid", "MASTER_PORT": "2"}.items():
        monkeypatch.setenv(key, value)
    began = time.monotonic()
    assert cli.main(["doctor", "--device", "cpu", "--json"]) == 1
    assert time.monotonic() - began < 20
    assert json.loads(capfd.readouterr().out)["findings"][0]["check"] == "network.master"


def test_a_port_in_use(machine: Any) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, found = machine("--master", f"127.0.0.1:{port}")
    assert code == 1
    said(found, "network.port", "problem", f"{port} is in use", "--master-port")
    said(machine("--master", f"127.0.0.1:{port}")[1], "network.port", "ok")


@pytest.mark.parametrize(
    ("answer", "severity"), [(TimeoutError("timed out"), "problem"), (ConnectionRefusedError(), "ok"), (None, "note")]
)
def test_another_machine(answer: OSError | None, severity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins: what the system says of an address that is not its own, and what comes of a connection."""

    class Elsewhere(socket.socket):
        def bind(self, at: Any) -> None:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

        def connect(self, at: Any) -> None:
            if answer is not None:
                raise answer

    monkeypatch.setattr(socket, "socket", Elsewhere)
    found = {f.check: f for f in network.meeting("192.0.2.1:29500", {})}
    assert found["network.port"].severity == severity
    assert "another machine" in found["network.port"].found


def test_interfaces_that_are_not_there(machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^lo")
    code, found = machine()
    assert code == 1
    said(found, "network.gloo-interface", "problem", "eth99")
    here = ["lo", "eth0", "eth01", "ib0"]
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(here)))
    chosen = {value: network._chosen(value, here, prefixes=True) for value in ("eth", "=eth0", "^lo,ib", "^=eth0")}
    assert chosen == {
        "eth": ["eth0", "eth01"],
        "=eth0": ["eth0"],
        "^lo,ib": ["eth0", "eth01"],
        "^=eth0": ["lo", "eth01", "ib0"],
    }
    for name in here:
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text("down\n")
    alone, _, nccl = network.interfaces({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "eth"}, tmp_path)
    assert (alone.severity, nccl.severity) == ("note", "problem")
    assert "is down" in nccl.found


# -- faults of limits


@contextmanager
def limited(which: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


@pytest.mark.parametrize(("soft", "severity"), [(160, "problem"), (512, "warning")])
def test_few_open_files(machine: Any, soft: int, severity: str) -> None:
    with limited(resource.RLIMIT_NOFILE, soft):
        code, found = machine()
    said(found, "limits.open-files", severity, f"{soft} open files", "ulimit -n 65536")
    assert code == (severity == "problem")


def test_little_locked_memory(tmp_path: Path) -> None:
    with limited(resource.RLIMIT_MEMLOCK, 65536):
        kinds = [limits.locked_memory(pins=pins, has_rdma=rdma).severity for pins, rdma in ((0, 0), (1, 0), (1, 1))]
    assert kinds == ["note", "warning", "problem"]
    (tmp_path / "mlx5_0").mkdir()
    assert limits.rdma_cards(tmp_path) == ["mlx5_0"]


def test_little_shared_memory(machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = os.statvfs("/")
    small = os.statvfs_result((*stats[:1], 1024, 2**16, 2**14, 2**14, *stats[5:]))  # 16 MiB, as docker gives 64
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: small if str(path) == "/dev/shm" else real(path))
    code, found = machine()
    assert code == 1
    said(found, "limits.shared-memory", "problem", "16 of 64 MiB", "--shm-size")
    assert limits.shared_memory(tmp_path / "none").severity == "warning"


# -- faults of disks


def test_a_slow_disk(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "BUDGET_S", 0.2)
    for name in ("pwrite", "preadv"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *words, real=real: (time.sleep(0.1), real(*words))[1])
    code, found = machine()
    assert code == 0
    for name in ("write", "read", "direct-write", "direct-read"):
        if f"disk.{name}" in found:
            said(found, f"disk.{name}", "warning", "MB/s", "minutes")


def test_a_full_disk_and_one_in_memory(machine: Any, tmp_path: Path) -> None:
    with disks.mounted(tmp_path / "memory", "size=4m") as folder:
        disks.fill(folder)
        code, found = machine("--dir", str(folder))
    assert code == 1
    said(found, "disk.write", "problem", "No space left")
    said(found, "disk.space", "warning", "tmpfs", "held in memory")


def test_a_disk_without_room_locks_or_direct_access(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LEAST_BYTES", 2**60)
    monkeypatch.setattr(disk, "LITTLE_BYTES", 2**60)
    monkeypatch.setattr(disk, "DIRECT", 0)

    def no_locks(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(disk.fcntl, "flock", no_locks)
    found = {f.check: f for f in disk.disk(tmp_path, 8)}
    assert {name: found[f"disk.{name}"].severity for name in ("space", "locks", "direct")} == {
        "space": "warning" if disk.file_system(tmp_path) in disk.IN_MEMORY else "problem",
        "locks": "note",
        "direct": "note",
    }


def test_kinds_of_file_systems(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    assert disk.file_system(tmp_path / "runs", mounts) == "nfs4"
    assert disk.file_system(Path("/usr"), mounts) == "ext4"


# -- bad input


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc", "-1"],
        ["--nproc", "70000"],
        ["--dir", "nowhere"],
        ["--dir", ""],
        ["--master", "gpu01"],
        ["--master", "gpu01:0"],
        ["--master", ":29500"],
        ["--disk-mib", "1"],
        ["--message-mib", "0"],
        ["--timeout-s", "1"],
        ["--device", "abacus"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "WorkerTeam", None)
    assert cli.main(["doctor", *words]) == cli.BAD_INPUT
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("accordion: ")
    assert err.count("\n") == 1
    assert words[0] in err


def test_a_finding_says_what_to_do() -> None:
    with pytest.raises(AssertionError, match="what to do"):
        Finding(check="a.b", severity="warning", found="it", means="that")
