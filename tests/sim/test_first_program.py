"""The first program of the README starts where there is an accelerator, whatever its library is called."""

from pathlib import Path

import pytest

from tests.support import forked

pytestmark = pytest.mark.sim

ROOT = Path(__file__).parents[2]

WHERE = """
import sys, torch, torch.distributed as dist, torch.nn as nn
import accordion as acc
from accordion.compat.fsdp2 import fully_shard
from torch.distributed.rendezvous import rendezvous

store, rank, num_ranks = next(rendezvous("env://"))
for count, backend in enumerate([None, "simccl", "cpu:gloo,sim:simccl", "gloo"]):
    for shard in acc.shard, fully_shard:
        here = dist.PrefixStore(f"{count}/{shard.__name__}", store)  # keys of an earlier group are another's
        dist.init_process_group(backend, store=here, rank=rank, world_size=num_ranks)
        torch.manual_seed(0)
        model = shard(nn.Linear(4, 4))
        kind = next(model.parameters()).device.type
        model(torch.ones(2, 4, device=kind)).sum().backward()
        acc.save(f"{sys.argv[1]}/{count}-{shard.__name__}", model)
        if dist.get_rank() == 0:
            print("with", backend, shard.__name__, "on", kind, flush=True)
        dist.destroy_process_group()
"""


def test_the_example_trains_on_the_accelerator(capfd):
    assert forked.script_under_torchrun(ROOT / "examples" / "train_tiny.py", 2) == 0
    losses = [float(line.split()[-1]) for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)


def test_the_group_says_where_ranks_compute(tmp_path, capfd):
    program = tmp_path / "program.py"
    program.write_text(WHERE)
    assert forked.script_under_torchrun(program, 2, str(tmp_path)) == 0
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("with")]
    kinds = {None: "sim", "simccl": "sim", "cpu:gloo,sim:simccl": "sim", "gloo": "cpu"}
    assert said == [f"with {b} {f} on {kind}" for b, kind in kinds.items() for f in ("shard", "fully_shard")]
