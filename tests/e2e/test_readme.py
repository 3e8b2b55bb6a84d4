"""Every command that the README shows is one that runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from accordion import cli
from tests.sample import sampled

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
COMMANDS = [line.split(" #")[0].strip() for line in BLOCKS.splitlines() if line.strip()]
INLINE = re.findall(r"`(torchrun [^`]*examples/[^`]*)`", README)


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
def test_flags_are_understood(command: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a line of text\n" * 100)
    words = [sys.executable, "-m", "accordion", *shlex.split(command)[1:], "--print_config"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "strategy" in done.stdout


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("accordion bench")])
def test_benchmarks_know_their_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*shlex.split(command)[1:], "--help"])
    assert "--rounds" in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(("accordion plan", "accordion checkpoint"))])
def test_other_commands_know_their_options(command: str) -> None:
    """They parse; what they do is tested beside what they run."""
    words = [sys.executable, "-m", "accordion", *shlex.split(command)[1:], "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


FEWER = [command.replace("--nproc-per-node 8", "--nproc-per-node 2") for command in INLINE]


@pytest.mark.parametrize("command", sampled([*dict.fromkeys(INLINE + FEWER)], FEWER.__contains__))
def test_examples_run(command: str) -> None:
    words = shlex.split(command)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "loss" in done.stdout or "full_shard" in done.stdout
