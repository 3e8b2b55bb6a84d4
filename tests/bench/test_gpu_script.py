"""`accordion bench gpu`: what one run takes, what a part that fails leaves, and the cases that it measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import accordion
from accordion.bench.contenders import OURS
from accordion.bench.gpu import cases, command, one_rank, simulated, sizes, streams, turns
from accordion.bench.gpu.cases import Case, MasterLoop, shape_trainer
from accordion.bench.gpu.command import PARTS, BenchPart
from accordion.bench.gpu.findings import Findings
from accordion.bench.gpu.sizes import full_sizes, tiny_sizes
from accordion.bench.model import BENCH_MODELS
from accordion.models.llama import PUBLISHED, LlamaShape
from accordion.pages.page import Table
from accordion.workers.ranks import BenchError, WorkerTeam, World


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


def test_shapes_for_a_gpu_are_those_of_the_textbook():
    seventy, case = PUBLISHED["llama3-70b"], full_sizes().one_rank
    assert 70e9 < cases.params_of(seventy) < 71e9
    assert simulated.STATE_BYTES * 70e9 / 16 == 52.5e9
    with torch.device("meta"):
        built = sum(p.numel() for p in BENCH_MODELS["llama-1b"].make().parameters())
    assert cases.params_of(case.preset) == built
    assert cases.step_flops(case) == pytest.approx(6 * built * 4 * 2048, rel=0.15)


def test_a_part_that_fails_leaves_the_others_and_what_it_has(monkeypatch, capsys):
    table, written = Table(title="t", columns=["", "ms"], rows=[["a", "1.0"]]), list[dict[str, Any]]()

    def stops(sizes: sizes.PartSizes, device: str, out: Findings) -> None:
        raise KeyboardInterrupt

    def out_of_memory(sizes: sizes.PartSizes, device: str, out: Findings) -> None:
        out.data["y"] = 2
        out.keep(table)
        assert written[-1]["a"]["tables"][0]["title"] == "t", "on disk before anything else may fail"
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def runs(sizes: sizes.PartSizes, device: str, out: Findings) -> None:
        out.data["x"] = 1

    parts = {"a": out_of_memory, "b": runs, "c": stops}
    monkeypatch.setattr(command, "PARTS", {name: BenchPart(run=run, seconds=30) for name, run in parts.items()})
    with pytest.raises(KeyboardInterrupt):
        command.run_parts("abc", tiny_sizes(), "cpu", lambda found: written.append(dict(found)), limited=True)
    assert written[-1]["a"]["failed"] == "the part: OutOfMemoryError: CUDA out of memory."
    assert written[-1]["a"]["data"] == {"y": 2}
    assert written[-1]["b"]["data"] == {"x": 1}
    assert command.run_parts("ab", tiny_sizes(), "cpu", written.append, limited=True) == ["a"]
    assert "left out" not in capsys.readouterr().out


def test_a_part_that_does_not_fit_the_time_is_left_out_and_one_that_does_runs(monkeypatch, capsys):
    def part(seconds: float) -> BenchPart:
        return BenchPart(run=lambda sizes, device, out: ran.append(seconds), seconds=seconds)

    ran, written = list[float](), list[dict[str, Any]]()
    monkeypatch.setattr(command, "PARTS", {"a": part(80), "b": part(110), "c": part(90)})
    monkeypatch.setattr(command, "LAST_S", 100)
    assert command.run_parts("abc", tiny_sizes(), "cpu", written.append, limited=True) == []
    assert ran == [80, 90]
    assert written[-1]["b"] == {"skipped": "100 s were left of 100"}
    assert "(b) left out: it takes 110 s and 100 are left; --parts b adds it to the file" in capsys.readouterr().out
    assert command.run_parts("b", tiny_sizes(), "cpu", written.append, limited=False) == []
    assert ran[-1] == 110, "nothing is measured, so no time is up"


BLOCKED = """
import sys

for name in "rich plotly transformers tokenizers datasets pyarrow xxhash yaml".split():
    sys.modules[name] = None  # an import of it fails

from accordion import cli

sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "start",
    [["-c", BLOCKED, "bench", "gpu"], pytest.param(["-m", "accordion.bench.gpu"], marks=pytest.mark.slow)],
    ids=["command", "module"],
)
def test_a_gpu_is_measured_with_torch_numpy_and_safetensors_alone(start, tmp_path):
    """With small shapes, from the command line as from a checkout."""
    words = ["--tiny", "--device", "cpu", "--parts", "d" if "-c" in start else "cdab", "--dir", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(Path(accordion.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, *start, *words], capture_output=True, text=True, check=False, timeout=600, env=environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    parts = json.loads(path.read_text())["parts"]
    assert list(parts) == list(words[4])
    assert not any("failed" in part or "skipped" in part for part in parts.values())
    assert "one rank sends nothing" in parts["d"]["tables"][0]["title"]


def test_what_one_run_takes_fits_ten_minutes_as_far_as_is_known():
    """All parts but (g), and of (b) all rows but the last."""
    assert sorted(command.IN_ORDER) == sorted(set(PARTS) - {"g"})
    assert command.IN_ORDER[-1] == "b", "it takes what time there is left"
    others = sum(part.seconds for letter, part in PARTS.items() if letter in command.IN_ORDER[:-1])
    rows = [row.seconds for row in full_sizes().simulated]
    assert PARTS["b"].seconds == rows[0]
    assert others + sum(rows[:-1]) <= command.LAST_S < 600


def test_a_second_run_on_a_gpu_adds_to_the_first(monkeypatch, tmp_path):
    def ran(found: dict[str, Any]) -> Any:
        def run(letters: str, sizes: sizes.PartSizes, device: str, write: Any, *, limited: bool) -> list[str]:
            assert not limited
            write(found)
            return []

        return run

    words = ["--tiny", "--device", "cpu", "--dir", str(tmp_path)]
    for found in (
        {"a": {"data": 1}, "b": {"data": 2}},
        {"b": {"data": 3}, "a": {"skipped": "no time"}, "c": {"skipped": ""}},
    ):
        monkeypatch.setattr(command, "run_parts", ran(found))
        assert command.run(words) == 0
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["parts"] == {"a": {"data": 1}, "b": {"data": 3}, "c": {"skipped": ""}}
    monkeypatch.setattr(command, "describe", lambda device: {"device": "cpu", "memory_bytes": 1})
    assert command.run(words) == 0
    assert list(json.loads(path.read_text())["parts"]) == ["b", "a", "c"], "another machine's figures are not kept"
    path.write_text('{"machine": ')
    assert command.run(words) == 0


class Stage:
    """Stands for a team, some of which fail: what is in `fails` is (team, method, how often it works before)."""

    def __init__(self, fails: tuple[str, str, int]) -> None:
        self.fails, self.begun, self.asked = fails, list[str](), list[str]()

    def team(self, name: str, world: Any, make: Any, args: Any = ()) -> Any:
        self.begun.append(name)
        return _Team(self, name)


class _Team:
    def __init__(self, stage: Stage, name: str) -> None:
        self.stage, self.name, self.count = stage, name, 0

    def __enter__(self) -> _Team:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ask(self, method: str, *args: Any) -> list[Any]:
        self.stage.asked.append(f"{self.name} {method}")
        name, fatal, works = self.stage.fails
        key = str(args[0]) if method == "losses" and len(args) == 2 else self.name
        if (key, method) == (name, fatal):
            self.count += 1
            if self.count > works:
                raise BenchError("contender failed on rank 0: OutOfMemoryError: none left")
        turn = [{"step": 0.1, "host": 0.01}] * 2
        return {"losses": [[2.0, 1.0]], "memory": [{"allocated": 2**30}], "turn": [turn]}[method]


@pytest.mark.parametrize("fails", [("fsdp2", "losses", 0), ("fsdp2", "turn", 1), ("plain", "memory", 0)])
def test_a_contender_of_the_gpu_script_that_fails_is_told_of_and_the_others_are_measured(monkeypatch, fails):
    monkeypatch.setattr(turns, "WorkerTeam", Stage(fails).team)
    out = Findings()
    one_rank.one_rank(tiny_sizes().one_rank, "cpu", 2, 2, out)
    assert [len(table.rows) for table in out.tables] == [3, 3]
    for table in out.tables:
        said = {row[0]: row[1] for row in table.rows}
        assert "none left" in said.pop(fails[0])
        assert all("100.00" in step for step in said.values())
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert [text.partition(":")[0] for text in out.failures] == [fails[0]] * 2
    assert out.plain()["failed"]


def test_a_strategy_of_the_gpu_script_that_fails_is_told_of_and_ranks_begin_anew(monkeypatch):
    stage, out = Stage(("full_shard", "losses", 0)), Findings()
    monkeypatch.setattr(streams, "WorkerTeam", stage.team)
    losses, failed = streams.safe_losses(sizes.SMALL, 2, "cpu", out)
    assert list(failed) == ["full_shard"]
    assert {"ddp", "shard_grad_op", "no_shard"} <= set(losses)
    assert stage.begun == ["2 ranks", "2 ranks"]
    assert out.failures


def test_where_time_is_up_the_gpu_script_begins_no_simulated_ranks():
    out = Findings(end=time.monotonic() + 30)
    simulated.simulated(full_sizes().simulated, "cpu", out)
    (table,) = out.tables
    assert out.data == {}
    assert [row[:3] for row in table.rows][1] == ["70B", "64", "left out: no time; --parts b"]
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_no_answer_is_waited_for_beyond_the_end():
    assert Findings(end=time.monotonic() + 50, patience_s=110).world("cuda").patience_s == pytest.approx(50, abs=1)
    assert Findings(end=time.monotonic() + 500, patience_s=110).world("cuda").patience_s == 110
    assert Findings(end=0.0, patience_s=110).world("cuda").patience_s == 1.0


def test_plain_training_with_masters_by_hand_is_that_of_the_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4).to(torch.bfloat16)
    before = [p.detach().float() for p in model.parameters()]
    loop = MasterLoop(model, "cpu")
    x = torch.randn(8, 4, dtype=torch.bfloat16)
    model(x).float().square().mean().backward()
    masters = [torch.nn.Parameter(p.clone()) for p in before]
    for master, p in zip(masters, model.parameters(), strict=True):
        assert p.grad is not None
        master.grad = p.grad.float()
    torch.optim.AdamW(masters, lr=1e-5, fused=True).step()
    loop.step()
    assert all(torch.equal(a, b) for a, b in zip(loop._masters, masters, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(loop._masters, before, strict=True))
    for p, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(p, master.to(torch.bfloat16))
        assert p.grad is None


def test_a_smaller_gpu_gets_a_smaller_model():
    cases = [full_sizes(gib).one_rank for gib in (141, 79, 40, 24, 12)]
    assert [(case.preset.layers, case.batch) for case in cases] == [(16, 4), (16, 4), (8, 2), (4, 1), (2, 1)]


def test_ranks_of_several_nodes_reduce_as_such_a_job_does():
    """And FSDP2 beside them sums in the same dtype."""
    preset = LlamaShape(vocab=64, hidden=512, layers=1, heads=2, kv_heads=2, mlp=1536)
    case = Case(preset=preset, batch=1, seq=16, meta=True)

    def reduced(name: str, num_ranks: int) -> dict[str, int]:
        with WorkerTeam(name, World(num_ranks=num_ranks, group="fake"), shape_trainer, (name, case)) as team:
            sent = team.ask("wire")[0]["bytes"]
        return {kind: num_bytes for kind, num_bytes in sent.items() if "gather" not in kind}

    float32_bytes = 4 * cases.params_of(preset)
    assert set(reduced(OURS, 8)) == {"alltoall_base"}, "one node exchanges"
    for name in (OURS, "fsdp2"):
        (kind, num_bytes), *more = reduced(name, 16).items()
        assert "reduce_scatter" in kind
        assert not more
        assert num_bytes == pytest.approx(float32_bytes * 15 / 16, rel=0.01)
