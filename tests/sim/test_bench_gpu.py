"""`accordion bench gpu` from its command line to its file, all parts, in small shapes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from accordion.bench.contenders import OURS
from accordion.bench.gpu import cases
from accordion.models.llama import LlamaShape
from accordion.workers.ranks import Seat, WorkerTeam, World
from tests.inside import engine_in

pytestmark = pytest.mark.sim
LETTERS = "abcdefg"


class OneOfMany:
    """The model of part (b), on one rank of a world that does not exist."""

    def __init__(self, seat: Seat) -> None:
        preset = LlamaShape(vocab=64, hidden=512, layers=1, heads=2, kv_heads=2, mlp=1536)
        case = cases.Case(preset=preset, batch=1, seq=16, meta=True)
        self._trainer = cases.shape_trainer(seat, OURS, case)

    def is_ordered(self) -> list[bool]:
        self._trainer.losses(2)
        axis = engine_in(self._trainer._loop._model).context.shard
        return [axis.gather.is_ordered, axis.reduce.is_ordered]


def test_simulated_ranks_take_the_way_of_the_devices_own_library():
    with WorkerTeam(OURS, World(num_ranks=8, device_type="sim", group="fake"), OneOfMany) as team:
        assert team.ask("is_ordered") == [[True, True]]


@pytest.mark.slow
def test_one_run_writes_one_file_with_all_parts_and_says_what_such_a_device_cannot_tell(tmp_path):
    command = [sys.executable, "-m", "accordion.bench.gpu", "--tiny", "--device", "sim", "--parts", LETTERS]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out" not in done.stdout
    assert "does not run" not in done.stdout
    (path,) = tmp_path.iterdir()
    parts = json.loads(path.read_text())["parts"]
    assert sorted(parts) == list(LETTERS)
    for letter, found in parts.items():
        assert not {"failed", "skipped"} & set(found), letter
        assert found["data"], letter
        assert found["tables"], letter
    told_elsewhere = {letter: found["not told here"] for letter, found in parts.items() if "not told here" in found}
    assert sorted(told_elsewhere) == ["a", "c", "e"]
    assert "torch.profiler tells it of CUDA" in told_elsewhere["c"]
    assert all("\n" not in line and line in done.stdout for line in told_elsewhere.values())
    safe = parts["c"]["data"]
    assert safe["2 ranks"]["wrong"] == safe["4 ranks"]["wrong"] == []
    assert len(safe["4 ranks"]["losses"]) == 7
    assert [bool(one["calibrated_s"]) for one in parts["f"]["data"]["sizes"]] == [False, True, True]
    assert all("failed" not in f for here in parts["b"]["data"].values() for f in here.values())
    assert all(len(f["losses"]) == 3 for f in parts["e"]["data"].values())
