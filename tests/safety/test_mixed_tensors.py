"""torch's error for a loss of sharded weights and plain tensors has advice, wherever the program ends."""

from __future__ import annotations

import pytest

from accordion.errors import MIXED, WAYS_OUT, advise
from accordion.tasks.errors import TaskError, of_the_task
from tests.support.processes import run_python

pytestmark = pytest.mark.cpu("plain tensors lie there; the error comes before a device is asked")

SCRIPT = """
import torch
import accordion as acc

model = acc.shard(torch.nn.Linear(4, 3))
loss = torch.nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.tensor([1, 2]))
(loss + sum(p.pow(2).sum() for p in model.parameters())).backward()
"""
# Rank 0 is the script, and rank 1 runs it under `accordion run`.
RANKS = """
import os, runpy, sys, torch.distributed as dist
from accordion.compat.fsdp2.__main__ import main

folder, rank = sys.argv[1], int(os.fork() == 0)
os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
(main if rank else lambda words: runpy.run_path(words[0]))([f"{folder}/script.py"])
"""


def test_an_error_that_ends_the_program_has_advice(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    run_python("-c", RANKS, tmp_path)  # until no rank has its output open
    said = [(tmp_path / rank).read_text() for rank in "01"]
    assert [text.partition(MIXED)[2].count(WAYS_OUT) for text in said] == [1, 1], said
    assert [f"accordion: {WAYS_OUT}" in text for text in said] == [True, False], said


def test_an_error_of_a_tasks_code_has_advice_once_and_other_errors_have_none():
    error = RuntimeError(f"aten.mul.Tensor {MIXED}")
    with pytest.raises(TaskError) as caught, of_the_task("loss(model, batch)"):
        raise error
    assert caught.value.shown.count(WAYS_OUT) == 1
    assert not advise(error)
    assert not advise(RuntimeError("The size of tensor a (4) must match the size of tensor b (7)"))
