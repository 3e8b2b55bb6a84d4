"""Two hosts, each a network namespace of its own, whose link is cut for good: all ends with a word why, and one host goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from accordion.checkpoint import latest
from accordion.checkpoint.reading import verify
from tests.e2e.jobs import TINY, lines_of, until

TIMEOUT_S = 20  # of a rank
READ_S = 45  # of its agent, which ends its other ranks first
SLOW_S = 15  # what a busy machine takes beside


class Hosts:
    """Two namespaces with an address each, on a bridge in a third one. Owns them and what runs in them."""

    def __init__(self) -> None:
        self._names = [f"accordion-{os.getpid()}-{end}" for end in ("a", "b", "bridge")]
        for name in self._names:
            ip("netns", "add", name)
        bridge = self._names[2]
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        for i, name in enumerate(self._names[:2]):
            ip("-n", name, "link", "add", "net0", "type", "veth", "peer", "name", f"port{i}", "netns", bridge)
            ip("-n", bridge, "link", "set", f"port{i}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{address(i)}/24", "dev", "net0")
            ip("-n", name, "link", "set", "net0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Nothing that either sends arrives any more; both still see their own end up."""
        ip("-n", self._names[2], "link", "set", "port1", "nomaster")

    def start(self, host: int, nodes: int, out: Path, *flags: str) -> subprocess.Popen[str]:
        """One rank on `host` under torchrun's agent."""
        words = ["--nnodes", str(nodes), "--nproc-per-node", "1", "--max-restarts", "0"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address(0)}:29400"]
        words += ["--rdzv-conf", f"is_host={int(host == 0)}"]
        words += ["--rdzv-id", f"job{nodes}", "--local-addr", address(host), "-m", "accordion", "train"]
        return self.python(host, out, "-m", "torch.distributed.run", *words, *flags)

    def python(self, host: int, out: Path, *words: str, **environ: str) -> subprocess.Popen[str]:
        """Start `python *words` on `host`, with its output in `out`."""
        with out.open("w") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._names[host], sys.executable, *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "net0", **environ},
                text=True,
            )

    def ranks(self, host: int, agent: int) -> list[int]:
        """What runs on a host beside torchrun's agent."""
        held = run("ip", "netns", "pids", self._names[host]).split()
        return [pid for pid in map(int, held) if pid != agent]

    def close(self) -> None:
        for host in range(2):
            with suppress(subprocess.CalledProcessError):
                for pid in self.ranks(host, 0):
                    os.kill(pid, signal.SIGKILL)
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def address(host: int) -> str:
    return f"10.213.7.{host + 1}"


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def ip(*words: str) -> None:
    run("ip", *words)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("no ip command: network namespaces cannot be made here")
    made = Hosts.__new__(Hosts)
    try:
        made.__init__()  # type: ignore[misc]
    except (OSError, subprocess.CalledProcessError) as error:
        made.close()
        pytest.skip(f"network namespaces are not allowed here: {getattr(error, 'stderr', error)}")
    yield made
    made.close()


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended; torchrun's agent may be slow to look."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def steps_of(run_dir: Path) -> list[int]:
    return [line["step"] for line in lines_of(run_dir)]


@pytest.mark.slow
def test_a_link_that_is_cut_for_good_ends_both_hosts_and_one_goes_on(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_dir, logs = tmp_path / "run", [tmp_path / "a.log", tmp_path / "b.log"]
    flags = [*TINY, "--run.dir", str(run_dir), "--checkpoint.every", "2", "--launch.timeout_s", str(TIMEOUT_S)]
    agents = [hosts.start(i, 2, logs[i], *flags, "--train.steps", "100000") for i in range(2)]
    until(lambda: len(steps_of(run_dir)) >= 6, "six steps", *logs)
    ranks = [hosts.ranks(i, agents[i].pid) for i in range(2)]
    assert [len(pids) for pids in ranks] == [1, 1]
    hosts.cut()
    until(
        lambda: not any(runs(pid) for pids in ranks for pid in pids),
        "the end of the ranks",
        *logs,
        timeout_s=2 * TIMEOUT_S + SLOW_S,  # one for a collective, one more where the rank then asks the store
    )
    until(lambda: agents[0].poll() is not None, "the end of the agent that keeps the store", *logs, timeout_s=READ_S)
    assert agents[0].returncode == 1
    agents[1].kill()  # it waits for an answer of the store until its system gives up
    agents[1].wait()
    told = [log.read_text() for log in logs]
    for text, other in zip(told, (1, 0), strict=True):
        assert f"rank {other} has not answered for 12 s: its machine, or the network to it, is gone" in text
    newest = latest(run_dir / "checkpoints")
    assert newest is not None
    assert verify(newest) == []
    done = int(newest.rpartition("-")[2])

    agent = hosts.start(0, 1, logs[0], *flags, "--train.steps", str(done + 3), "--train.accumulate", "2")
    assert agent.wait(300) == 0, logs[0].read_text()
    assert f"{done} of {done + 3} steps are done" in logs[0].read_text()
    assert steps_of(run_dir)[-3:] == [done + 1, done + 2, done + 3]


PROGRAM = """
import datetime, itertools
import torch, torch.distributed as dist
import accordion as acc

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={timeout_s}))
torch.manual_seed(0)
model = acc.shard(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)]))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in itertools.count(1):
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 20:
        print("twenty steps", flush=True)
"""


@pytest.mark.slow
def test_a_link_that_is_cut_for_good_ends_programs_of_users(hosts: Hosts, tmp_path: Path) -> None:
    """Each rank names the other one, in time, also the one that does not keep the store."""
    program, logs = tmp_path / "program.py", [tmp_path / "a.log", tmp_path / "b.log"]
    program.write_text(PROGRAM.format(timeout_s=TIMEOUT_S))
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": address(0), "MASTER_PORT": "29411"}
    ranks = [hosts.python(i, logs[i], str(program), RANK=str(i), **place) for i in range(2)]
    until(lambda: all("twenty steps" in log.read_text() for log in logs), "twenty steps", *logs)
    hosts.cut()
    cut = time.monotonic()
    until(
        lambda: all(rank.poll() is not None for rank in ranks), "the end of the ranks", *logs, timeout_s=2 * TIMEOUT_S
    )
    assert time.monotonic() - cut < TIMEOUT_S + 5
    assert [rank.returncode for rank in ranks] == [1, 1]
    for log, other in zip(logs, (1, 0), strict=True):
        assert f"rank {other} has not answered for 12 s: its machine, or the network to it, is gone" in log.read_text()
