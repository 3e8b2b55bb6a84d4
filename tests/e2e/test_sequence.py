"""`accordion train --shard.sequence`: ranks that share each sequence make the steps of ranks that have whole ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from accordion import cli
from accordion.train import launch
from tests.e2e.jobs import CHAT, TINY, chat_data, job_of, losses_of, several

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
STEPS = ["--train.steps", "4", "--train.global_batch", "4", "--train.micro_batch", "1", "--checkpoint.every", "2"]
SGD = ["--optimizer", "sgd", "--optimizer.lr", "0.05", "--train.schedule", "linear"]  # as exact as its gradients
RUNS = {
    "text": [*TINY, *STEPS, *SGD, "--train.eval_every", "2", "--train.validation_rows", "5"],
    "packed": [*CHAT, *STEPS, "--adapter", "lora", "--adapter.r", "4", *SGD],
    "one a row": [*CHAT, *STEPS, "--data.packing", "none", "--model.loss", "chunked", *SGD],
}
# Run, ranks, ranks of a sequence, the run to resume from.
JOBS = [
    [("text", 4, 2, None), ("packed", 4, 2, None), ("one a row", 4, 2, None)],
    [("text", 1, 1, None), ("packed", 1, 1, None), ("one a row", 1, 1, None), ("text", 1, 1, "text 4 2")],
]


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    chat_data(place)
    return place


def run_dir_of(name: str, world: int, sequence: int, resumed: str | None) -> str:
    return f"{name} {world} {sequence}" + (" resumed" if resumed else "")


def words_of(name: str, world: int, sequence: int, resumed: str | None) -> list[str]:
    run_dir = run_dir_of(name, world, sequence, resumed)
    words = [*RUNS[name], "--run.dir", run_dir, "--shard.sequence", str(sequence)]
    words += ["--model.mlp_tiles", "3"] if sequence > 1 else []
    return words + (["--checkpoint.resume", f"{resumed}/checkpoints/step-000002"] if resumed else [])


def test_the_steps_do_not_depend_on_the_ranks_of_a_sequence(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shown = ""
    for jobs in JOBS:
        world = jobs[0][1]
        assert launch.start(several, ([job_of(words_of(*job), world) for job in jobs],), world) == 0
        shown += capfd.readouterr().out
    whole = {name: losses_of(place / f"{name} 1 1") for name in RUNS}
    assert all(len(losses) == 4 for losses in whole.values())
    for name, world, sequence, resumed in [job for jobs in JOBS for job in jobs]:
        run_dir = run_dir_of(name, world, sequence, resumed)
        expected = whole[name][2:] if resumed else whole[name]
        assert losses_of(place / run_dir) == pytest.approx(expected, rel=0, abs=1e-5), run_dir
    assert "a step is 4 rows of 64 tokens: 2 groups of 2 ranks x 1 x 2" in shown
    validations = [float(loss) for loss in re.findall(r"validation loss ([\d.]+) after 2 steps", shown)]
    assert len(validations) == 2
    assert validations == pytest.approx(validations[:1] * 2, abs=1.1e-4)  # as shown
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
    if not Path("text 4 2").exists():
        assert launch.start(several, ([job_of(words_of("text", 4, 2, None), 4)],), 4) == 0
    assert cli.main(["export", "text 4 2", "exported"]) == 0
    config = json.loads(Path("exported/config.json").read_text())
    assert config["use_cache"]
    assert "_sequence_" not in json.dumps(config)
    capfd.readouterr()
    words = ["text 4 2", "--prompt", "def", "--max-new-tokens", "3", "--json", "--device", "cpu", "--nproc", "1"]
    assert cli.main(["generate", *words]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[0])["text"]
