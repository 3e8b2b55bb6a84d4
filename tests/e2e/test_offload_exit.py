"""Programs that end, fork or raise with a step under way: they end at once, say nothing wrong, and leave no file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

# Imports take longer than all else: the programs have them in common, and each goes on in a process of its own, which ends
# as the interpreter ends.
PROGRAM = """
import gc, hashlib, json, os, signal, sys, torch, torch._dynamo, torch.distributed as dist, torch.distributed.tensor
import accordion as acc
from tests.support import models
from tests.support.checks import one_loss
from tests.support.offloads import disk_of_all, chunks_of_at_most

gc.freeze()  # six ends of the interpreter, each of which would look through all of torch several times
begun = []
for number, (path, way) in enumerate(json.loads(sys.argv[1])):
    begun.append(os.fork())
    if begun[-1] == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[2]}/{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        break
else:
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in begun]))
    sys.exit(0)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = acc.shard(models.seeded(width=128, hidden=256), offload=disk_of_all(path))
with chunks_of_at_most(1024):  # hundreds of chunks: the step is far from its end
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
for step in range(2):
    one_loss(model, step).backward()
    optimizer.step()
if way == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if way == "raises":
    raise ValueError("planted")
if way == "interrupts":
    raise KeyboardInterrupt
if way == "forks":
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
if way == "says":
    values = acc.full_state_dict(model, rank0_only=False).values()
    print(hashlib.sha256(b"".join(v.numpy().tobytes() for v in values)).hexdigest())
print("ends")
"""
ENDS = {  # the exit code, and the last line of what it says
    "raises": (1, "ValueError: planted"),
    "forks": (0, ""),
}
# Lines that triton's bindings write at the exit of a process, if torch came with triton (2.15).
NANOBIND = ("nanobind: ", " - leaked ", " - ... skipped", "See https://nanobind")
TOGETHER = ["says", "is killed", "interrupts", "says"]
Ended = tuple[int, str, str, Path]
"""Exit code, standard output and errors, and the folder of a program."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """Of the programs of `ENDS`, each in a folder of its own, and of those of `TOGETHER` in one; all at the same time."""
    root, said = Path(__file__).parents[2], tmp_path_factory.mktemp("said")
    own = [(tmp_path_factory.mktemp("own"), way) for way in ENDS]
    common = tmp_path_factory.mktemp("common")
    jobs = [(str(path), way) for path, way in [*own, *((common, way) for way in TOGETHER)]]
    words = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(jobs), str(said)]
    environ = {**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True) as parent:
        try:
            codes = json.loads(parent.communicate(timeout=400)[0])
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
    texts = [[(said / f"{number}.{name}").read_text() for name in ("out", "err")] for number in range(len(jobs))]
    return [(code, *text, Path(path)) for code, text, (path, _) in zip(codes, texts, jobs, strict=True)]


def last_line(err: str) -> str:
    """Return the last line without the rank; empty if there is none."""
    lines = [line.removeprefix("[rank0]: ") for line in err.splitlines() if not line.startswith(NANOBIND)]
    return lines[-1] if lines else ""


@pytest.mark.parametrize("way", ENDS)
def test_a_program_that_ends_with_a_step_under_way(ended: list[Ended], way: str) -> None:
    code, out, err, path = ended[list(ENDS).index(way)]
    expected, said = ENDS[way]
    assert code == expected, err
    assert last_line(err) == said, err
    assert ("ends" in out) == (code == 0)
    assert os.listdir(path) == []


def test_jobs_on_one_path_do_not_touch_each_other(ended: list[Ended]) -> None:
    """Not even if others are killed or interrupted: those that do the same thing train the same, and nothing is left."""
    one, killed, interrupted, other = ended[len(ENDS) :]
    assert (one[0], killed[0], interrupted[0], other[0]) == (0, -9, -2, 0), one[2] + other[2]
    assert last_line(interrupted[2]) == "KeyboardInterrupt"
    assert last_line(one[2]) == last_line(other[2]) == ""
    assert one[1] == other[1] != ""
    assert os.listdir(one[3]) == []
