"""Programs that end, fork or raise with a step under way: they end at once, say nothing wrong, and leave no file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import hashlib, os, signal, sys, torch, torch.distributed as dist
import accordion as acc
from tests.support import models
from tests.support.checks import one_loss
from tests.support.offloads import disk_of_all, chunks_of_at_most

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = acc.shard(models.seeded(width=256, hidden=1024), offload=disk_of_all(sys.argv[1]))
with chunks_of_at_most(4096):  # hundreds of chunks: the step is far from its end
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
for step in range(2):
    one_loss(model, step).backward()
    optimizer.step()
if sys.argv[2] == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "raises":
    raise ValueError("planted")
if sys.argv[2] == "interrupts":
    raise KeyboardInterrupt
if sys.argv[2] == "forks":
    data = torch.utils.data.DataLoader(list(range(8)), num_workers=2, multiprocessing_context="fork")
    for epoch in range(2):
        assert sum(int(one) for one in data) == 28
        child = os.fork()
        if child == 0:
            sys.exit(0)  # runs what waits for the end of the interpreter, in a process without the threads
        assert os.waitpid(child, 0)[1] == 0
        before = one_loss(model, 2 + epoch)
        before.backward()
        optimizer.step()
if sys.argv[2] == "says":
    values = acc.full_state_dict(model, rank0_only=False).values()
    print(hashlib.sha256(b"".join(v.numpy().tobytes() for v in values)).hexdigest())
print("ends")
"""


@pytest.mark.parametrize(
    ("way", "code", "said"),
    [
        ("ends", 0, ""),
        ("is killed", -9, ""),
        pytest.param("raises", 1, "ValueError: planted", marks=pytest.mark.slow),
        pytest.param("interrupts", -2, "KeyboardInterrupt", marks=pytest.mark.slow),
        pytest.param("forks", 0, "", marks=pytest.mark.slow),
    ],
)
def test_a_program_that_ends_with_a_step_under_way(tmp_path, way, code, said):
    (done,) = run(tmp_path, [way])
    assert done.returncode == code, done.stderr
    last = [line.removeprefix("[rank0]: ") for line in done.stderr.splitlines()[-1:]]
    assert last == ([said] if said else []), done.stderr
    assert ("ends" in done.stdout) == (code == 0)
    assert os.listdir(tmp_path) == []


def test_jobs_on_one_path_do_not_touch_each_other(tmp_path):
    """Not even where one of them is killed: the others, which do the same thing, train the same, and nothing is left."""
    one, killed, other = run(tmp_path, ["says", "is killed", "says"])
    assert (one.returncode, killed.returncode, other.returncode) == (0, -9, 0), one.stderr + other.stderr
    assert one.stdout == other.stdout != ""
    assert os.listdir(tmp_path) == []


def run(path: Path, ways: list[str]) -> list[subprocess.CompletedProcess[str]]:
    """The program once for each way, all at the same time, with everything in one folder."""
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}", "OMP_NUM_THREADS": "1"}
    words = [[sys.executable, "-W", "ignore", "-c", PROGRAM, str(path), way] for way in ways]
    jobs = [subprocess.Popen(w, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) for w in words]
    try:
        said = [job.communicate(timeout=400) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [subprocess.CompletedProcess(j.args, j.returncode, *texts) for j, texts in zip(jobs, said, strict=True)]
