"""Jobs of several hosts: a link between two is cut for good, and all ends with a word why; and the number of hosts changes while
the job runs. The job goes on, and makes the same steps."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from accordion.checkpoint import latest
from accordion.checkpoint.reading import verify
from tests.e2e.jobs import TINY, lines_of, until, workers_of

TIMEOUT_S = 20  # of a rank
READ_S = 45  # of its agent, which ends its other ranks first
SLOW_S = 15  # what a busy machine takes beside


def torchrun(nodes: str, endpoint: str, at: str, conf: str, *flags: str) -> list[str]:
    """Return the words after `python` of an agent of one rank at the address `at`, which runs `accordion train *flags`."""
    words = ["-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", endpoint, "--rdzv-id", f"job{nodes}", "--rdzv-conf", conf, "--local-addr", at]
    return [*words, *flags]


TRAIN = ["-m", "accordion", "train", *TINY]


# -- two namespaces whose link is cut


class Hosts:
    """Two namespaces with an address each, on a bridge in a third one. Owns them and what runs in them."""

    def __init__(self) -> None:
        self._names = [f"accordion-{os.getpid()}-{end}" for end in ("a", "b", "bridge")]

    def open(self) -> None:
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
        conf, endpoint = f"is_host={int(host == 0)}", f"{address(0)}:29400"
        words = torchrun(str(nodes), endpoint, address(host), conf, "--max-restarts", "0", *TRAIN, *flags)
        return self.python(host, out, *words)

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
        held = ip("netns", "pids", self._names[host]).split()
        return [pid for pid in map(int, held) if pid != agent]

    def close(self) -> None:
        for host in range(2):
            with suppress(OSError, subprocess.CalledProcessError):
                for pid in self.ranks(host, 0):
                    os.kill(pid, signal.SIGKILL)
        for name in self._names:
            with suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "del", name)


def address(host: int) -> str:
    return f"10.213.7.{host + 1}"


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    try:
        hosts.open()
        yield hosts
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', error)}")
    finally:
        hosts.close()


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
    flags = ["--run.dir", str(run_dir), "--checkpoint.every", "2", "--launch.timeout_s", str(TIMEOUT_S)]
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


# -- agents on this machine, each as a host of one rank, of which some are killed

SAME = ["--train.micro_batch", "4", "--train.global_batch", "16", "--train.steps", "100000", "--train.warmup", "20"]
SAVING = ["--checkpoint.every", "4", "--checkpoint.keep", "3"]
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else torch 2.13's agent tells one that joins later no address
NOTICE = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"  # in s; else a start takes half a minute


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], tuple[subprocess.Popen[str], Path]]]:
    """A function that starts one more agent, and returns it with its log."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    agents: list[subprocess.Popen[str]] = []

    def started() -> tuple[subprocess.Popen[str], Path]:
        conf, log = f"is_host={int(not agents)},{NOTICE}", tmp_path / f"{len(agents)}.log"
        flags = ["--max-restarts", "9", "--monitor-interval", "0.2", *TRAIN, *SAME, *SAVING]
        words = torchrun("1:2", endpoint, "127.0.0.1", conf, *flags, "--run.dir", str(tmp_path / "run"))
        command, environ = [sys.executable, *words], {**os.environ, **OWN_STORE}
        with log.open("w") as file:
            agents.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ, text=True))
        return agents[-1], log

    yield started
    for agent in agents:
        if agent.poll() is None:
            kill(agent)


def kill(agent: subprocess.Popen[str]) -> None:
    """As a host that loses its power."""
    for pid in [*workers_of(agent.pid), agent.pid]:
        os.kill(pid, signal.SIGKILL)
    agent.wait()


def losses_of(run_dir: Path) -> list[float]:
    """Return the losses of steps 1, 2, ...; a resumed run repeats the steps after its last save."""
    lines = lines_of(run_dir)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


@pytest.mark.slow
def test_a_job_goes_on_with_the_hosts_that_are_left_and_with_one_that_comes_back(
    start: Callable[[], tuple[subprocess.Popen[str], Path]], tmp_path: Path
) -> None:
    run_dir, mark = tmp_path / "run", 10
    (one, log), (other, its_log) = start(), start()
    until(lambda: len(losses_of(run_dir)) >= mark, "ten steps of two hosts", log, its_log)
    two, alone = "2 ranks x 4 x 2", "1 ranks x 4 x 4"
    assert two in log.read_text() + its_log.read_text()

    kill(other)
    until(lambda: alone in log.read_text(), "a start with one host", log)
    before = len(losses_of(run_dir))
    until(lambda: len(losses_of(run_dir)) >= before + mark, "steps of one host", log)
    assert "resumed from" in log.read_text()

    another, its_log = start()
    until(lambda: two in (log.read_text() + its_log.read_text()).rpartition(alone)[2], "a start with two", log, its_log)
    before = len(losses_of(run_dir))
    until(lambda: len(losses_of(run_dir)) >= before + mark, "steps of two hosts again", log, its_log)
    assert one.poll() is None
    kill(one)
    kill(another)

    losses = losses_of(run_dir)[: 8 * mark]
    calm = [sys.executable, *TRAIN, *SAME, "--launch.nproc", "2"]
    words = ["--run.dir", str(tmp_path / "calm"), "--train.micro_batch", "8"]
    with subprocess.Popen([*calm, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as undisturbed:
        try:
            until(lambda: len(losses_of(tmp_path / "calm")) >= len(losses), "the undisturbed run", timeout_s=900)
        finally:
            undisturbed.terminate()  # which ends its ranks; it has more steps than anybody waits for
    assert losses == pytest.approx(losses_of(tmp_path / "calm")[: len(losses)], rel=1e-4)
