"""`examples`: the programs on real data run on two ranks, as their docstrings say, and learn."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store

from accordion import cli
from accordion.train import launch
from tests.support import forked

pytest.importorskip("sklearn.datasets")  # imported here, and so by the ranks
EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def shown_by(capfd: pytest.CaptureFixture[str], pattern: str) -> float:
    """Return the number that `pattern` finds last in what was printed."""
    return float(re.findall(pattern, capfd.readouterr().out)[-1])


def test_digits_are_classified(capfd: pytest.CaptureFixture[str]) -> None:
    assert forked.script_under_torchrun(EXAMPLES / "digits.py", 2) == 0
    assert shown_by(capfd, r"held-out accuracy (\S+)%") >= 97


def towers(place: launch.RankPlace, store: Store) -> None:
    """Compare gradients with those of one process without sharding, in steps in which one rank has no image; then train."""
    dist.init_process_group()
    program = runpy.run_path(str(EXAMPLES / "two_towers.py"))
    train, _ = program["data"]()
    model = program["shard_towers"]()
    torch.manual_seed(0)
    plain = program["Towers"]()
    for step in range(3):
        batches = [program["batch_of"](train, step, rank, 2) for rank in range(2)]
        assert [len(images) for images, *_ in batches] == [48 * (step % 2), 48 * (1 - step % 2)]
        assert len(batches[0][1]) != len(batches[1][1])
        loss = program["loss_of"](model, *batches[dist.get_rank()])
        loss.backward()
        images, texts, *digits = (torch.cat(parts) for parts in zip(*batches, strict=True))
        expected = program["contrast"](*plain(images, texts), *digits)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        for (name, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), whole.grad, msg=name)
            param.grad = whole.grad = None
    assert program["train"](60) > 0.6
    dist.destroy_process_group()


def test_a_rank_without_images_does_not_stop_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    assert forked.start(towers, (), 2) == 0
    assert "0 images" in capfd.readouterr().out


def test_experts_learn_the_standard_library(capfd: pytest.CaptureFixture[str]) -> None:
    assert forked.script_under_torchrun(EXAMPLES / "mixture_of_experts.py", 2, "30") == 0
    assert shown_by(capfd, r"held-out loss (\S+),") < 3.5, "a uniform guess of a byte has 5.5"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own use of it
def test_chats_train_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run the commands in the docstring, with few texts and steps."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / "chat_lora.py").read_text()))
    assert docstring is not None
    commands = [shlex.split(line) for line in re.findall(r"^accordion .*(?:\n    .*)*", docstring, re.MULTILINE)]
    assert [command[1] for command in commands] == ["train", "export", "train", "generate"]
    few = ["--train.steps", "4", "--train.validation_rows", "4", "--launch.device", "cpu", "--launch.nproc", "2"]
    with forked.commands_in(tmp_path):
        monkeypatch.setattr("sys.argv", ["chat_lora.py", "chat"])
        runpy.run_path(str(EXAMPLES / "chat_lora.py"), run_name="__main__")
        for path in Path("chat").glob("*.jsonl"):
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:200]))
        for command in commands:
            more = {"train": [*few, *forked.UNTRACKED], "generate": ["--device", "cpu", "--max-new-tokens", "4"]}
            assert cli.main([*command[1:], *more.get(command[1], [])]) == 0
    shown = capfd.readouterr().out
    assert "What does numpy." in shown
    assert "Return" in shown[shown.index("⟦") :]
    first, last = (
        json.loads((tmp_path / "chat/run/metrics.jsonl").read_text().splitlines()[i])["loss"] for i in (0, -1)
    )
    assert last < first


def cells(place: launch.RankPlace, store: Store) -> None:
    """Run the notebook's code, and print the values that a notebook shows, pages included."""
    names = dict[str, Any]()
    for cell in json.loads((EXAMPLES / "first_step.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            *body, end = ast.parse("".join(cell["source"])).body
            shown = isinstance(end, ast.Expr)
            exec(compile(ast.Module(body if shown else [*body, end], []), "cell", "exec"), names)
            if isinstance(end, ast.Expr):
                value = eval(compile(ast.Expression(end.value), "cell", "eval"), names)
                print(getattr(value, "_repr_html_", value.__repr__)())


def test_the_notebook_draws_a_step(capfd: pytest.CaptureFixture[str]) -> None:
    assert forked.start(cells, (), 1) == 0
    shown = capfd.readouterr().out
    assert '<iframe srcdoc="&lt;!doctype html' in shown
    assert "Units that are full" in shown
    assert "2 steps on 1 ranks" in shown
    assert re.search(r"[5-9]\d\.\d% of 360 new images", shown)


def test_the_index_names_every_example() -> None:
    index = (EXAMPLES / "README.md").read_text()
    names = {
        p.relative_to(EXAMPLES).as_posix()
        for p in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb"), *EXAMPLES.glob("*/*.py")]
    }
    named = set(re.findall(r"\(([\w/]+\.(?:py|ipynb))\)", index))
    assert named == {name for name in names if not name.startswith(("migrate/", "integrations/", "clusters/"))}
    assert all(len((EXAMPLES / name).read_text().splitlines()) <= 120 for name in named if name.endswith(".py"))
