"""Bad input ends in one line on stderr and exit code 2, before any rank starts and with nothing written but the cache."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as safetensors_of
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig

from accordion import cli, errors
from accordion.checkpoint import save
from accordion.tasks.classes import target_of
from accordion.train import command, launch
from accordion.train.config import Config, DataConfig, ModelConfig, flat
from accordion.train.model import configuration
from tests.support import language_folders
from tests.support.refused import refused

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SMALL = ["--model.preset", "llama-tiny", "--data.path", "corpus", "--data.seq_len", "16", "--train.micro_batch", "2"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a small corpus, and a cache of its own."""
    (tmp_path / "work" / "corpus").mkdir(parents=True)
    for i in range(30):
        (tmp_path / "work" / "corpus" / f"{i}.txt").write_text(f"document {i} says {i * i} times nothing\n" * 9)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # a task's folder is added
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # next to the file of a task
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return tmp_path / "work"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the numbers of ranks that were to be started; start none."""
    asked: list[int] = []
    monkeypatch.setattr(launch, "start", lambda entry, args, nproc, signals: asked.append(nproc) or 0)
    return asked


def tree(folder: Path) -> dict[str, float]:
    """Return the files of `folder` without caches, of tokens for the next try and of Python."""
    caches = {"cache", "__pycache__"}
    return {str(path): path.lstat().st_mtime for path in folder.rglob("*") if not caches & set(path.parts)}


Make = Callable[[Path], list[str]]
"""Prepares the working directory, and returns the words of a command line."""
PIPE = object()  # a content that nobody writes


def nothing(place: Path) -> list[str]:
    return []


def words(line: str) -> Make:
    return lambda place: line.split()


def files(contents: dict[str, Any], *given: str, make: Make = nothing) -> Make:
    """Call `make`, and then write or replace files (path -> text, bytes or `PIPE`)."""

    def write(place: Path) -> list[str]:
        before = make(place)
        for name, content in contents.items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            if content is PIPE:
                os.mkfifo(path)
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return [*before, *given]

    return write


def rows(content: str, *more: str) -> Make:
    return files({"rows.jsonl": content}, "--data.path", "rows.jsonl", *more)


def model(contents: dict[str, Any], *more: str) -> Make:
    return files({f"model/{name}": content for name, content in contents.items()}, "--model.path", "model", *more)


def described(**changes: object) -> str:
    config = {"model_type": "llama", "vocab_size": 1024, "hidden_size": 32, "num_hidden_layers": 1, "eos_token_id": 0}
    return json.dumps(
        {**config, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64, **changes}
    )


def pretrained(contents: dict[str, Any]) -> Make:
    return model({"config.json": described(), **contents}, "--model.init", "pretrained")


def no_tokenizer(place: Path) -> list[str]:
    given = pretrained({})(place)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place / "model")).save_pretrained(place / "model")
    return given


ONE = safetensors_of({"a": torch.zeros(1)})
STEP = "ckpts/step-000005"
TALK = {"messages": [{"role": "user", "content": "add 3"}, {"role": "assistant", "content": "so it is"}]}
TALKS = f"{json.dumps(TALK)}\n" * 40


def checkpoint(preset: str = "llama-tiny", **changes: object) -> Make:
    def make(place: Path) -> list[str]:
        model = AutoModelForCausalLM.from_config(configuration(ModelConfig(preset=preset), DataConfig()))
        extra = {"step": 5, "tokenizer": "other", "config": flat(Config()), **changes}
        save(place / STEP, model, extra=extra)
        return ["--checkpoint.dir", "ckpts"]

    return make


def resumed(path: str, make: Make = nothing, manifest: object = None) -> Make:
    contents = {} if manifest is None else {f"{STEP}/manifest.json": manifest}
    return files(contents, "--checkpoint.resume", path, make=make)


def foreign(place: Path) -> list[str]:
    save(place / STEP, torch.nn.Linear(2, 2), extra=None)
    return []


def chat(more: str = "", content: str = TALKS, folder: str = "base") -> Make:
    """`folder`: a Llama (base), one without a chat template (plain), or a model that takes no position ids (bloom)."""

    def make(place: Path) -> list[str]:
        if folder == "bloom":
            BloomConfig(vocab_size=400, hidden_size=8, n_layer=1, n_head=1).save_pretrained(place / folder)
        else:
            language_folders.llama(place / folder)
        if folder == "plain":
            (place / folder / "chat_template.jinja").unlink()
        return rows(content, "--data.format", "chat", "--model.path", folder, *more.split())(place)

    return make


TASK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Task:
    def __init__(self, width: int = 8, name: str = "a", deep: bool = False, rate: float | None = None):
        self.width = width
    def model(self):
        return nn.Linear(4, self.width)
    def dataset(self, split):
        return TensorDataset(torch.randn(50, 4)) if split == "train" else None
    def loss(self, model, batch):
        return model(batch[0]).square().mean()
"""


def changed(old: str, new: str) -> str:
    assert old in TASK
    return TASK.replace(old, new)


DATA = 'TensorDataset(torch.randn(50, 4)) if split == "train" else None'
LOSS = "model(batch[0]).square().mean()"
# content of mine.py, flags, and what the error says
OF_TASKS = {
    "no file": ("", ["--task", "nothing.py"], "task 'nothing.py' does not exist"),
    "no class": (TASK, ["--task", "mine.py:Tsk"], "there is no 'Tsk' in mine.py; did you mean 'Task'?"),
    "no package": (TASK, ["--task", "no_such:Task"], "there is no module 'no_such'"),
    "no name": (TASK, ["--task", "Task"], "names no class; write file.py"),
    "a function": (changed("class Task:", "def f(): pass\nclass Task:"), ["--task", "mine.py:f"], "is no class"),
    "no such option": (TASK, ["--task.widht", "3"], "did you mean '--task.width'?"),
    "an option's type": (TASK, ["--task.width", "wide"], "it takes a whole number"),
    "a required option": (changed("width: int = 8", "width: int"), [], "needs 'width', which has no default"),
    "an option that is no text": (changed("width: int = 8", "width: list"), [], "needs 'width', which is no number"),
    "a sequence": (TASK, ["--shard.sequence", "2"], "shard.sequence is 2, but this run trains a task"),
    "no loss": (changed("def loss", "def lose"), [], "Task is no task: it has no method loss(model, batch)"),
    "no model": (changed("nn.Linear(4, self.width)", "None"), [], "model() returned a NoneType"),
    "a frozen model": (changed("self.width)", "self.width).requires_grad_(False)"), [], "nothing would be trained"),
    "no data": (changed(DATA, "None"), [], "has no training data"),
    "empty data": (changed("randn(50, 4)", "randn(0, 4)"), [], "without a sample"),
    "too little data": (changed("randn(50, 4)", "randn(15, 4)"), [], "one step takes 16 samples"),
    "data of no kind": (changed(DATA, "3"), [], "returned a int; it must return a dataset"),
    "a loader for all ranks": (
        changed(DATA, "DataLoader(torch.randn(50, 4), shuffle=True)"),
        [],
        "read the same samples",
    ),
    "an iterable that is short": (changed(DATA, "iter([torch.ones(4)] * 9)"), [], "has no batch, or less than a step"),
    "a loss that is no number": (changed(LOSS, "model(batch[0])"), [], "is a tensor of shape (8, 8)"),
    "a loss that is no tensor": (changed(LOSS, "3.0"), [], "loss is a float"),
    "a loss of nothing": (changed(LOSS, "torch.zeros(())"), [], "does not depend on a parameter"),
    "no such unit": (TASK, ["--shard.units", "Linaer"], "Linear"),
    "an unused rate": (
        TASK,
        ["--optimizer", "torch.optim.SGD", "--train.lr", "0.5"],
        "no effect with your own optimizer",
    ),
    "no such optimizer option": (TASK, ["--optimizer", "torch.optim.SGD", "--optimizer.momentun", "1"], "momentum"),
    "no such optimizer": (TASK, ["--optimizer", "torch.optim.SDG"], "did you mean 'SGD'?"),
}


def task(content: str, flags: list[str]) -> Make:
    return files({"mine.py": content}, *([] if "--task" in flags else ["--task", "mine.py"]), *flags)


CASES = {
    "misspelt help": (words("--hlep"), "did you mean '--help'?"),
    "no flag": (words("train.steps=3"), "'train.steps=3' belongs to no option; did you mean '--train.steps'?"),
    "run file without --config": (words("run.yaml"), "'run.yaml' follows no option; a run file is given as --config"),
    "checkpoints on remote storage": (words("--checkpoint.dir s3://bucket/run"), "'s3://bucket/run', a URL"),
    "run file that is a pipe": (files({"run.yaml": PIPE}, "--config", "run.yaml"), "'run.yaml' is no regular file"),
    "config that is a pipe": (model({"config.json": PIPE}), "config.json cannot be read: [Errno 22] no regular file"),
    "data that is a pipe": (files({"lines.txt": PIPE}, "--data.path", "lines.txt"), "is no regular file"),
    "manifest that is a pipe": (resumed(STEP, checkpoint(), manifest=PIPE), "is no checkpoint: it has no manifest"),
    "cache that cannot be made": (files({"../cache": ""}), "cache/accordion/tokenizers: Not a directory"),
    "no text at all": (rows("\n"), "has no text"),
    "sequence longer than the data": (words("--data.seq_len 4096"), "than a row of data.seq_len 4096 tokens takes"),
    "step larger than the data": (words("--train.micro_batch 4000"), "one step takes 8000"),
    "replicas do not divide": (words("--shard.strategy hybrid_shard --shard.replicas 3"), "does not divide the 2"),
    "sequence does not divide": (words("--shard.sequence 3 --data.seq_len 18"), "does not divide the 2 ranks"),
    "tokens are not divisible": (words("--shard.sequence 2 --data.seq_len 17"), "data.seq_len is 17, which"),
    "heads are not divisible": (words("--shard.sequence 8 --launch.nproc 8"), "2 attention heads cannot be divided"),
    "no such class": (words("--shard.units LlamaDecoderLayr"), "'LlamaDecoderLayer'"),
    "no folder": (words("--model.path model"), "is no folder"),
    "no config": (model({"readme": "hi"}), "its config.json cannot be read"),
    "config of nothing": (model({"config.json": "{}"}), "no model_type"),
    "unknown architecture": (model({"config.json": '{"model_type": "nope", "vocab_size": 99}'}), "is no model"),
    "no language model": (model({"config.json": '{"model_type": "vit"}'}), "is no language model"),
    "encoder only": (model({"config.json": '{"model_type": "t5", "vocab_size": 1024}'}), "no causal language model"),
    "an encoder": (model({"config.json": described(model_type="bert")}), "is an encoder (bert) without a causal mask"),
    "impossible config": (model({"config.json": described(hidden_size=-1)}), "no"),
    "positions": (model({"config.json": described(max_position_embeddings=8)}), "longer than the 8 positions"),
    "no weights": (pretrained({}), "has neither model.safetensors nor"),
    "weights of another": (pretrained({"model.safetensors": ONE}), "12 missing in the folder: model.embed_tokens."),
    "no tokenizer": (no_tokenizer, "has no tokenizer, which its pretrained weights need"),
    "tokenizer of another": (model({"config.json": described(), "tokenizer.json": "{}"}), "no tokenizer"),
    "checkpoint of another model": (checkpoint("llama-10m"), "of another model"),
    "checkpoint of another tokenizer": (checkpoint(), "another tokenizer"),
    "checkpoint beyond the end": (checkpoint(step=200), "beyond train.steps 100"),
    "no such checkpoint": (resumed("step-000009"), "neither 'auto' nor a folder"),
    "no checkpoint": (resumed("corpus"), "is no checkpoint"),
    "checkpoint of another program": (resumed(STEP, foreign), "not one of `accordion train`"),
    "damaged checkpoint": (resumed(STEP, checkpoint(), manifest="{"), "damaged"),
    "file in the way": (files({"taken": ""}, "--run.dir", "taken/run"), "is a file"),
    "chats in text": (words("--data.path corpus/0.txt --data.format chat"), "is text, and data.format chat takes"),
    "no chat template": (chat(folder="plain"), "the tokenizer has no chat template; give"),
    "no template file": (chat("--data.chat_template x"), "data.chat_template 'x' cannot be read"),
    "no tokenizer file": (chat("--data.tokenizer x"), "data.tokenizer 'x' is neither"),
    "no such field": (chat("--data.format prompt"), "rows.jsonl' line 1 has no field 'prompt'"),
    "all answers cut": (chat("--data.seq_len 3"), "has an answer to learn among its first 3 tokens"),
    "an array": (chat(content="[\n1]"), "this file looks like one array"),
    "one example": (chat(content=json.dumps(TALK)), "has one example; give at least two"),
    "too few examples": (chat("--train.micro_batch 90 --data.packing none --data.seq_len 96"), "takes 180 examples"),
    "a model that takes no positions": (chat(folder="bloom"), "takes no position ids"),
    **{f"task: {name}": (task(content, flags), expected) for name, (content, flags, expected) in OF_TASKS.items()},
}


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("case", CASES)
def test_bad_input(place: Path, started: list[int], capfd: pytest.CaptureFixture[str], case: str) -> None:
    make, expected = CASES[case]
    given = make(place)
    before = tree(place.parent)
    refused(capfd, ["train", *([] if "--task" in given else SMALL), *given], expected)
    assert not started
    assert tree(place.parent) == before


THEIRS = {  # what fails, the line that is shown, where
    "the file": (changed("class Task:", "def f(:\nclass Task:"), "SyntaxError", "def f(:"),
    "an import": (changed("import torch\n", "import no_such_package\n"), "ModuleNotFoundError", "import no"),
    "the constructor": (changed("self.width = width", "self.width = 1 / 0"), "ZeroDivisionError", "1 / 0"),
    "the model": (changed("nn.Linear(4, self.width)", "nn.Linear(4, self.wdth)"), "AttributeError", "self.wdth"),
    "the data": (changed("randn(50, 4)", "randn(50, -4)"), "RuntimeError", "randn(50, -4)"),
    "the loss": (changed("model(batch[0])", "model(batch[0].T)"), "RuntimeError", "model(batch[0].T)"),
}


@pytest.mark.parametrize("case", THEIRS)
def test_errors_of_the_users_code_are_shown_with_its_files_alone(
    place: Path, started: list[int], capfd: pytest.CaptureFixture[str], case: str
) -> None:
    content, error, line = THEIRS[case]
    Path("mine.py").write_text(content)
    assert cli.main(["train", "--task", "mine.py"]) == 1
    said = capfd.readouterr().err
    assert f'{place / "mine.py"}", line ' in said
    assert line in said
    assert f"\n{error}: " in said or said.startswith(f"{error}: ")
    assert "site-packages" not in said
    assert "accordion/" not in said
    assert said.rstrip().splitlines()[-1].startswith("accordion: the error above was raised by the task's code in ")
    assert not started


@pytest.mark.parametrize(
    ("environ", "speaks"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, True),
        ({"RANK": "5"}, True),  # alone it is no launcher's
        ({"SLURM_PROCID": "x"}, True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        ({"SLURM_PROCID": "3"}, False),
    ],
)
def test_bad_input_is_reported_by_ranks_that_may_be_the_first(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], environ: dict[str, str], speaks: bool
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "--train.stps", "1"]) == 2
    assert capfd.readouterr().err.count("\n") == speaks


def test_good_input_starts_ranks(place: Path, started: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *SMALL]) == 0
    assert started == [2]
    assert "30 documents" in capsys.readouterr().out


def test_options_of_a_task_are_flags_keys_and_help(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("options.py").write_text(
        TASK.replace("class Task:", 'class Task:\n    """T.\n\n    Args:\n        width: of it\n    """')
    )
    Path("run.yaml").write_text("task: {class_path: options.py, width: 3, rate: 0.5}\ntrain: {steps: 4}\n")
    values = flat(command.read(["--config", "run.yaml", "--task.name", "b", "--task.deep"])[0])
    found = {key: values[f"task.{key}"] for key in ("class_path", "width", "name", "deep", "rate")}
    assert found == {"class_path": "options.py", "width": 3, "name": "b", "deep": True, "rate": 0.5}
    assert values["train.steps"] == 4
    assert "model.preset" not in values
    with pytest.raises(SystemExit):
        command.read(["--task", "options.py", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--task.width NUMBER of it (default 8)" in shown
    assert "--model.preset" not in shown


def test_a_task_in_a_file_named_like_a_module_is_imported_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("queue.py").write_text("class Task:\n    pass\n")
    monkeypatch.delitem(sys.modules, "task_queue", raising=False)
    assert target_of("task", "queue.py") is target_of("task", "queue.py")
    assert "class Task" not in (Path(sys.modules["queue"].__file__ or "").read_text())


def test_a_task_is_planned(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("planned.py").write_text(changed("nn.Linear(4, self.width)", "nn.Linear(4, self.width, bias=False)"))
    flags = ["--gpus", "2", "--strategy", "full_shard", "--checkpoint-activations", "none", "--json"]
    assert cli.main(["plan", "--task", "planned.py", "--task.width", "1000", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == {"name": "Linear", "num_params": 4000}
    assert cli.main(["plan", "--task.width", "7"]) == 2
    assert "--task.width is an option of a task, and none is named" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["trian"], ["--help"], []])
def test_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == (0 if argv == ["--help"] else 2)
    shown = capsys.readouterr()
    assert "train" in shown.out + shown.err


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"accordion {metadata.version('accordion-fsdp')}, torch {torch.__version__}\n"


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "rich" else True)
    assert cli.main(["train"]) == 2
    assert "pip install 'accordion-fsdp[train]'" in capsys.readouterr().err
