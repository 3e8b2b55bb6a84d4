"""`benchmarks/streams.py` and `benchmarks/gpu.py` from their command lines to their files, in small shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import gpu as script
from benchmarks import streams
from benchmarks.gpu import Case, trainer_of

from accordion.bench.contenders import OURS
from accordion.models.llama import LlamaShape
from accordion.workers.ranks import RankSetup, WorkerTeam, World
from tests.inside import engine_in

pytestmark = pytest.mark.sim


class OneOfMany:
    """The model of part (b), on one rank of a world that does not exist."""

    def __init__(self, setup: RankSetup) -> None:
        preset = LlamaShape(vocab=64, hidden=512, layers=1, heads=2, kv_heads=2, mlp=1536)
        self._trainer = trainer_of(setup, OURS, Case(preset=preset, batch=1, seq=16, meta=True))

    def is_ordered(self) -> list[bool]:
        self._trainer.losses(2)
        axis = engine_in(self._trainer._loop._model).context.shard
        return [axis.gather.is_ordered, axis.reduce.is_ordered]


def test_simulated_ranks_take_the_way_of_the_devices_own_library():
    with WorkerTeam(OURS, World(num_ranks=8, device_type="sim", group="fake"), OneOfMany) as team:
        assert team.ask("is_ordered") == [[True, True]]


@pytest.mark.slow
def test_all_that_one_gpu_shows_is_measured_and_what_such_a_device_cannot_tell_is_said(tmp_path):
    said = ""
    for command in ([streams.__file__], [script.__file__, "--tiny"]):
        done = subprocess.run(
            [sys.executable, *command, "--device", "sim"], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, check=False, timeout=580,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        said += done.stdout
    assert "does not run" not in said
    assert "torch.profiler shows on CUDA" in said
    assert "peak unknown" in said
    folder = Path(tmp_path, "runs", "bench")
    safe = json.loads((folder / "streams.json").read_text())
    assert safe["failures"] == safe["2 ranks"]["wrong"] == safe["4 ranks"]["wrong"] == []
    assert len(safe["4 ranks"]["losses"]) == 7
    parts = json.loads((folder / "gpu-parts.json").read_text())["parts"]
    assert list(parts) == list("dafeb")
    assert not any("failed" in json.dumps(part) for part in parts.values())
