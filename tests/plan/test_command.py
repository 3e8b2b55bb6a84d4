"""`accordion plan` as people type it: flags, JSON, wrong input in one line."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import fields
from importlib import import_module

import pytest
from torch import nn

from accordion import cli
from accordion.plan.cli.command import Options
from accordion.plan.hardware import GPUS, gpu_named

NO_FOLDER = "/no-such-folder/page.html"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpu h1000", "nearest are h100"),
        ("--gpu mine --gpu-memory-gib 10", "--gpu-tflops, --gpu-bandwidth-gbps and --link-gbps"),
        ("--gpu", "'--gpu' is given no value"),
        ("--gpu= --gpus 8", "not in the table"),
        ("--model llama3-8x", "llama3-8b"),
        ("--model .", "no config.json"),
        ("--strategy full_shart", "full_shard"),
        ("--strategy", "given no value"),
        ("--checkpoint-activations every:0", "not understood"),
        ("--checkpoint-activations ful", "did you mean 'full'"),
        ("--micro-batch -1", "micro_batch is -1"),
        ("--micro-batch 0", "micro_batch is 0"),
        ("--micro-batch two", "takes a whole number"),
        ("--gpus 8 --nodes 3", "multiple of 3"),
        ("--gpus 0", "--gpus is 0"),
        ("--seq 99999999999999999999", "up to 1,000,000,000"),
        ("--seq 900000000", "900,000,000 tokens at a time"),
        ("--micro-batch 100000 --seq 100000", "fits no card"),
        ("--accumulate 9999999999", "up to 1,000,000,000"),
        ("--measure --gpus -3", "--gpus is -3"),
        ("--measure --gpus 0", "--gpus is 0"),
        ("--measure --gpus 999999", "is measured with 1 to"),
        ("--measure --measured-file .", "is a folder"),
        ("--gpu measured --measured-file README.md", "README.md holds no measured card"),
        ("--gpu measured --measured-file /no-such-folder/card", "no measured card at /no-such-folder/card"),
        ("--gpus 8.5", "takes a whole number"),
        ("--gpus 1000000000000", "1 to 65,536"),
        ("--gpus 1000000", "1 to 65,536"),
        ("--units Nonsense", "auto, blocks, min_params"),
        ("--nodes -2", "--nodes is -2"),
        ("--gpuss 8", "did you mean '--gpus'"),
        ("--micro_bach 8", "did you mean '--micro-batch'"),
        ("--jsn", "did you mean '--json'"),
        ("--json=yes", "takes no value"),
        ("-x", "belongs to no option"),
        ("llama3-8b", "belongs to no option"),
        ("--seq many", "--seq is 'many'"),
        ("--seq 0", "seq is 0"),
        ("--accumulate 0", "accumulate is 0"),
        ("--optimizer adam", "adamw"),
        ("--strategy full_shard --replicas 2", "take hybrid_shard"),
        ("--strategy hybrid_shard --replicas 3", "and divide them"),
        ("--strategy hybrid_shard --replicas 1", "more than one"),
        ("--engine fsdp3", "fsdp2"),
        ("--engine fsdp2 --strategy no_shard", "shard_grad_op"),
        ("--engine fsdp2 --offload all", "engine accordion"),
        ("--measured-step-s 1", "looks through several"),
        ("--measured-at full_shard,none,1,8", "pass measured_step_s"),
        ("--gpu none.json", "accordion plan --measure"),
        ("--precision fp8", "bf16, fp16, fp32"),
        ("--gpu-tflops -1", "positive"),
        ("--gpu-memory-gib nan", "positive"),
        ("--link-gbps inf", "positive"),
        ("--network-gbps 0", "positive"),
        (f"--html {NO_FOLDER}", "no folder"),
        ("--html .", "is a folder"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(capsys, words, said):
    assert cli.main(["plan", *words.split()]) == cli.BAD_INPUT
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert said in text


def test_every_flag_is_hyphened_and_told(capsys):
    assert cli.main(["plan", "--help"]) == 0
    said = capsys.readouterr().out
    for field in fields(Options):
        assert f"--{field.name.rstrip('_').replace('_', '-')}" in said
    assert "--json true" not in said
    assert "_gib" not in said.partition("options:")[2]


class ReachedError(Exception):
    """All flags were taken."""


WORDS = [
    "",
    "0",
    "-1",
    "1",
    "2",
    "8",
    "64",
    "7",
    "1e9",
    "nan",
    "inf",
    "-inf",
    "1.5",
    "none",
    "full",
    "every:2",
    "every:x",
    "all",
]
WORDS += [
    "full_shard",
    "hybrid_shard",
    "no_shard",
    "shard_optim",
    "fsdp2",
    "accordion",
    "bf16",
    "adamw",
    "h100",
    "b200",
    "mine",
]
WORDS += [
    "llama3-1b",
    "llama3-9b",
    "min_params:0",
    "a,b,c,d",
    "full_shard,full,1,8",
    "full_shard,full,0,8",
    "x,y,1,2",
    "/",
    ".",
    "\0",
]
WORDS += ["nowhere.json", "measured", "9" * 40, "--json", "--", "é"]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_flag_ends_in_a_traceback(capsys, monkeypatch, tmp_path, seed):
    """Flags and values as they come; what is wrong with them is told in one line before anything is traced."""

    def reached(*args: object, **kwargs: object) -> None:
        raise ReachedError

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    api = import_module("accordion.plan.api")
    monkeypatch.setattr(api, "trained_model", lambda config, where, kernels: nn.Linear(1, 1))
    for name in ("search", "calibrated"):
        monkeypatch.setattr(api, name, reached)
    draw = random.Random(seed)
    flags = [f"--{f.name.rstrip('_').replace('_', '-')}" for f in fields(Options) if f.name != "measure"]
    taken = 0
    for _ in range(120 if seed == 0 else 3000):
        words = ["plan"]
        for flag in draw.sample(flags, draw.randint(1, 4)):
            words += [flag, draw.choice(WORDS)] if draw.random() < 0.9 else [flag]
        try:
            code = cli.main(words)
        except ReachedError:
            taken += 1
            continue
        except BaseException as error:
            raise AssertionError(f"{words}: {error!r}") from error
        said = capsys.readouterr()
        assert code == 0 or (code == cli.BAD_INPUT and said.err.count("\n") == 1), (words, said.err)
    assert taken


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What a process prints: which modules it has before it draws, the table of cards, and whether it froze all as it ended."""
    asked = (
        "import atexit, gc, sys, accordion.plan.cli.command; "
        "print(*{'rich', 'plotly', 'transformers'} & set(sys.modules)); "
        "atexit.register(lambda: print(gc.get_freeze_count() > 100_000)); "  # runs after those to come
        "from accordion.cli import main; main(['plan', '--gpus-table'])"
    )
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def test_what_draws_on_the_screen_is_not_imported_for_json(lines):
    assert lines[0] == ""


@pytest.mark.parametrize(
    ("written", "name"), [("h100-80", "h100"), ("H100-80GB", "h100"), ("a100", "a100-80"), ("RTX-4090", "rtx4090")]
)
def test_cards_answer_to_the_names_that_people_write(written, name):
    assert gpu_named(written) is not None
    assert gpu_named(written).source == GPUS[name].source


def test_no_second_goes_into_a_last_garbage_collection(lines):
    assert lines[-1] == "True"
