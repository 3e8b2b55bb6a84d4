"""A job whose number of hosts changes while it runs: torchrun's agents start it again, and it makes the same steps."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.jobs import TINY, lines_of, until, workers_of

SAME = ["--train.micro_batch", "4", "--train.global_batch", "16", "--train.steps", "100000", "--train.warmup", "20"]
SAVING = ["--checkpoint.every", "4", "--checkpoint.keep", "3"]
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else torch 2.13's agent tells one that joins later no address
NOTICE = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"  # in s; else a start takes half a minute


class Agents:
    """torchrun's agents on this machine, each as a host of one rank. Owns them and their ranks."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        self._folder = folder
        self._all: list[subprocess.Popen[str]] = []

    def start(self) -> tuple[subprocess.Popen[str], Path]:
        index = len(self._all)
        words = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9", "--monitor-interval", "0.2"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self._endpoint, "--rdzv-id", "job"]
        words += ["--rdzv-conf", f"is_host={int(index == 0)},{NOTICE}", "--local-addr", "127.0.0.1"]
        words += ["-m", "accordion", "train", *TINY, *SAME, *SAVING, "--run.dir", str(self._folder / "run")]
        log = self._folder / f"{index}.log"
        with log.open("w") as file:
            command = [sys.executable, "-m", "torch.distributed.run", *words]
            environ = {**os.environ, **OWN_STORE}
            self._all.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ, text=True))
        return self._all[-1], log

    def kill(self, agent: subprocess.Popen[str]) -> None:
        """As a host that loses its power."""
        for pid in [*workers_of(agent.pid), agent.pid]:
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def close(self) -> None:
        for agent in self._all:
            if agent.poll() is None:
                self.kill(agent)


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Agents(tmp_path)
    yield made
    made.close()


def losses_of(run_dir: Path) -> list[float]:
    """Of step 1, 2, ...; a run that goes on takes back what was not saved."""
    lines = lines_of(run_dir)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


@pytest.mark.slow
def test_a_job_goes_on_with_the_hosts_that_are_left_and_with_one_that_comes_back(
    agents: Agents, tmp_path: Path
) -> None:
    run_dir, mark = tmp_path / "run", 10
    (one, log), (other, its_log) = agents.start(), agents.start()
    until(lambda: len(losses_of(run_dir)) >= mark, "ten steps of two hosts", log, its_log)
    two, alone = "2 ranks x 4 x 2", "1 ranks x 4 x 4"
    assert two in log.read_text() + its_log.read_text()

    agents.kill(other)
    until(lambda: alone in log.read_text(), "a start with one host", log)
    before = len(losses_of(run_dir))
    until(lambda: len(losses_of(run_dir)) >= before + mark, "steps of one host", log)
    assert "resumed from" in log.read_text()

    _, its_log = agents.start()
    until(lambda: two in (log.read_text() + its_log.read_text()).rpartition(alone)[2], "a start with two", log, its_log)
    before = len(losses_of(run_dir))
    until(lambda: len(losses_of(run_dir)) >= before + mark, "steps of two hosts again", log, its_log)
    assert one.poll() is None
    agents.close()

    found = losses_of(run_dir)[: 8 * mark]
    calm = [sys.executable, "-m", "accordion", "train", *TINY, *SAME, "--launch.nproc", "2"]
    words = ["--run.dir", str(tmp_path / "calm"), "--train.micro_batch", "8"]
    with subprocess.Popen([*calm, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as undisturbed:
        try:
            until(lambda: len(losses_of(tmp_path / "calm")) >= len(found), "the undisturbed run", timeout_s=900)
        finally:
            undisturbed.terminate()  # which ends its ranks; it has more steps than anybody waits for
    assert found == pytest.approx(losses_of(tmp_path / "calm")[: len(found)], rel=1e-4)
