"""`compat.fsdp2.install`: unedited programs that use torch's `fully_shard` run on this engine until `remove()`."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

import accordion as acc
from accordion.compat import fsdp2
from accordion.compat.fsdp2.launching import arguments
from tests.compat.test_migrate import EXAMPLES, program
from tests.support.ranked import on_world


@on_world(2)
def test_names_are_replaced_until_they_are_removed(mesh: Any) -> None:
    theirs = torch.distributed.fsdp.fully_shard
    early = types.ModuleType("imported_before")
    early.fully_shard = theirs  # type: ignore[attr-defined]
    sys.modules["imported_before"] = early
    installed = fsdp2.install()
    try:
        assert torch.distributed.fsdp.fully_shard is early.fully_shard is fsdp2.fully_shard  # type: ignore[attr-defined]
        assert program("fsdp2_before").fully_shard is fsdp2.fully_shard
        model = torch.distributed.fsdp.fully_shard(nn.Linear(4, 4), mesh=mesh)
        assert isinstance(model, torch.distributed.fsdp.FSDPModule)
        fsdp2.install().remove()  # another one changes nothing
        assert torch.distributed.fsdp.fully_shard is fsdp2.fully_shard
    finally:
        installed.remove()
        del sys.modules["imported_before"]
    assert torch.distributed.fsdp.fully_shard is early.fully_shard is theirs  # type: ignore[attr-defined]
    installed.remove()
    with fsdp2.install():
        assert torch.distributed.fsdp.fully_shard is fsdp2.fully_shard
    assert torch.distributed.fsdp.fully_shard is theirs


def test_options_are_torchruns_and_the_rest_is_the_programs():
    def read(*words: str) -> tuple[Any, ...]:
        args = arguments(list(words))
        assert (args.module, args.training_script) == (True, "accordion.compat.fsdp2")
        return args.nproc_per_node, args.nnodes, args.standalone, args.training_script_args

    assert read("--nproc", "2", "p.py", "--nproc", "9") == ("2", "1:1", False, ["p.py", "--nproc", "9"])
    assert read("--standalone", "--nproc=2", "p.py", "-x") == ("2", "1:1", True, ["p.py", "-x"])
    assert read("--nnodes", "2", "-m", "a.b", "-m") == ("1", "2", False, ["-m", "a.b", "-m"])
    with pytest.raises(acc.UsageError, match="no program is named"):
        read("--nproc", "2")
    with pytest.raises(acc.UsageError, match="--nproces"):
        read("--nproces", "2", "p.py")


@pytest.mark.slow
def test_accordion_run(tmp_path):
    said = Path(tmp_path, "said.py")
    said.write_text(
        "import sys\nfrom torch.distributed.fsdp import fully_shard\nprint(fully_shard.__module__, sys.argv[1:], __name__)\n"
    )
    command = [sys.executable, "-m", "accordion", "run", "--nproc", "2"]
    out = subprocess.run([*command, str(said), "--nproc", "3"], text=True, capture_output=True, timeout=120)
    assert out.stdout.count("accordion.compat.fsdp2 ['--nproc', '3'] __main__") == 2, out.stderr
    out = subprocess.run([*command, str(EXAMPLES / "fsdp2_before.py")], text=True, capture_output=True, timeout=120)
    assert out.returncode == 0, out.stderr
    said.write_text("raise SystemExit(3)")
    assert subprocess.run([*command, str(said)], capture_output=True, timeout=120).returncode == 1
