"""`accordion plan` on the command line: flags, JSON, the screen, and wrong input, which is reported in one line."""

from __future__ import annotations

import json
import random
import re
from dataclasses import fields, replace
from importlib import import_module
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accordion as acc
from accordion import cli
from accordion.pages.show import show
from accordion.plan.cli import command
from accordion.plan.cli.command import Options
from accordion.plan.cli.pages import of_plan
from accordion.plan.hardware import GIB, GPUS, OUTSIDE_BYTES, gpu_named
from accordion.plan.result import Plan
from accordion.tasks.loaded import LoadedTask, example_of
from tests.plan import builders
from tests.plan.builders import ONE_CHOICE, config_in, planned, total
from tests.support.processes import run_python


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpu h1000", "nearest are h100"),
        ("--gpu mine,memory_gib=10", "memory_gib=80,tflops=900,bandwidth_gbps=3000,link_gbps=400"),
        ("--gpu", "--gpu: expected one argument"),
        ("--gpu= --gpus 8", "not in the table"),
        ("--gpu h100,memory=80", "memory_gib"),
        ("--gpu h100,tflops=many", "which is no number"),
        ("--gpu h100,tflops=-1", "positive"),
        ("--gpu h100,memory_gib=nan", "positive"),
        ("--gpu h100,link_gbps=inf", "positive"),
        ("--gpu h100,network_gbps=0", "positive"),
        ("--model llama3-8x", "llama3-8b"),
        ("--model .", "no config.json"),
        ("--strategy full_shart", "full_shard"),
        ("--sharding reduce_up=sum", "did you mean 'reduce_op'"),
        ("--sharding secondary=0", "leave secondary out"),
        ("--strategy full_shard --sharding secondary=3", "pass how many of the 8 ranks that shard keep one copy"),
        ("--strategy no_shard --sharding secondary=2", "take full_shard or hybrid_shard"),
        ("--checkpoint-activations every:0", "not understood"),
        ("--checkpoint-activations ful", "did you mean 'full'"),
        ("--micro-batch -1", "micro_batch is -1"),
        ("--reserve-gb 80", "not between 0 and the 79.1 GiB"),
        ("--reserve-gb=-1", "not between 0"),
        ("--gpus 0", "it takes 1 to 65,536"),
        ("--gpus=-2x8", "2x8 (nodes)"),
        ("--gpus 8.5", "8,16,32"),
        ("--gpus 1000000", "1 to 65,536"),
        ("--seq 99999999999999999999", "up to 1,000,000,000"),
        ("--seq 900000000", "900,000,000 tokens; it takes up to"),
        ("--micro-batch 100000 --seq 100000", "no GPU holds more"),
        ("--accumulate 9999999999", "up to 1,000,000,000"),
        ("--units Nonsense", "auto, blocks or min_params"),
        ("--micro_bach 8", "did you mean '--micro-batch'"),
        ("--jsn", "did you mean '--json'"),
        ("--json=yes", "ignored explicit argument"),
        ("llama3-8b", "belongs to no option"),
        ("--seq many", "--seq is 'many'; it takes a whole number"),
        ("--seq 0", "seq is 0"),
        ("--accumulate 0", "accumulate is 0"),
        ("--optimizer adam", "adamw"),
        ("--lora 16,base=nf4", "--quantize nf4"),
        ("--quantize nf3 --lora 16", "quantize 'nf3' is unknown; did you mean 'nf4'?"),
        ("--lora 99999", "lora_rank is 99999"),
        ("--strategy full_shard --replicas 2", "take hybrid_shard"),
        ("--strategy hybrid_shard --replicas 3", "and divide them"),
        ("--strategy hybrid_shard --replicas 1", "more than one"),
        ("--engine fsdp3", "fsdp2"),
        ("--engine fsdp2 --strategy no_shard", "shard_grad_op"),
        ("--engine fsdp2 --offload optimizer=host", "engine accordion"),
        ("--offload all", "write optimizer=host"),
        ("--offload params=host", "is not planned"),
        ("--precision fp8", "bf16"),
        ("--precision bf16,reduce=fp16", "bf16,reduce=bf16"),
    ],
)
def test_bad_input_gives_one_line_that_says_what_to_do(capsys, words, message):
    assert cli.main(["plan", *words.split()]) == cli.BAD_INPUT
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert message in text


def test_help_lists_every_flag_with_hyphens(capsys):
    assert cli.main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    for field in fields(Options):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "--json true" not in text


class ReachedError(Exception):
    """Raised in place of planning: all flags were accepted."""


WORDS = (
    " 0 -1 1 2 8 64 7 1e9 nan inf -inf 1.5 none full every:2 every:x optimizer=host params=host activations=disk:/x "
    "full_shard hybrid_shard no_shard shard_optim fsdp2 accordion bf16 adamw h100 b200 mine h100,tflops=500 2x8 8,16 "
    "llama3-1b llama3-9b min_params:0 a,b,c,d / . \0 "
    f"nowhere.json measured {'9' * 40} --json -- é secondary=4"
).split(" ")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_flag_ends_in_a_traceback(capsys, monkeypatch, seed):
    """Random flags and values: what is wrong with them is reported in one line before anything is traced."""

    workload = import_module("accordion.plan.workload")
    monkeypatch.setattr(workload, "trained_model", lambda config, where, kernels: nn.Linear(1, 1))
    api = import_module("accordion.plan.api")
    monkeypatch.setattr(api, "search_in", mock.Mock(side_effect=ReachedError))
    draw = random.Random(seed)
    flags = [f"--{f.name.replace('_', '-')}" for f in fields(Options)]
    taken = 0
    for _ in range(400 if seed == 0 else 3000):
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
        output = capsys.readouterr()
        assert code == 0 or (code == cli.BAD_INPUT and output.err.count("\n") == 1), (words, output.err)
    assert taken


@pytest.mark.parametrize(
    ("written", "name"), [("h100-80", "h100"), ("H100-80GB", "h100"), ("a100", "a100-80"), ("RTX-4090", "rtx4090")]
)
def test_a_gpu_is_found_by_its_common_names(written, name):
    assert gpu_named(written).source == GPUS[name].source


def test_the_process_ends_without_a_garbage_collection():
    # Python calls this function after those that the command registers.
    program = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 100_000)); "
    program += "from accordion.cli import main; main(['plan', '--gpu', 'x'])"
    assert run_python("-c", program).stdout.splitlines()[-1] == "True"


def test_a_cached_plan_is_read_and_a_broken_file_is_not(capsys, monkeypatch, tmp_path):
    """Equal output without a trace, until an option, the configuration or a version changes. Only one plan is really made."""
    plain, answers = command.planned, list[Plan]()

    def once(o: Options, own: list[str]) -> Plan:
        answers.append(answers[0] if answers else plain(o, own))
        return answers[-1]

    monkeypatch.setattr(command, "planned", once)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config_in(tmp_path)

    def printed(*more: str) -> tuple[object, bool]:
        """Return (the printed data, True if the command made a plan for it)."""
        before = len(answers)
        return json.loads(builders.command(capsys, tmp_path, "--json", *more)), len(answers) > before

    first, is_planned = printed()
    assert is_planned
    assert printed() == (first, False)
    assert printed("--seq", "32")[1]
    for text in ("{", "[]", "[1, 2]", "{}"):
        for file in (tmp_path / "cache" / "accordion" / "plans").iterdir():
            file.write_text(text)
        assert printed() == (first, True)
    config_in(tmp_path, vocab_size=1024)
    assert printed()[1]
    monkeypatch.setattr(command, "version", lambda name: "9.9")
    assert printed()[1]


def test_memory_of_an_inference_engine_is_reserved(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config_in(tmp_path)
    reserved = json.loads(builders.command(capsys, tmp_path, "--reserve-gb", "24", "--json"))
    left, free = GPUS["h100"].memory_gib * GIB - 24 * GIB, reserved["free_bytes"]
    assert reserved["hardware"]["memory_bytes"] == pytest.approx(left, abs=1)
    assert free["step"] < free["not parked"] < free["parked"] == reserved["hardware"]["memory_bytes"] - OUTSIDE_BYTES
    text = builders.command(capsys, tmp_path, "--reserve-gb", "24")
    assert "free beside the inference engine" in text
    assert f"{free['step'] / GIB:.1f}" in text
    # The search takes nothing that needs what is reserved: with a little less free, no configuration fits.
    least = (free["step"] + 2**20) / GIB + 24
    crowded = json.loads(builders.command(capsys, tmp_path, "--json", "--reserve-gb", str(least), code=1))
    assert crowded["verdict"] == "does not fit"
    assert crowded["free_bytes"]["step"] < 0


def test_the_page_draws_the_planned_step(capsys, monkeypatch, tmp_path):
    """The curve's peak is the plan's, and the streams are as long as its step."""
    page = tmp_path / "plan.html"
    data = json.loads(builders.command(capsys, config_in(tmp_path), "--html", str(page), "--json"))
    drawn = json.loads(re.search(r'id="trace">(.*)</script>', page.read_text())[1])["ranks"][0]
    assert sum(drawn["between"]) + max(sum(point[1:]) for point in drawn["memory"]) == data["peak_allocated_bytes"]
    assert drawn["steps"][0][1] == pytest.approx(data["step_s"] * 1e6, rel=1e-3, abs=1)
    assert {"forward", "backward", "optimizer", "gather", "reduce"} <= set(drawn["kinds"])


# -- the screen


@pytest.fixture(scope="module")
def plan():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)])
    fixed = {**ONE_CHOICE, "units": None, "offload": None}
    return planned(model, total, torch.randn(4096, 256), **fixed)


def test_the_page_shows_what_its_figures_hold_for_and_marks_lower_bounds(plan, capsys):
    best = plan.found.best
    bounds = [replace(best, fits=False, memory=None, steps=None, least_bytes=n, bound="no") for n in (12 << 30, 0)]
    found = replace(plan.found, candidates=[best, *bounds])
    show(of_plan(replace(plan, found=found, task=replace(plan.task, vocab=512))))
    page = capsys.readouterr().out
    for text in (
        "sequence length 4,096, loss plain, computed in bfloat16, reduced in ",
        ", 1 node of 2 GPUs",
        "host memory: 2 TiB a node of 8, the usual one; host_memory_gib changes it",
        "batches/s per GPU",
        "over 12.0",
    ):
        assert text in page
    assert " 0.0 " not in page


def test_a_small_models_bytes_are_shown_with_enough_digits(plan):
    table = next(t for t in of_plan(plan).tables if t.title.startswith("where the bytes go"))
    shown = {row[0]: float(row[1]) for row in table.rows}
    assert all(shown[key] > 0 for key in ("parameters", "optimizer", "activations", "all"))
    assert sum(shown.values()) == pytest.approx(2 * shown["all"], abs=0.004)


@pytest.mark.parametrize("data", [[], DataLoader([])], ids=["samples", "loader"])
def test_a_task_without_a_sample_is_one_sentence(data: object) -> None:
    task = LoadedTask(name="mine", model=nn.Identity, dataset=lambda split: data, loss=lambda model, batch: batch)
    with pytest.raises(acc.UsageError, match="'mine' has no sample"):
        example_of(task, 2)
