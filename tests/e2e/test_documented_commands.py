"""Every command in the README, the guide and two other pages runs, or exists with the options that it is given."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import checkpoint, gpu, streams
from torch.distributed import Store

from accordion import cli
from accordion.checkpoint import save
from accordion.train import launch
from tests.gpu import test_grid
from tests.support import forked, language_folders
from tests.support.sample import sampled

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "guide.md", ROOT / "docs" / "strategies.md"]
README = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
GPU_RUN = (ROOT / "docs" / "first-gpu-run.md").read_text(encoding="utf-8")


def commands_in(page: str) -> list[str]:
    """Return the commands in the shell blocks of `page`, without comments."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    return [*dict.fromkeys(line.split(" #")[0].strip() for line in lines if line.strip())]


COMMANDS, GPU_COMMANDS = commands_in(README), commands_in(GPU_RUN)
INLINE = [*dict.fromkeys(re.findall(r"`(torchrun [^`]*examples/[^`]*)`", README))]


def words_of(command: str) -> list[str]:
    """Return the words of `command` without variables that are set before it."""
    return [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]


def gpu_commands(*start: str) -> list[str]:
    return [command for command in GPU_COMMANDS if words_of(command)[: len(start)] == list(start)]


def exit_code(words: list[str]) -> int:
    try:
        return cli.main(words)
    except SystemExit as error:
        return int(error.code or 0)


def test_the_commands_are_these() -> None:
    """A command that somebody adds needs a way to be checked below."""
    assert {shlex.split(c)[0] for c in COMMANDS} == {"make", "accordion"}
    assert len(INLINE) == 6


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_targets_exist(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("accordion train" if "train" in command else "pytest") in done.stdout


@pytest.mark.parametrize("command", [*gpu_commands("accordion"), *(c for c in COMMANDS if c.startswith("accordion"))])
def test_options_of_each_command_parse(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("a line of text\n" * 100)
    monkeypatch.chdir(tmp_path)
    name, *words = words_of(command)[1:]
    assert exit_code([name, *words, "--print_config" if name == "train" else "--help"]) == 0
    shown = capsys.readouterr().out
    assert ("strategy" if name == "train" else f"usage: accordion {name} ") in shown
    assert name == "train" or all(word in shown for word in words if word.startswith("--")), "those of train are parsed"


# -- what they do, with the words of the README and small sizes behind them

SMALL_RUN = (
    "--model.preset llama-tiny --data.seq_len 16 --train.micro_batch 1 --train.warmup 0 --launch.device cpu "
    "--run.dir runs/mine"
)
SMALL = {
    "accordion train": f"{SMALL_RUN} --data.path notes.txt --train.steps 2",
    "accordion train --print_config": "",
    "accordion train --data.path notes.txt --train.steps 50": f"{SMALL_RUN} --launch.nproc 1",
    "accordion generate": "--device cpu --max-new-tokens 4",
    "accordion export": "",
    "accordion plan": "",
    "accordion checkpoint": "",
    "accordion doctor": "--device cpu",
    "accordion bench": "--model gpt-tiny --nproc 2 --device cpu --rounds 1",
    "accordion bench host": "--rounds 1",
    "accordion bench memory": "--model gpt-tiny --device cpu",
}
SHOWS = {
    "accordion train": "runs/mine",
    "accordion train --print_config": "strategy",
    "accordion generate": "",
    "accordion export": "written: ",
    "accordion plan": "llama3-8b",
    "accordion checkpoint verify": "is as it was written, every byte",
    "accordion checkpoint inspect": "model/weight",
    "accordion doctor": "ranks",
    "accordion bench": "written: ",
}
QUICK = ("--print_config", "accordion checkpoint", "accordion generate", "accordion export")  # others take seconds each
WHOLE = [command for command in COMMANDS if command.startswith("accordion")]


def longest(table: dict[str, str], command: str) -> str:
    """Return the value in `table` for the longest beginning of `command`."""
    return table[max((key for key in table if command.startswith(key)), key=len)]


@pytest.mark.parametrize("command", sampled(WHOLE, lambda command: any(words in command for words in QUICK)))
def test_commands_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All that the README says to type after `accordion`, word for word."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "notes.txt").write_text("a line of text\n" * 2000)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if command.startswith(("accordion generate", "accordion train")):
        monkeypatch.setattr(launch, "start", forked.start)
    if command.startswith(("accordion generate", "accordion export")):
        language_folders.run(Path("runs/mine"))
    elif "runs/mine/checkpoints" in command:
        save("runs/mine/checkpoints/step-000100", torch.nn.Linear(4, 4), extra={"step": 100})
    assert exit_code([*shlex.split(command)[1:], *longest(SMALL, command).split()]) == 0
    assert longest(SHOWS, command) in capfd.readouterr().out


def example(place: launch.RankPlace, store: Store, *words: str) -> None:
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")


@pytest.mark.parametrize("command", INLINE)
def test_examples_run_in_ranks(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if "low_bit_adam" in command or "float8" in command:
        pytest.importorskip("torchao")
    words = shlex.split(command.replace("FOLDER", str(tmp_path)).partition(" examples/")[2])
    assert forked.start(example, (str(ROOT / "examples" / words[0]), *words[1:]), 2) == 0
    said = capfd.readouterr().out
    assert "loss" in said or "full_shard" in said


# -- docs/first-gpu-run.md

SCRIPTS = {
    "benchmarks/checkpoint.py": checkpoint.run,
    "benchmarks/gpu.py": gpu.run,
    "benchmarks/streams.py": streams.run,
}


def test_there_are_ten_commands_with_numbers_each_checked_below() -> None:
    assert len(GPU_COMMANDS) == 10
    assert re.findall(r"^\*\*(\d+)\.", GPU_RUN, re.MULTILINE) == [str(n + 1) for n in range(10)]
    starts = [("accordion",), ("torchrun",), ("python", "-m", "pytest", "tests/gpu"), *(("python", s) for s in SCRIPTS)]
    assert sorted(command for start in starts for command in gpu_commands(*start)) == sorted(GPU_COMMANDS)
    assert "docs/first-gpu-run.md" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_of_scripts_are_understood(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"], SCRIPTS[script]) == 0
    shown, commands = capsys.readouterr().out, gpu_commands("python", script)
    assert commands
    assert all(word in shown for command in commands for word in words_of(command) if word.startswith("--"))


def test_programs_and_tests_of_the_gpu_run_exist() -> None:
    for command in gpu_commands("torchrun"):
        assert (ROOT / words_of(command)[-1]).is_file()
    for command in gpu_commands("python", "-m"):
        *words, part = words_of(command)
        assert words == ["python", "-m", "pytest", "tests/gpu", "-k"]
        assert any(part in name for name in vars(test_grid) if name.startswith("test_"))
