"""The benchmark as people run it, on a tiny model: what it promises about contenders, order, idleness, bytes and failure."""

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
import torch.distributed as dist
from benchmarks import checkpoint, offload, optimizer
from benchmarks.scale import Network, grow

import accordion
from accordion import cli
from accordion.bench import command, compare, trainer
from accordion.bench.contenders import Setting
from accordion.bench.host import HostLoop
from accordion.bench.meters import Wire
from accordion.bench.model import shape_of
from accordion.engine import layout
from accordion.workers.ranks import BenchError, RankSetup, WorkerTeam, World, interleaved

ONE = World(num_ranks=1)


# -- teams


class Diary:
    """A program that says when it was asked, and how much of the processor its process took."""

    def __init__(self, setup: RankSetup, name: str, path: str) -> None:
        self.setup, self.name, self.path = setup, name, path

    def turn(self) -> int:
        with open(self.path, "a") as file:
            file.write(self.name)
        return self.setup.rank

    def burn(self) -> float:
        start = time.process_time()
        while time.process_time() - start < 0.3:
            pass
        return 0.3

    def used(self) -> float:
        return time.process_time()

    def fails(self) -> None:
        if self.setup.rank == 1:
            raise ValueError("of no use\nmore")
        dist.barrier()

    def dies(self) -> None:
        os._exit(3)

    def sends(self) -> tuple[dict[str, int], dict[str, int]]:
        full, own = torch.ones(8, 4), torch.ones(4)
        with Wire() as wire:
            dist.all_gather_single(full, own) if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor(
                full, own
            )
            dist.all_reduce(full)
            dist.all_to_all_single(torch.empty(8, 4), full)
            dist.broadcast(own, 0)
            dist.send(own, 1)
            dist.recv(own, 1)
            dist.barrier()
        return dict(wire.num_bytes), dict(wire.launches)


def test_turns_interleave_and_who_waits_is_idle(tmp_path):
    said = tmp_path / "diary"
    with (
        WorkerTeam("A", ONE, Diary, ("A", str(said))) as a,
        WorkerTeam("B", World(num_ranks=2), Diary, ("B", str(said))) as b,
    ):
        found = interleaved([a, b], 3, "turn")
        assert said.read_text() == "ABBABBABB"
        assert found == {"A": [[0]] * 3, "B": [[0, 1]] * 3}
        before = b.ask("used")
        a.ask("burn")
        assert all(y - x < 0.1 for x, y in zip(before, b.ask("used"), strict=True)), "they sleep while another one runs"


def test_a_rank_that_fails_or_dies_ends_its_team():
    for num_ranks, act, message in (
        (2, "fails", r"contender 'A' failed on rank 1: ValueError: of no use$"),
        (1, "dies", "its process ended"),
    ):
        world = World(num_ranks=num_ranks)
        with WorkerTeam("A", world, Diary, ("A", "")) as team, pytest.raises(BenchError, match=message):
            team.ask(act)
    with pytest.raises(BenchError, match="contender 'A' did not answer within 0 s on rank 0"):
        WorkerTeam("A", World(num_ranks=1, timeout_s=0.0), Diary, ("A", ""))


def test_what_a_rank_sends_is_counted():
    with WorkerTeam("A", World(num_ranks=8, group="fake"), Diary, ("A", "")) as team:
        num_bytes, launches = team.ask("sends")[0]
    assert sum(launches.values()) == len(launches) == 5, "receives and barriers send nothing"
    assert sorted(num_bytes.values()) == sorted([112, 2 * 112, 112, 14, 16])


# -- accordion bench


def crooked(setup: RankSetup, contender: str, setting: Setting) -> Any:
    """The trainer, but one contender starts from other weights, and one not at all."""
    if contender == "ddp":
        raise RuntimeError("does not run here")
    seed = 1 if contender == "accordion:no_shard" else 0
    ranks_trainer = trainer.start(setup, contender, Setting(model=setting.model, batch=1, seq=16, seed=seed))
    ranks_trainer.memory = ranks_trainer.turn = None  # type: ignore[assignment,method-assign]
    return ranks_trainer


def test_contenders_that_train_something_else_are_named_and_nothing_is_compared(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "start", crooked)
    words = ["--against", "ddp,plain,accordion:no_shard", "--nproc", "1", "--model", "gpt-tiny"]
    assert cli.main(["bench", *words]) == 1
    said = capsys.readouterr()
    assert "left out: contender 'ddp' failed on rank 0: RuntimeError: does not run here" in said.out
    assert "the losses of accordion:no_shard differ from those of the others" in said.err
    assert "measuring" not in said.out
    assert not list(tmp_path.rglob("*.json"))


def test_contenders_train_the_same_and_are_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "STEPS", 2)
    against = "fsdp2,ddp,floor"
    words = ["--against", against, "--model", "gpt-tiny", "--rounds", "2", "--report", "figures.md"]
    assert cli.main(["bench", *words, "--device", "cpu", "--nproc", "2"]) == 0
    shown = capsys.readouterr().out
    assert "losses agree" in shown
    data = written("bench")
    found = data["comparison"]
    names = ["accordion", *against.split(",")]
    assert list(found["contenders"]) == names
    assert set(found["ratios"]) == {
        *(f"accordion / {peer}" for peer in ("fsdp2", "ddp", "floor")),
        *(f"{peer} / floor" for peer in ("fsdp2", "ddp")),
    }
    assert set(found["cpu_ratios"]) == set(found["ratios"])
    assert found["verdict"]["wrong"] == []
    assert {name: len(v) for name, v in found["verdict"]["losses"].items()} == dict.fromkeys(names, 3) | {"floor": 1}
    report = Path("figures.md").read_text()
    assert report.startswith("# Figures of this machine\n\n`accordion bench --against fsdp2,ddp,floor --model gpt-tiny")
    assert all(
        text in report for text in ("- processor: ", "\n| fsdp2 | ", "\n- floor: the step without communication")
    )
    assert set(data["host"]) == {"plain", "accordion", "fsdp2"}
    assert data["host"]["accordion"]["unit"]["median"] > data["host"]["plain"]["unit"]["median"]
    assert data["host"]["plain"]["extra"]["median"] == 0
    for m in found["contenders"].values():
        assert [len(turn) for turn in m["steps"]] == [2, 2]
        assert m["times"]["step"]["median"] >= m["times"]["backward"]["median"] > 0
        assert m["allocated_bytes"] > m["rest_bytes"] > 0
        assert m["reserved_bytes"] > m["allocated_bytes"], "the resident set holds the interpreter too"
    assert_bytes(found["contenders"])


def written(name: str) -> Any:
    """What a benchmark left below the current folder."""
    return json.loads(Path("runs", "bench", f"{name}.json").read_text())


def assert_bytes(found: dict[str, Any]) -> None:
    """What each strategy keeps and sends, by arithmetic: parameters and two states of AdamW in float32, two ranks."""
    params = list(shape_of("gpt-tiny").make().parameters())
    full = 4 * sum(p.numel() for p in params)
    cuts = [layout.cut(p.shape, 2, 4) for p in params]
    shards = 4 * sum(c.shard_numel for c in cuts)
    tags = 4 * (len(params) + 20)  # flags and tags travel with the gradients, offsets are aligned
    sent = {name: sum(m["sent_bytes"].values()) for name, m in found.items()}
    assert found["accordion"]["rest_bytes"] == pytest.approx(3 * shards, abs=256 * len(params))
    assert full <= sent["ddp"] <= full + 8
    assert 2 * shards < sent["accordion"] < 3 * shards + tags, "the root and the last block are not gathered twice"
    assert sent["fsdp2"] == pytest.approx(sent["accordion"], rel=0.25)


# -- its subcommands


@pytest.mark.slow
def test_growth_is_what_the_arithmetic_says():
    """Launches stay as many. Sent: (n - 1) / n of gathers and reduces, and n times what one rank says to each other one."""
    network = Network(gbps=8.0, latency_us=2.0)
    points = grow(["accordion"], (8, 64), rounds=1, count=1, network=network)["accordion"]
    assert [p.num_ranks for p in points] == [8, 64]
    small, large = points
    assert small.launches == large.launches > 0
    said = 4 * (
        16 * (10 + 2) + 3
    )  # of each of 16 units a flag a parameter and a tag to reduce, two tags to gather; the root
    whole = small.sent_bytes * 8 / 7 - 8 * said
    assert large.sent_bytes == pytest.approx(63 / 64 * (whole + 64 * said), rel=0.01)
    assert min(small.rest_bytes, large.rest_bytes) > 0
    for p in points:
        assert p.wire_s == pytest.approx(p.sent_bytes / 1e9 + 2e-6 * p.launches)


class Lines(HostLoop):
    def count(self) -> int:
        """Lines of Python that a step runs, each turn of a loop again."""
        found = 0

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal found
            found += event == "line"
            return trace

        self._step()
        sys.settrace(trace)
        self._step()
        sys.settrace(None)
        return found


def test_a_step_of_thousands_of_ranks_runs_as_many_lines_of_python():
    counts = []
    for num_ranks in (8, 4096):
        with WorkerTeam("A", World(num_ranks=num_ranks, group="still"), Lines, ("accordion", 4096, 2)) as team:
            counts += team.ask("count")
    assert counts[0] > 1000
    assert counts[1] == pytest.approx(counts[0], rel=0.02), (
        "4,088 more ranks are no reason for as many turns of any loop"
    )


@pytest.mark.parametrize(
    ("name", "run", "more"),
    [
        pytest.param("optimizer", optimizer.run, ["--rounds", "2", "--steps", "2"], marks=pytest.mark.slow),
        ("memory", None, ["--device", "cpu"]),
        pytest.param("offload", offload.run, ["--rounds", "2", "--steps", "1"], marks=pytest.mark.slow),
    ],
)
def test_each_writes_what_it_found(tmp_path, capsys, monkeypatch, name, run, more):
    monkeypatch.chdir(tmp_path)
    words = ["--model", "gpt-tiny", *more]
    assert cli.main(words if run else ["bench", name, *words], run) == 0
    data = written(name)
    assert data["machine"]["torch"] == torch.__version__
    if name == "memory":
        assert all(m["allocated"] > m["rest"] > 0 for m in data["bytes"].values())
        assert set(data["bytes"]) == {"accordion", "fsdp2"}
    elif name == "offload":
        held = {kind: found["bytes"] for kind, found in data["found"].items()}
        assert {kind for kind, found in held.items() if found["disk"]} == {"accordion disk"}
        assert {kind for kind, found in held.items() if found["arena"]} == {"accordion host", "accordion disk"}
        assert held["accordion disk"]["moved"] > held["accordion disk"]["states"]
    else:
        for turns in (data["wall"], data["cpu"]):
            assert set(turns) == {"accordion", "local", "dtensor"}
            assert [len(turn) for turn in turns["accordion"]] == [2, 2]
        assert set(data["ratios"]["cpu"]) == {"accordion", "dtensor"}
    assert f"{name}.json" in capsys.readouterr().out


@pytest.mark.slow
def test_saves_and_loads_are_timed_and_leave_nothing_of_their_own(tmp_path, capfd, monkeypatch):
    """In a script its ranks find under `__main__` what they are to make."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "precious").write_text("of the user")
    words = ["--mib", "32", "--rounds", "1", "--device", "cpu", "--to", "to"]
    environ = {**os.environ, "PYTHONPATH": str(Path(accordion.__file__).parents[1])}
    subprocess.run([sys.executable, checkpoint.__file__, *words], check=True, env=environ)
    assert "accordion / dcp" in capfd.readouterr().out
    times = written("checkpoint")["times"]
    assert {kind: sorted(found) for kind, found in times.items()} == {
        "accordion": ["block", "load", "save"],
        "unsummed": ["load", "save"],
        "dcp": ["block", "load", "save"],
        "disk": ["load", "save"],
        "memory": ["block"],
    }
    assert all(seconds > 0 for found in times.values() for values in found.values() for seconds in values)
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["precious"]
