"""Every command of docs/first-gpu-run.md is one that exists, with the options that it is given."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from benchmarks import checkpoint, gpu, streams

from accordion import cli
from tests.gpu import test_grid

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "benchmarks/checkpoint.py": checkpoint.run,
    "benchmarks/gpu.py": gpu.run,
    "benchmarks/streams.py": streams.run,
}
PAGE = (ROOT / "docs" / "first-gpu-run.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def words_of(command: str) -> list[str]:
    """Without variables that are set before it."""
    return [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]


def of(*start: str) -> list[str]:
    return [command for command in COMMANDS if words_of(command)[: len(start)] == list(start)]


def test_there_are_ten_each_with_its_number_and_a_way_to_be_checked():
    assert len(COMMANDS) == 10
    assert re.findall(r"^\*\*(\d+)\.", PAGE, re.MULTILINE) == [str(n + 1) for n in range(10)]
    checked = [*of("accordion"), *of("torchrun"), *of("python", "-m", "pytest", "tests/gpu")]
    checked += [command for script in SCRIPTS for command in of("python", script)]
    assert sorted(checked) == sorted(COMMANDS)
    assert "docs/first-gpu-run.md" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", of("accordion"))
def test_options_are_understood(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = words_of(command)[1:]
    with pytest.raises(SystemExit, match="0"):
        raise SystemExit(cli.main([*words, "--print_config" if words[0] == "train" else "--help"]))
    said = capsys.readouterr().out
    flags = [word for word in words if word.startswith("--")]
    assert said
    assert words[0] == "train" or all(flag in said for flag in flags), "those of train are parsed"


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_of_the_scripts_are_understood(script, capsys):
    assert cli.main(["--help"], SCRIPTS[script]) == 0
    said = capsys.readouterr().out
    assert of("python", script)
    assert all(word in said for command in of("python", script) for word in words_of(command) if word.startswith("--"))


@pytest.mark.parametrize("command", of("torchrun"))
def test_programs_are_there(command):
    assert (ROOT / words_of(command)[-1]).is_file()


@pytest.mark.parametrize("command", of("python", "-m"))
def test_tests_are_found(command: str) -> None:
    *words, part = words_of(command)
    assert words == ["python", "-m", "pytest", "tests/gpu", "-k"]
    assert any(part in name for name in vars(test_grid) if name.startswith("test_"))
