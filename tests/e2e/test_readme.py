"""Every command that the README shows is one that runs."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import Store

from accordion import cli
from accordion.train import launch
from tests import forked

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
COMMANDS = [line.split(" #")[0].strip() for line in BLOCKS.splitlines() if line.strip()]
INLINE = re.findall(r"`(torchrun [^`]*examples/[^`]*)`", README)


def exit_code(words: list[str]) -> int:
    try:
        return cli.main(words)
    except SystemExit as error:
        return int(error.code or 0)


def test_the_commands_are_these() -> None:
    """A command that somebody adds needs a way to be checked below."""
    assert {shlex.split(c)[0] for c in COMMANDS} == {"make", "accordion"}
    assert len(INLINE) == 2


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_targets_exist(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("accordion train" if "train" in command else "pytest") in done.stdout


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("accordion train")])
def test_flags_are_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("a line of text\n" * 100)
    monkeypatch.chdir(tmp_path)
    assert exit_code([*shlex.split(command)[1:], "--print_config"]) == 0
    assert "strategy" in capsys.readouterr().out


SAID = {"plan": "--json", "checkpoint": "--json", "bench": "--rounds"}


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(tuple(f"accordion {name}" for name in SAID))])
def test_other_commands_know_their_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They parse; what they do is tested beside what they run."""
    words = shlex.split(command)[1:]
    assert exit_code([*words, "--help"]) == 0
    assert SAID[words[0]] in capsys.readouterr().out


FEWER = [command.replace("--nproc-per-node 8", "--nproc-per-node 2") for command in INLINE]


def example(place: launch.Place, store: Store, path: str) -> None:
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("command", FEWER)
def test_examples_run_in_ranks(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert forked.start(example, (str(ROOT / shlex.split(command)[-1]),), 2) == 0
    said = capfd.readouterr().out
    assert "loss" in said or "full_shard" in said


@pytest.mark.slow
@pytest.mark.parametrize("command", [*dict.fromkeys(INLINE + FEWER)])
def test_examples_run(command: str) -> None:
    words = shlex.split(command)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "loss" in done.stdout or "full_shard" in done.stdout
