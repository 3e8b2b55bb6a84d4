"""`accordion train --shard.sequence`: ranks that share each sequence make the steps of ranks that have whole ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from accordion import cli
from accordion.train import launch
from accordion.train.command import read
from accordion.train.deepspeed import translated
from accordion.train.launch import RankPlace
from accordion.train.prepare import prepare
from accordion.train.screen import Screen
from tests.e2e.jobs import TINY, chat_data, losses_of, several
from tests.support import forked

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
STEPS = ["--train.steps", "4", "--train.global_batch", "4", "--train.micro_batch", "1", "--checkpoint.every", "2"]
SGD = ["--optimizer", "sgd", "--optimizer.lr", "0.05", "--train.schedule", "linear"]  # as exact as its gradients
CHAT = ["--model.path", "base", "--model.init", "pretrained", "--data.path", "talks.jsonl", "--data.format", "chat"]
CHAT += ["--data.seq_len", "96", "--launch.device", "cpu", *forked.UNTRACKED, *STEPS]
RUNS = {
    "text": [*TINY, *STEPS, *SGD, "--train.eval_every", "2", "--train.validation_rows", "5"],
    "packed": [*CHAT, "--adapter", "lora", "--adapter.r", "4", *SGD],
    "one a row": [*CHAT, "--data.packing", "none", "--model.loss", "chunked", *SGD],
}
# Run, ranks, ranks of a sequence, the run to resume from.
JOBS = [
    [("text", 4, 2, None), ("packed", 4, 2, None), ("one a row", 4, 2, None)],
    [("text", 2, 2, None), ("text", 2, 1, None), ("text", 2, 2, "text 4 2")],
    [("text", 1, 1, None), ("packed", 1, 1, None), ("one a row", 1, 1, None), ("text", 1, 1, "text 2 2")],
]


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    chat_data(place)
    return place


def job_of(place: Path, name: str, world: int, sequence: int, resumed: str | None) -> tuple[Any, ...]:
    run_dir = f"{name} {world} {sequence}" + (" resumed" if resumed else "")
    words = [*RUNS[name], "--run.dir", run_dir, "--shard.sequence", str(sequence)]
    words += ["--model.mlp_tiles", "3"] if sequence > 1 else []
    words += ["--checkpoint.resume", f"{resumed}/checkpoints/step-000002"] if resumed else []
    at = RankPlace(rank=0, world=world, local_rank=0, local_world=world, starter="a test")
    config = translated(read(words), (), world)
    return prepare(config, at, place / "cache", Screen(speaks=False), began_s=0.0), "cpu"


def test_the_steps_do_not_depend_on_the_ranks_of_a_sequence(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shown = ""
    for jobs in JOBS:
        world = jobs[0][1]
        assert launch.start(several, ([job_of(place, *job) for job in jobs],), world) == 0
        shown += capfd.readouterr().out
    whole = {name: losses_of(place / f"{name} 1 1") for name in RUNS}
    assert all(len(losses) == 4 for losses in whole.values())
    for name, world, sequence, resumed in [job for jobs in JOBS for job in jobs]:
        run_dir = f"{name} {world} {sequence}" + (" resumed" if resumed else "")
        expected = whole[name][2:] if resumed else whole[name]
        assert losses_of(place / run_dir) == pytest.approx(expected, rel=0, abs=1e-5), run_dir
    assert "a step is 4 rows of 64 tokens: 2 groups of 2 ranks x 1 x 2" in shown
    validations = [float(loss) for loss in re.findall(r"validation loss ([\d.]+) after 2 steps", shown)]
    assert len(validations) == 4
    assert validations == pytest.approx(validations[:1] * 4, abs=1.1e-4)  # as shown
    samples = [
        text.split("full_shard over")[0].split("without sharding")[0].strip()[:150]
        for text in shown.split("sample:")[1:]
    ]
    for name in RUNS:
        of_name = {
            text for text, (run, *_) in zip(samples, (job for jobs in JOBS for job in jobs), strict=True) if run == name
        }
        assert len(of_name) == 1, of_name


def test_a_run_of_sequence_ranks_is_exported_and_generates(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if not Path("text 2 2").exists():
        assert launch.start(several, ([job_of(place, "text", 2, 2, None)],), 2) == 0
    assert cli.main(["export", "text 2 2", "exported"]) == 0
    config = json.loads(Path("exported/config.json").read_text())
    assert config["use_cache"]
    assert "_sequence_" not in json.dumps(config)
    capfd.readouterr()
    words = ["text 2 2", "--prompt", "def", "--max-new-tokens", "3", "--json", "--device", "cpu", "--nproc", "1"]
    assert cli.main(["generate", *words]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[0])["text"]
