"""`benchmarks/streams.py` and `benchmarks/gpu.py` with small shapes on CPU."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import gpu as script
from benchmarks import streams
from benchmarks.gpu import Case, MasterLoop, full_sizes, tiny_sizes, trainer_of

import accordion
from accordion import cli
from accordion.bench.contenders import OURS
from accordion.models.llama import PUBLISHED, LlamaShape
from accordion.workers.ranks import BenchError, WorkerTeam, World

TINY = {"vocab": 64, "width": 32, "blocks": 2, "heads": 2}


def test_device_work_belongs_to_the_range_that_launched_it():
    def event(name: str, cat: str, ts: float, dur: float, **args: int) -> dict[str, object]:
        return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}

    trace = [
        event("accordion::sleep", "user_annotation", 0, 10),
        event("accordion::gather", "user_annotation", 20, 10),
        event("cudaLaunchKernel", "cuda_runtime", 1, 1, correlation=1),
        event("cudaMemcpyAsync", "cuda_runtime", 25, 1, correlation=2),
        event("cudaLaunchKernel", "cuda_runtime", 50, 1, correlation=3),
        event("spin_kernel", "kernel", 100, 5, correlation=1, stream=13),
        event("Memcpy DtoD", "gpu_memcpy", 110, 5, correlation=2, stream=7),
        event("of nobody", "kernel", 120, 5, correlation=3, stream=7),
        {"ph": "M", "name": "process_name"},
    ]
    assert streams.device_work(trace) == {"sleep": [("spin_kernel", 13)], "gather": [("Memcpy DtoD", 7)]}


@pytest.mark.slow
def test_strategies_on_a_shared_device_have_the_losses_of_ddp(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(streams, "SIZES", TINY)
    assert cli.main(["--device", "cpu"], streams.run) == 0
    said = capsys.readouterr().out
    assert "torch.profiler shows on CUDA" in said
    data = json.loads((tmp_path / "runs" / "bench" / "streams.json").read_text())
    assert data["failures"] == data["2 ranks"]["wrong"] == data["4 ranks"]["wrong"] == []
    assert len(data["4 ranks"]["losses"]) == 7
    assert set(data["streams"]) == {"gather", "exchange", "reduce_scatter"}


class Team(AbstractContextManager["Team"]):
    """Stub of a `WorkerTeam`. `fails`: the team's name, or the first argument, and the method of the call that fails."""

    fails: tuple[str, str]
    started: list[str]

    def __init__(self, name: str, world: Any, make: Any, args: Any = ()) -> None:
        self.name = name
        self.started.append(name)

    def __exit__(self, *error: object) -> None: ...
    def close(self) -> None: ...

    def ask(self, method: str, *args: Any) -> list[Any]:
        if self.fails in {(self.name, method), (str(args[:1] and args[0]), method)}:
            raise BenchError("contender failed on rank 0: OutOfMemoryError: none left")
        turn = [{"step": 0.1, "host": 0.01}] * 2
        return {"losses": [[2.0, 1.0]], "memory": [{"allocated": 2**30}], "turn": [turn]}[method]


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> type[Team]:
    monkeypatch.setattr(Team, "started", [], raising=False)
    for module in (streams, script):
        monkeypatch.setattr(module, "WorkerTeam", Team)
    return Team


def test_a_strategy_that_fails_is_reported_and_new_ranks_start(team):
    team.fails = ("full_shard", "losses")
    losses, failed = streams.losses_of(2, "cpu")
    assert list(failed) == ["full_shard"]
    assert {"ddp", "shard_grad_op", "no_shard"} <= set(losses)
    assert team.started == ["2 ranks", "2 ranks"]


# -- the script


@pytest.mark.parametrize("fails", [("fsdp2", "losses"), ("fsdp2", "turn"), ("plain", "memory")])
def test_a_contender_that_fails_is_reported_and_the_others_are_measured(team, fails):
    team.fails = fails
    tables = [table for table, _ in script.one_rank(tiny_sizes(), "cpu")]
    assert [len(table.rows) for table in tables] == [3, 3]
    for table in tables:
        said = {row[0]: row[1] for row in table.rows}
        assert "none left" in said.pop(fails[0])
        assert all("100.00" in step for step in said.values())
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_shapes_have_the_published_parameter_counts_and_shrink_with_memory():
    seventy, case = Case(preset=PUBLISHED["llama3-70b"], batch=1, seq=1), full_sizes().one_rank
    assert 70e9 < seventy.num_params < 71e9
    assert script.STATE_BYTES * 70e9 / 16 == 52.5e9
    with torch.device("meta"):
        built = sum(p.numel() for p in script.Llama(case.preset).parameters())
    assert case.num_params == built
    assert case.flops == pytest.approx(6 * built * 4 * 2048, rel=0.15)
    cases = [full_sizes(gib).one_rank for gib in (141, 79, 40, 24, 12)]
    assert [(case.preset.layers, case.batch) for case in cases] == [(16, 4), (16, 4), (8, 2), (4, 1), (2, 1)]


def test_masters_kept_by_hand_train_as_float32_parameters_do():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4).to(torch.bfloat16)
    before, plain, loop = copy.deepcopy(model), copy.deepcopy(model).float(), MasterLoop(model, "cpu")
    x = torch.randn(8, 4, dtype=torch.bfloat16)
    model(x).float().square().mean().backward()
    for master, p in zip(plain.parameters(), model.parameters(), strict=True):
        master.grad = p.grad.float()
    torch.optim.AdamW(plain.parameters(), lr=1e-5, fused=True).step()
    loop.step()
    parameters = zip(model.parameters(), plain.parameters(), before.parameters(), loop._masters, strict=True)
    for p, master, first, own in parameters:
        assert torch.equal(own, master)
        assert not torch.equal(own, first.float())
        assert torch.equal(p, master.to(torch.bfloat16))
        assert p.grad is None


def test_simulated_ranks_of_several_nodes_use_reduce_scatter():
    """FSDP2 sums in the same dtype."""
    preset = LlamaShape(vocab=64, hidden=512, layers=1, heads=2, kv_heads=2, mlp=1536)
    case = Case(preset=preset, batch=1, seq=16, meta=True)

    def reduced(name: str, num_ranks: int) -> dict[str, int]:
        with WorkerTeam(name, World(num_ranks=num_ranks, group="fake"), trainer_of, (name, case)) as team:
            sent = team.ask("wire")[0]["bytes"]
        return {kind: num_bytes for kind, num_bytes in sent.items() if "gather" not in kind}

    assert set(reduced(OURS, 8)) == {"alltoall_base"}, "one node exchanges"
    for name in (OURS, "fsdp2"):
        (kind, num_bytes), *more = reduced(name, 16).items()
        assert "reduce_scatter" in kind
        assert not more
        assert num_bytes == pytest.approx(4 * case.num_params * 15 / 16, rel=0.01)


BLOCKED = """
import sys

for name in "rich transformers tokenizers datasets torchdata pyarrow xxhash yaml".split():
    sys.modules[name] = None  # an import of it fails

from accordion import cli
from benchmarks import gpu, streams

if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[2:], streams.run if sys.argv[1] == "streams" else gpu.run))
"""


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["gpu", "--parts", "d"], "d"),
        pytest.param(["gpu"], "dafeb", marks=pytest.mark.slow),
        pytest.param(["streams"], "", marks=pytest.mark.slow),
    ],
    ids=["a part", "all parts", "streams"],
)
def test_a_gpu_is_measured_with_torch_numpy_and_safetensors_alone(words, parts, tmp_path):
    """A second run adds to the first one's file."""
    words = [*words, "--device", "cpu", *(["--tiny"] if parts else [])]
    root = Path(accordion.__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    folder = tmp_path / "runs" / "bench"
    folder.mkdir(parents=True)
    machine = script.describe("cpu")
    (folder / "gpu-parts.json").write_text(json.dumps({"machine": machine, "parts": {"x": {"data": 1}}}))
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "does not run" not in done.stdout
    found = json.loads((folder / "gpu-parts.json").read_text())["parts"]
    assert list(found) == ["x", *parts]
    assert not any("failed" in json.dumps(part) for part in found.values())
    if "f" in parts:
        assert [len(found[letter]["tables"]) for letter in "dafeb"] == [1, 2, 1, 1, 1]
        assert all(one["planned"]["peak_allocated_bytes"] > 0 for one in found["f"]["data"])
