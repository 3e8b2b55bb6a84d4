"""`accordion train --deepspeed`: a file trains as the same settings given as flags."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from accordion import cli

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TEXT = str(Path(asyncio.__file__).parent)
TINY = ["--model.preset", "llama-tiny", "--data.path", TEXT, "--data.seq_len", "64", "--launch.device", "cpu"]
CONTENT = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.25,
    "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_param": {"device": "none"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0}},
    "steps_per_print": 10,
}
FLAGS = ["--train.micro_batch", "4", "--train.accumulate", "2", "--train.clip", "0.25"]
FLAGS += ["--train.lr", "0.003", "--train.weight_decay", "0", "--shard.strategy", "full_shard"]


def train(run_dir: Path, *words: str) -> list[dict[str, Any]]:
    assert cli.main(["train", *TINY, "--train.steps", "4", "--run.dir", str(run_dir), *words]) == 0
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONTENT))
    return path


def test_a_file_trains_as_the_same_settings_given_as_flags(file: Path, tmp_path: Path) -> None:
    by_file = train(tmp_path / "file", "--deepspeed", str(file))
    by_flags = train(tmp_path / "flags", *FLAGS)
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in by_file] == [line[key] for line in by_flags], key
    assert by_file[0]["loss"] > by_file[-1]["loss"]
    recorded = (tmp_path / "file" / "config.yaml").read_text()
    assert 'strategy: "full_shard"' in recorded
    assert "accumulate: 2" in recorded


def test_conflicts_and_offload_are_bad_input(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *TINY, "--deepspeed", str(file), "--train.clip", "1.0"]) == 2
    assert capsys.readouterr().err.startswith("accordion: train.clip is 1.0, and gradient_clipping in")
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}))
    assert cli.main(["train", *TINY, "--deepspeed", str(file)]) == 2
    told = capsys.readouterr().err
    assert 'offload_optimizer.device\' ("cpu") is not supported: there are no memory tiers yet' in told
    assert told.count("\n") == 1
