"""Keys of a run: flags and run files mean the same, and every mistake is one sentence."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from accordion.errors import UsageError, nearest
from accordion.sharding import Sharding
from accordion.train import command
from accordion.train.config import Config, TrainConfig, flat, spread


def test_flags_and_run_file_have_the_same_names(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  steps: 7\n  lr: 1e-4\nmodel: {preset: llama-tiny}\ndata.seq_len: 64\n")
    flags = ["--train.steps", "7", "--train.lr=1e-4", "--model.preset", "llama-tiny", "--data.seq_len", "64"]
    assert command.read(["--config", str(file)])[0] == command.read(flags)[0]


@pytest.mark.parametrize("order", [0, 1])
def test_flags_override_the_file_in_any_order(tmp_path: Path, order: int) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {steps: 7}\n")
    words = [["--config", str(file)], ["--train.steps", "9"]]
    assert command.read(words[order] + words[1 - order])[0].train.steps == 9


def test_pretrained_weights_have_their_own_default_learning_rate() -> None:
    tuned = ["--model.path", "llama", "--model.init", "pretrained"]
    assert command.read(["--model.path", "llama"])[0].train.lr == TrainConfig().lr
    assert command.read(tuned)[0].train.lr == 2e-5
    assert command.read([*tuned, "--adapter", "lora"])[0].train.lr == 2e-4
    assert command.read([*tuned, "--train.lr", "1e-3"])[0].train.lr == 1e-3
    assert command.read([*tuned, "--optimizer", "adamw"])[0].train.lr == TrainConfig().lr


def test_printed_configuration_is_a_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.read(["--train.steps", "5", "--train.lr", "1e-5", "--print_config"])
    assert stop.value.code in (0, None)
    file = tmp_path / "run.yaml"
    file.write_text(capsys.readouterr().out)
    config = command.read(["--config", str(file)])[0]
    assert config == replace(Config(), train=replace(TrainConfig(), steps=5, lr=1e-5))


def test_help_comes_from_the_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.read(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for key in flat(Config()):
        assert f"--{key}" in shown
    assert "largest gradient norm; 0: no clipping" in shown
    assert "sequences in one forward" in shown
    assert "field or column with the text of a row" in shown


MISTAKES = [
    (["--shard.offload", "host_bytes=1GiB"], "needs params, grads or optimizer on 'host' or 'disk:/path'"),
    (["--shard.offload", "optimizer=host,device_bytes=nanGiB"], "has 'device_bytes=nanGiB'"),
    (["--shard.offload", "host_bytes=infGiB"], "has 'host_bytes=infGiB'"),
    (["--train.on_nonfinite", "skip:0"], "train.on_nonfinite 'skip:0' is no choice"),
    (["--train.min_delta", "0.1"], "needs train.patience; give that too"),
    (["--train.patience", "2"], "train.patience is 2, which needs train.eval_every"),
    (["--train.keep_best"], "needs train.eval_every; give that too"),
    (["--optimizer", "adadelt"], "did you mean 'adadelta'?"),
    (["--optimizer", "adamw", "--optimizer.betas", "0.9"], "it takes 2 numbers separated by commas"),
    (["--optimizer", "sgd", "--optimizer.betas", "0.9,0.9"], "option '--optimizer.betas' does not exist"),
    (["--train.schedule", "cosin"], "did you mean 'cosine'?"),
    (["--train.decay_steps", "5"], "which train.schedule 'auto' does not use; it is for wsd"),
    (["--train.schedule", "constant", "--train.final_lr", "0.5"], "it is for auto or cosine or linear or wsd"),
    (
        ["--train.schedule", "wsd", "--train.decay_steps", "98"],
        "train.decay_steps 98 are together more than train.steps 100",
    ),
    (["--adapter.r", "8"], "adapter.r is 8, which adapter.kind 'none' does not use; it is for lora."),
    (["--adapter", "lora", "--adapter.alpha", "0"], "adapter.alpha is 0.0; it must be above 0"),
    (["--adapter", "lora", "--adapter.dropout", "1"], "must be at least 0 and below 1"),
    (["--adapter", "lora"], "adapter.kind is 'lora', which needs the weights of a model"),
    (["--data.packing", "none"], "which data.format 'text' does not use; it is for chat or prompt."),
    (["--train.step", "5"], "'--train.steps'"),
    (["--train.steps"], "expected one argument"),
    (["--train.steps", "2.5"], "a whole number"),
    (["--train.steps", "9" * 5000], "it takes a whole number"),
    (["--train.steps", "x" * 5000], "(5,000 characters)"),
    (["--train.lr", "fast"], "a number"),
    (["--train.lr", "nan"], "a number"),
    (["--train.lr", "0"], "train.lr is 0"),
    (["--train.seed", "9" * 400], "train.seed is 999"),
    (["--checkpoint.background", "maybe"], "true or false"),
    (["--model.preset", "llama10m"], "'llama-10m'"),
    (["--model.init", "pretrained"], "names no folder"),
    (["--shard.units", "min_param:100"], "min_params"),
    (["--shard.replicas", "2"], "has no replicas"),
    (["--data.path", ""], "data.path is empty"),
    (["--run.dir", "a\0b"], "run.dir"),
    (["stray"], "stray"),
    (["--train", "foo"], "train"),
    (["--config"], "names no file"),
    (["--config", "absent.yaml"], "does not exist"),
    (["--config", "."], "cannot be read"),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[" ".join(words)[:40] for words, _ in MISTAKES])
def test_mistakes_are_named(words: list[str], expected: str) -> None:
    with pytest.raises(UsageError) as error:
        command.read(words)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


LIMITED = {
    f"{group.name}.{key.name}": key.metadata["limits"]
    for group in fields(Config)
    if group.name != "parts"
    for key in fields(group.default_factory)  # type: ignore[arg-type, misc]
    if "limits" in key.metadata
}


@pytest.mark.parametrize("key", LIMITED)
def test_numbers_have_limits(key: str) -> None:
    least, most = LIMITED[key]
    for value in (least - 1, most + 1):
        with pytest.raises(UsageError, match=key):
            command.read([f"--{key}", str(value)])


def test_shard_keys_are_a_sharding() -> None:
    flags = ["--shard.offload", "optimizer=host,device_bytes=2GiB", "--shard.units", "A,B", "--shard.precision", "bf16"]
    shard = command.read(flags)[0].shard
    assert isinstance(shard, Sharding)
    assert (shard.offload.optimizer, shard.offload.device_bytes, shard.units) == ("host", 2 << 30, ["A", "B"])
    offload = "optimizer=host,device_bytes=2147483648"
    assert shard.as_config() == {"offload": offload, "units": "A,B", "precision": "bf16"}


FILES = [
    ("train: {stps: 3}", "'steps'"),
    ("trian: {steps: 3}", "'train'"),
    ("train: 3", "takes keys of its own"),
    ("train: [1", "is no YAML"),
    ("", "holds no keys"),
    ("model: {path: [3]}", "takes text"),
    ("train: {steps: null}", "train.steps"),
    ("shard: {strategy: null}", "strategy"),
    ("train: {steps: yes}", "train.steps"),
    ("3: {steps: 1}", "'3'"),
]


@pytest.mark.parametrize(("content", "expected"), FILES, ids=[content[:40] for content, _ in FILES])
def test_mistakes_in_a_file_are_named(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(UsageError) as error:
        command.read(["--config", str(file)])
    assert expected in str(error.value)


def test_unambiguous_numbers_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {steps: 1_000, lr: 0.01, seed: 0, clip: 0.5}\nrun: {dir: '007'}\n")
    train = command.read(["--config", str(file), "--data.path", "010"])[0].train
    assert (train.steps, train.lr, train.seed, train.clip) == (1000, 0.01, 0, 0.5)


def test_an_error_does_not_suggest_the_word_that_was_given() -> None:
    assert "did you mean" not in nearest("bf16", ["bf16", "xyz"])
    assert "did you mean 'bf16'?" in nearest("bf61", ["bf16", "xyz"])


def test_a_global_batch_is_divided_among_the_ranks() -> None:
    config = Config(train=TrainConfig(global_batch=48, micro_batch=4))
    named = {"train.global_batch", "train.micro_batch"}
    for ranks, accumulate in ((1, 12), (2, 6), (12, 1)):
        assert spread(config, named, ranks).train.accumulate == accumulate
    with pytest.raises(UsageError, match=r"48, which is no multiple of 5 ranks x train\.micro_batch 4"):
        spread(config, named, 5)
    with pytest.raises(UsageError, match=r"48, and train\.accumulate is given too"):
        spread(config, {*named, "train.accumulate"}, 2)
    by_file = Config(train=TrainConfig(global_batch=48, deepspeed="ds.json"))
    with pytest.raises(UsageError, match=r"48, and train\.deepspeed is given too"):
        spread(by_file, {"train.global_batch", "train.deepspeed"}, 2)
    assert spread(Config(), set(), 5) == Config()
