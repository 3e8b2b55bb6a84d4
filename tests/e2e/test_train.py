"""The main job as a person runs it: it learns, ranks do not change the maths, and resume goes on with the same curve."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accordion import cli
from accordion.train import launch
from tests.e2e.jobs import TINY, job_of, lines_of, losses, several
from tests.support import forked

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
Metrics = list[dict[str, Any]]


def train(run_dir: Path, *flags: str) -> Metrics:
    assert cli.main(["train", "--run.dir", str(run_dir), *flags]) == 0
    return lines_of(run_dir)


@pytest.mark.slow
def test_the_main_job_learns_and_leaves_its_record(place: Path) -> None:
    """Five steps of what `make train` does on a machine without GPUs: it reads the standard library."""
    run_dir = place / "main"
    found = train(run_dir, "--launch.device", "cpu", "--train.steps", "5", "--train.warmup", "1")
    assert losses(found)[0] - losses(found)[-1] >= 0.5
    assert losses(found)[0] == pytest.approx(math.log(4096), abs=0.8)
    assert all(line["tokens_per_s"] == pytest.approx(16 * 128 / line["step_s"]) for line in found)
    assert list(run_dir.glob("events.out.tfevents.*"))


@pytest.fixture(scope="module")
def whole(place: Path) -> tuple[Metrics, str]:
    """A small run of 8 steps in processes of its own, and what it printed."""
    flags = ["--train.steps", "8", "--checkpoint.every", "2", "--checkpoint.keep", "3", "--train.eval_every", "5"]
    words = ["train", *TINY, *flags, "--train.sample_every", "7", "--run.dir", "whole"]
    out, err = place / "whole.out", place / "whole.err"
    with forked.Job(forked.command, words, out, err) as job:
        assert (job.wait(), err.read_text()) == (0, "")
    return lines_of(place / "whole"), out.read_text()


def test_a_run_learns_and_a_person_without_a_terminal_sees_plain_lines(whole: tuple[Metrics, str], place: Path) -> None:
    found, shown = whole
    assert losses(found)[-1] < losses(found)[0]
    assert losses(found)[0] == pytest.approx(math.log(1024), abs=0.8)
    for line in found:
        assert list(line) == ["step", "loss", "grad_norm", "lr", "tokens_per_s", "step_s", "peak_bytes", "skipped"]
        assert 100e6 < line["peak_bytes"] < 4e9
    assert "\033" not in shown
    steps = [line.split()[1] for line in shown.splitlines() if line.startswith("step ")]
    assert steps == [f"{step}/8" for step in range(1, 9)]
    assert f"loss {losses(found)[-1]:.3f}" in shown
    for words in (
        "without sharding",
        "model.layers.0-1",
        "validation loss",
        "after 5 steps",
        "after 8 steps",
    ):
        assert words in shown
    assert f"checkpoint: {Path('whole', 'checkpoints', 'step-000008')}" in shown
    assert "after 7 steps:\nsample:" in shown  # and no step that follows is another for it, as the tests below compare
    assert shown.count("sample:") == 2
    checkpoints = place / "whole" / "checkpoints"
    names = sorted(path.name for path in checkpoints.iterdir() if path.is_dir())
    assert names == ["step-000004", "step-000006", "step-000008"]
    saved = {path.name for path in (checkpoints / "step-000008").iterdir()}
    assert saved == {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}


def test_resume_goes_on_with_the_same_curve(whole: tuple[Metrics, str], place: Path) -> None:
    """Wherever the optimizer rests now."""
    checkpoint, host = str(place / "whole" / "checkpoints" / "step-000004"), ("--shard.offload", "optimizer=host")
    resumed = ["--train.steps", "8", "--checkpoint.resume", checkpoint, *host]
    found = train(place / "resumed", *TINY, *resumed)
    expected = whole[0][4:]
    for key in ("step", "loss", "grad_norm", "lr"):
        assert [line[key] for line in found] == [line[key] for line in expected], key


VARIANTS: dict[str, tuple[list[str], float]] = {  # flags, and how far its losses may lie from those of full_shard
    "full_shard": ([], 0),
    "shard_grad_op": (["--shard.strategy", "shard_grad_op"], 0),
    "shard_optim": (["--shard.strategy", "shard_optim"], 1e-5),
    "no_shard": (["--shard.strategy", "no_shard"], 1e-5),
    "hybrid": (["--shard.strategy", "hybrid_shard", "--shard.replicas", "2"], 1e-5),
    "hybrid over replicas": (["--shard.strategy", "hybrid_shard_optim", "--shard.replicas", "2"], 1e-5),
    "accumulated": (["--train.micro_batch", "2", "--train.accumulate", "4"], 1e-5),
    "accumulated locally": (
        ["--shard.strategy", "shard_optim", "--train.micro_batch", "4", "--train.accumulate", "2"],
        1e-5,
    ),
    "recomputed": (["--shard.checkpoint_activations", "full"], 1e-5),
    "recomputed every second": (["--shard.checkpoint_activations", "every:2"], 1e-5),
    "recomputed selectively": (["--shard.checkpoint_activations", "selective"], 1e-5),
    "units by size": (["--shard.units", "min_params:20000"], 1e-5),
    "units by class": (["--shard.units", "LlamaMLP,LlamaAttention"], 1e-5),
    "offloaded": (
        [
            *("--shard.offload", "params=disk:.,grads=disk:.,optimizer=disk:.,activations=disk:."),
            *("--shard.checkpoint_activations", "full"),
        ],
        0,
    ),
    "bf16": (["--shard.precision", "bf16"], 0.05),
    "fp16": (["--shard.precision", "fp16"], 0.05),
}


# A DeepSpeed configuration, and the same settings as flags; its optimizer decays vectors too, so that neither has any decay.
ON_DISK = {"device": "nvme", "nvme_path": "."}
DEEPSPEED = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.25,
    "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_param": ON_DISK, "offload_optimizer": ON_DISK},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0}},
    "steps_per_print": 10,
}
AS_FLAGS = ["--train.micro_batch", "4", "--train.accumulate", "2", "--train.clip", "0.25", "--train.lr", "0.003"]
AS_FLAGS += ["--train.weight_decay", "0", "--shard.strategy", "full_shard"]


USUAL = ("full_shard", "hybrid", "accumulated", "offloaded")


@pytest.mark.parametrize("names", [USUAL, pytest.param(tuple(VARIANTS), marks=pytest.mark.slow)], ids=["usual", "all"])
def test_every_switch_trains_the_same_model(place: Path, names: tuple[str, ...]) -> None:
    file, variants = place / "ds_config.json", place / "variants" / str(len(names))
    file.write_text(json.dumps(DEEPSPEED))
    runs = {name: VARIANTS[name][0] for name in names}
    runs |= {"deepspeed": ["--deepspeed", str(file)], "deepspeed as flags": AS_FLAGS}
    common = [*TINY, "--train.steps", "3"]
    jobs = [job_of([*common, "--run.dir", str(variants / name), *flags], 2) for name, flags in runs.items()]
    assert launch.start(several, (jobs,), 2) == 0
    expected = losses(lines_of(variants / "full_shard"))
    assert len(expected) == 3
    for name in names:
        found = losses(lines_of(variants / name))
        assert found == pytest.approx(expected, rel=0, abs=VARIANTS[name][1]), name
    by_file, by_flags = (lines_of(variants / name) for name in ("deepspeed", "deepspeed as flags"))
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in by_file] == [line[key] for line in by_flags], key
    assert losses(by_file) != losses(lines_of(variants / "accumulated"))


@pytest.mark.parametrize("how", ["as under it", pytest.param("by it", marks=pytest.mark.slow)])
def test_under_torchrun(whole: tuple[Metrics, str], place: Path, capfd: pytest.CaptureFixture[str], how: str) -> None:
    """Start ranks in torchrun's environment, or by torchrun itself."""
    words = ["train", *TINY, "--train.steps", "2", "--run.dir", how, "--train.warmup", "0"]
    if how == "by it":
        starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        code = subprocess.run([*starter, "-m", "accordion", *words], check=False).returncode
    else:
        code = forked.under_torchrun(words, 2)
    said = capfd.readouterr()
    assert code == 0, said.err
    assert losses(lines_of(place / how))[0] == whole[0][0]["loss"]
    assert said.out.count("validation loss") == 1
