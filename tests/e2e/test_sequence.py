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
WHOLE = "text on 4"  # the run from whose step 2 another one resumes
# Folder of a run -> (key of RUNS, ranks; whether it resumes). Four ranks are two groups that share sequences.
JOBS = {f"{name} on {world}": (name, world, False) for world in (4, 1) for name in RUNS}
JOBS["text resumed on 1"] = ("text", 1, True)


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    chat_data(place)
    return place


def train(world: int, *run_dirs: str) -> None:
    """Train these of `JOBS` in ranks that start once."""
    jobs = []
    for run_dir in run_dirs:
        name, _, resumes = JOBS[run_dir]
        words = [*RUNS[name], "--run.dir", run_dir]
        words += ["--shard.sequence", "2", "--model.mlp_tiles", "3"] if world == 4 else []
        jobs.append(job_of(words + ["--checkpoint.resume", f"{WHOLE}/checkpoints/step-000002"] * resumes, world))
    assert launch.start(several, (jobs,), world) == 0


def test_the_steps_do_not_depend_on_the_ranks_of_a_sequence(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for world in (4, 1):
        train(world, *(run_dir for run_dir, (_, ranks, _) in JOBS.items() if ranks == world))
    shown = capfd.readouterr().out
    whole = {name: losses_of(place / f"{name} on 1") for name in RUNS}
    assert all(len(losses) == 4 for losses in whole.values())
    for run_dir, (name, _, resumes) in JOBS.items():
        expected = whole[name][2:] if resumes else whole[name]
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
        of_name = {text for text, (run, *_) in zip(samples, JOBS.values(), strict=True) if run == name}
        assert len(of_name) == 1, of_name


def test_a_run_of_sequence_ranks_is_exported_and_generates(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if not Path(WHOLE).exists():
        train(4, WHOLE)
    assert cli.main(["export", WHOLE, "exported"]) == 0
    config = json.loads(Path("exported/config.json").read_text())
    assert config["use_cache"]
    assert "_sequence_" not in json.dumps(config)
    capfd.readouterr()
    words = [WHOLE, "--prompt", "def", "--max-new-tokens", "3", "--json", "--device", "cpu", "--nproc", "1"]
    assert cli.main(["generate", *words]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[0])["text"]
