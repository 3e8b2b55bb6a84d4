"""Programs that end, fork or raise with a step under way: they end at once, say nothing wrong, and leave no file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

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
path, folder, *ways = sys.argv[1:]
for number, way in enumerate(ways):
    begun.append(os.fork())
    if begun[-1] == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
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
    data = torch.utils.data.DataLoader(list(range(8)), num_workers=1, multiprocessing_context="fork")
    for epoch in range(2):
        assert sum(int(one) for one in data) == 28
        child = os.fork()
        if child == 0:
            sys.exit(0)  # runs what waits for the end of the interpreter, in a process without the threads
        assert os.waitpid(child, 0)[1] == 0
        before = one_loss(model, 2 + epoch)
        before.backward()
        optimizer.step()
if way.startswith("says"):
    values = acc.full_state_dict(model, rank0_only=False).values()
    print(hashlib.sha256(b"".join(v.numpy().tobytes() for v in values)).hexdigest())
print("ends")
"""
ENDS = {  # the exit code, and the last line on stderr
    "says": (0, ""),
    "is killed": (-9, ""),
    "interrupts": (-2, "KeyboardInterrupt"),
    "raises": (1, "ValueError: planted"),
    "forks": (0, ""),
    "says again": (0, ""),
}
# Lines that triton's bindings write at the exit of a process, if torch came with triton (2.15).
NANOBIND = ("nanobind: ", " - leaked ", " - ... skipped", "See https://nanobind")


def last_line(err: str) -> str:
    """Return the last line without the rank; empty if there is none."""
    lines = [line.removeprefix("[rank0]: ") for line in err.splitlines() if not line.startswith(NANOBIND)]
    return lines[-1] if lines else ""


def test_programs_that_end_with_a_step_under_way_on_one_path_do_not_touch_each_other(tmp_path: Path) -> None:
    """The first and the last program print equal checksums of their weights, and no program leaves a file."""
    root, states, said = Path(__file__).parents[2], tmp_path / "states", tmp_path / "said"
    states.mkdir()
    said.mkdir()
    words = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(states), str(said), *ENDS]
    environ = {**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True) as parent:
        try:
            codes = json.loads(parent.communicate(timeout=400)[0])
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
    outs, errs = ([(said / f"{number}.{name}").read_text() for number in range(len(ENDS))] for name in ("out", "err"))
    ends = [(code, last_line(err)) for code, err in zip(codes, errs, strict=True)]
    assert dict(zip(ENDS, ends, strict=True)) == ENDS, errs
    assert ["ends" in out for out in outs] == [code == 0 for code in codes]
    assert outs[0] == outs[-1] != ""
    assert os.listdir(states) == []
