"""Every subcommand tells what is wrong with its input in one line on stderr, which begins with the program's name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from accordion import cli
from accordion.bench.command import JOBS as BENCHES
from accordion.checkpoint.command import JOBS as LOOKS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
NOWHERE = "nowhere/at/all"
MORE = {"convert": ["written"]}
MODELS = ("", "memory")  # subcommands of bench that take one
INPUTS = [
    ["nonsense"],
    ["--nonsense"],
    ["train", "--nonsense", "1"],
    ["train", "extra"],
    ["train", "--data.path", NOWHERE],
    ["train", "--config", NOWHERE],
    ["train", "--model.path", NOWHERE],
    ["train", "--train.steps", "many"],
    ["train", "--deepspeed", NOWHERE],
    ["run", "--nproc", "2"],
    ["run", "--nonsense", "1", "program.py"],
    ["run", "--nnodes", "1", "-m"],
    ["doctor", "--nonsense"],
    ["doctor", "extra"],
    ["doctor", "--dir", NOWHERE],
    ["doctor", "--dir", ""],
    ["doctor", "--device", "abacus"],
    ["generate", "--nonsense"],
    ["generate", NOWHERE, "--prompt", "text"],
    ["generate", NOWHERE, "--prompts", NOWHERE],
    ["generate", "--prompt", "text"],
    ["generate", NOWHERE, "extra", "--prompt", "text"],
    ["export"],
    ["export", NOWHERE],
    ["export", NOWHERE, "written"],
    ["export", NOWHERE, "written", "--nonsense"],
    ["export", NOWHERE, "written", "--format", "tar"],
    ["checkpoint", "export", NOWHERE, "written"],
    ["plan", "--nonsense"],
    ["plan", "extra"],
    ["plan", "--model", NOWHERE],
    ["plan", "--gpus", "many"],
    ["plan", "--gpu", "nothing"],
    ["checkpoint", "nonsense"],
    *(["checkpoint", name, NOWHERE, *MORE.get(name, [])] for name in LOOKS),
    *(["checkpoint", name, NOWHERE, *MORE.get(name, []), "--nonsense"] for name in LOOKS),
    *(["checkpoint", name] for name in LOOKS),
    ["bench", "nonsense"],
    *(["bench", *name.split(), "--nonsense"] for name in BENCHES),
    *(["bench", *name.split(), "--rounds", "many"] for name in BENCHES),
    *(["bench", name, "extra"] for name in BENCHES if name),
    *(["bench", *name.split(), "--model", NOWHERE] for name in MODELS),
]


@pytest.mark.parametrize("words", INPUTS, ids=" ".join)
def test_bad_input_is_told_in_one_line(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) in (1, cli.BAD_INPUT)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("accordion: ")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"]], ids=" ".join)
def test_help_imports_no_torch(words: list[str]) -> None:
    code = f"import sys; from accordion import cli; cli.main({words}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: accordion" in done.stdout
