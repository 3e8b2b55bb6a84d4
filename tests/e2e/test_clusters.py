"""The files of examples/clusters: valid for SLURM and Kubernetes, and the commands in them train."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from accordion.checkpoint import latest
from accordion.train import command, launch
from tests.e2e.jobs import lines_of, until
from tests.support import forked

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
SHARED = "/shared/runs/digits"  # the run folder in the files
# Of the manual of sbatch, 25.05: those that a job of several nodes may need. SLURM itself names an unknown one.
SBATCH = {
    *("account", "comment", "constraint", "cpus-per-gpu", "cpus-per-task", "deadline", "dependency", "error"),
    *("exclude", "exclusive", "export", "gpus-per-node", "gres", "job-name", "mail-type", "mail-user", "mem"),
    *("mem-per-gpu", "nodelist", "nodes", "ntasks-per-node", "open-mode", "output", "partition", "qos", "requeue"),
    *("reservation", "signal", "switches", "time"),
}


def words_of(text: str) -> list[str]:
    """Return the words after `accordion train` in the only command of `text` that gives it flags."""
    (words,) = re.findall(r"accordion train (--(?:.*\\\n)*.*)", text)
    return shlex.split(words.replace("\\\n", " "))


def test_the_batch_script_and_the_command_of_the_page_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = CLUSTERS / "slurm.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert len(options) == text.count("#SBATCH")
    assert options.keys() <= SBATCH
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert re.fullmatch(r"USR1@\d+", options["signal"])  # to the ranks; B:USR1 would go to the shell alone
    page = (ROOT / "docs" / "clusters.md").read_text()
    assert [command.read(words_of(commands))[0].run.dir for commands in (text, page)] == [SHARED] * 2


def trainjob() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((CLUSTERS / "trainjob.yaml").read_text())
    return content


def test_the_train_job_is_valid() -> None:
    job = trainjob()
    parsed = TrainerV1alpha1TrainJob.from_dict(job)
    assert parsed is not None
    assert parsed.to_dict() == job  # a field that the schema does not have is missing
    spec = job["spec"]
    assert spec["trainer"]["numProcPerNode"] == spec["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    (replicated,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    grace_s = replicated["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    (timeout,) = spec["trainer"]["env"]
    assert int(timeout["value"]) < grace_s


def test_torchrun_takes_over_if_its_variables_announce_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[list[str]]()
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))
    monkeypatch.setattr(launch, "start", lambda *args: 0)
    monkeypatch.setattr(command, "prepare", lambda *args, **named: None)
    for variables in ({}, {"PET_NPROC_PER_NODE": "2"}, {"PET_NNODES": "2"}):
        command.run(["--train.steps", "3", *forked.UNTRACKED], variables)
    words = ["-m", "torch.distributed.run", "-m", "accordion", "train", "--train.steps", "3", *forked.UNTRACKED]
    assert started == [[sys.executable, *words]] * 2


@pytest.mark.slow
def test_two_nodes_of_a_train_job_save_if_one_is_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 runs the command of the file. Node 1 runs `accordion train`, which becomes torchrun because of PET_NNODES."""
    monkeypatch.chdir(ROOT)
    trainer, run_dir = trainjob()["spec"]["trainer"], tmp_path / "run"
    args = [word.replace(SHARED, str(run_dir)) for word in trainer["args"]]
    args += ["--train.steps=100000", "--train.micro_batch=2", "--launch.device=cpu", *forked.UNTRACKED]
    python = [sys.executable, "-m"]
    starts = [
        [*python, "torch.distributed.run", *trainer["command"][1:], *args],
        [*python, "accordion", "train", *args],
    ]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # As Kubeflow Trainer sets them for its torch runtime.
    common = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }
    common |= {variable["name"]: variable["value"] for variable in trainer["env"]}
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    nodes = []
    for rank, (start, log) in enumerate(zip(starts, logs, strict=True)):
        environ = {**os.environ, **common, "PET_NODE_RANK": str(rank), "XDG_CACHE_HOME": str(tmp_path)}
        with log.open("w") as file:
            nodes.append(subprocess.Popen(start, stdout=file, stderr=subprocess.STDOUT, env=environ))
    try:
        until(lambda: len(lines_of(run_dir)) >= 3, "three steps", *logs)
        nodes[1].send_signal(signal.SIGTERM)  # as Kubernetes does to the first process of a pod
        assert all(node.wait(120) != 0 for node in nodes)
    finally:
        for node in nodes:
            node.kill()
    done = len(lines_of(run_dir))
    assert f"stopped after {done} of 100000 steps: preempted" in logs[0].read_text(), logs[0].read_text()
    assert latest(run_dir / "checkpoints") == str(run_dir / "checkpoints" / f"step-{done:06d}")
