"""Mistakes in a task are reported before any rank starts: ours in one line, the user's own with their file and line."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accordion import cli
from accordion.train import command, launch
from accordion.train.batches import LoaderBatches, OrderedBatches, batches_of, rows_of
from accordion.train.config import flat
from accordion.train.data import Share
from accordion.train.steps import Counted
from tests.support.refused import refused

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
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


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the numbers of ranks that were to be started; start none."""
    asked: list[int] = []
    monkeypatch.setattr(launch, "start", lambda entry, args, nproc, signals: asked.append(nproc) or 0)
    return asked


def changed(old: str, new: str) -> str:
    assert old in TASK
    return TASK.replace(old, new)


DATA = 'TensorDataset(torch.randn(50, 4)) if split == "train" else None'
LOSS = "model(batch[0]).square().mean()"
OURS = {  # what is in the file, flags, what is said
    "no file": (None, ["--task", "nothing.py"], "task 'nothing.py' does not exist"),
    "no class": (TASK, ["--task", "mine_0.py:Tsk"], "there is no 'Tsk' in mine_0.py; did you mean 'Task'?"),
    "no package": (TASK, ["--task", "no_such:Task"], "there is no module 'no_such'"),
    "no name": (TASK, ["--task", "Task"], "names no class; write file.py"),
    "a function": (changed("class Task:", "def f(): pass\nclass Task:"), ["--task", "mine_3.py:f"], "is no class"),
    "no such option": (TASK, ["--task.widht", "3"], "did you mean '--task.width'?"),
    "an option's type": (TASK, ["--task.width", "wide"], "it takes a whole number"),
    "a required option": (changed("width: int = 8", "width: int"), [], "needs 'width', which has no default"),
    "an option that is no text": (changed("width: int = 8", "width: list"), [], "needs 'width', which is no number"),
    "no loss": (changed("def loss", "def lose"), [], "Task is no task: it has no method loss(model, batch)"),
    "another signature": (changed("def loss(self, model, batch)", "def loss(self, batch)"), [], "cannot be called as"),
    "no model": (changed("nn.Linear(4, self.width)", "None"), [], "model() returned a NoneType"),
    "a frozen model": (changed("self.width)", "self.width).requires_grad_(False)"), [], "nothing would be trained"),
    "no data": (changed(DATA, "None"), [], "has no training data"),
    "empty data": (changed("randn(50, 4)", "randn(0, 4)"), [], "without a sample"),
    "too little data": (changed("randn(50, 4)", "randn(15, 4)"), [], "one step takes 16 samples"),
    "data of no kind": (changed(DATA, "3"), [], "returned a int; it must return a dataset"),
    "a loader for all ranks": (
        changed(DATA, "DataLoader(TensorDataset(torch.randn(50, 4)), shuffle=True)"),
        [],
        "by which every rank would read the same samples",
    ),
    "an iterable that is short": (changed(DATA, "iter([torch.ones(4)] * 9)"), [], "has no batch, or less than a step"),
    "a loss that is no number": (changed(LOSS, "model(batch[0])"), [], "is a tensor of shape (8, 8)"),
    "a loss that is no tensor": (changed(LOSS, "3.0"), [], "loss is a float"),
    "a loss of nothing": (changed(LOSS, "torch.zeros(())"), [], "does not depend on a parameter"),
    "no such unit": (TASK, ["--shard.units", "Linaer"], "Linear"),
    "rate beside an optimizer": (
        TASK,
        ["--optimizer", "torch.optim.SGD", "--train.lr", "0.5"],
        "train.lr is 0.5, but has no effect with your own optimizer",
    ),
    "no such optimizer option": (TASK, ["--optimizer", "torch.optim.SGD", "--optimizer.momentun", "1"], "momentum"),
    "no such optimizer": (TASK, ["--optimizer", "torch.optim.SDG"], "did you mean 'SGD'?"),
}


@pytest.mark.parametrize("case", OURS)
def test_our_errors_are_one_line(place: Path, started: list[int], capfd: pytest.CaptureFixture[str], case: str) -> None:
    content, flags, expected = OURS[case]
    name = f"mine_{list(OURS).index(case)}.py"
    flags = [flag.replace("mine_0.py", name).replace("mine_3.py", name) if content else flag for flag in flags]
    expected = expected.replace("mine_0.py", name)
    if content:
        Path(name).write_text(content)
    named = [] if "--task" in flags else ["--task", name]
    refused(capfd, ["train", *named, *flags], expected)
    assert not started
    assert not (place / "runs").exists()


THEIRS = {  # what fails, the line that is shown, where
    "the file": (changed("class Task:", "def f(:\nclass Task:"), "SyntaxError", "def f(:"),
    "an import": (
        changed("import torch\n", "import torch\nimport no_such_package\n"),
        "ModuleNotFoundError",
        "import no",
    ),
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
    name = f"theirs_{list(THEIRS).index(case)}.py"
    Path(name).write_text(content)
    assert cli.main(["train", "--task", name]) == 1
    said = capfd.readouterr().err
    assert f'{place / name}", line ' in said
    assert line in said
    assert f"\n{error}: " in said or said.startswith(f"{error}: ")
    assert "site-packages" not in said
    assert "accordion/" not in said
    assert said.rstrip().splitlines()[-1].startswith("accordion: the error above was raised by the task's code in ")
    assert not started


def test_options_of_a_task_are_flags_keys_and_help(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("options.py").write_text(
        TASK.replace("class Task:", 'class Task:\n    """T.\n\n    Args:\n        width: of it\n    """')
    )
    Path("run.yaml").write_text("task: {class_path: options.py, width: 3, rate: 0.5}\ntrain: {steps: 4}\n")
    values = flat(command.read(["--config", "run.yaml", "--task.name", "b", "--task.deep"]))
    found = {key: values[f"task.{key}"] for key in ("class_path", "width", "name", "deep", "rate")}
    assert found == {"class_path": "options.py", "width": 3, "name": "b", "deep": True, "rate": 0.5}
    assert values["train.steps"] == 4
    assert "model.preset" not in values
    with pytest.raises(SystemExit):
        command.read(["--task", "options.py", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--task.width NUMBER of it (default 8)" in shown
    assert "--model.preset" not in shown


def test_a_task_is_planned(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("planned.py").write_text(changed("nn.Linear(4, self.width)", "nn.Linear(4, self.width, bias=False)"))
    flags = ["--gpus", "2", "--strategy", "full_shard", "--checkpoint-activations", "none", "--json"]
    assert cli.main(["plan", "--task", "planned.py", "--task.width", "1000", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == {"name": "Linear", "num_params": 4000}
    assert cli.main(["plan", "--task.width", "7"]) == 2
    assert "--task.width is an option of a task, and none is named" in capsys.readouterr().err


# -- which samples each rank gets

SHARE = Share(rank=0, world=1, micro_batch=6, accumulate=1)


def of_ranks(
    world: int, data: object, steps: int, start: dict[int, object] | None = None
) -> tuple[list[set[int]], object]:
    """Return what `world` ranks read together in each step, and their positions afterwards."""
    every = []
    for rank in range(world):
        share = Share(rank=rank, world=world, micro_batch=6 // world, accumulate=2)
        batches = batches_of(data, share, 0, list, pins=False)
        if start is not None:
            assert batches.resume(start)
        every.append(([{int(x) for _ in range(2) for x in next(batches)} for _ in range(steps)], batches.position()))
    assert all(kept == every[0][1] for _, kept in every)
    return [set().union(*(read[i] for read, _ in every)) for i in range(steps)], every[0][1]


class Walk:
    """An iterable that starts at another number in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return (number % 50 for number in range(self.epoch, self.epoch + 50))


@pytest.mark.parametrize("data", [range(50), Walk()], ids=["map", "iter"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_the_data_and_any_number_of_ranks_resumes(data: object, world: int) -> None:
    """Each step has 12 samples, each of them once; four steps make an epoch of 50, and two samples are left out."""
    expected, _ = of_ranks(1, data, 9)
    assert all(len(step) == 12 for step in expected)
    assert len(set().union(*expected[:4])) == 48
    first, place = of_ranks(world, data, 5)
    again, _ = of_ranks(3, data, 4, place)  # type: ignore[arg-type]
    assert [*first, *again] == expected


def test_kinds_of_data() -> None:
    data = TensorDataset(torch.arange(8.0))
    assert isinstance(batches_of(data, SHARE, 0, list, pins=False), OrderedBatches)
    alone = DataLoader(data, sampler=torch.utils.data.SubsetRandomSampler([1, 2, 3]), batch_size=2)
    batches = batches_of(alone, SHARE, 0, list, pins=False)
    assert isinstance(batches, LoaderBatches)
    read = [next(batches) for _ in range(4)]
    assert [rows_of(batch) for batch in read] == [2, 1, 2, 1]
    other = batches_of(alone, SHARE, 0, list, pins=False)
    assert other.resume({"epoch": 1, "num_batches": 1})
    assert torch.equal(next(other)[0], read[3][0])
    assert not other.resume({"epoch": 1, "num_read": 1})


def stateful_loader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about what the package calls
        return StatefulDataLoader(range(40), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))


def test_data_with_a_state_dict_resumes_from_it() -> None:
    """Across the end of an epoch of the loader, which has 20 batches."""
    first = batches_of(stateful_loader(), SHARE, 0, list, pins=False)
    read = [[int(x) for x in next(first)] for _ in range(13)]
    state, position = {name: deepcopy(one.state_dict()) for name, one in first.state().items()}, first.position()
    read += [[int(x) for x in next(first)] for _ in range(13)]
    again = batches_of(stateful_loader(), SHARE, 0, list, pins=False)
    for name, one in again.state().items():
        one.load_state_dict(state[name])
    assert again.resume(position)
    assert [[int(x) for x in next(again)] for _ in range(13)] == read[13:]


def counted(mesh: object, accumulate: int) -> tuple[float, float, float]:
    """Return the mean that four ranks compute from sums and counts, also without any, and the expected mean."""
    rank = torch.distributed.get_rank()
    share = Share(rank=rank, world=4, micro_batch=1, accumulate=accumulate)
    sums = torch.tensor([[5.0, 2.0, 7.0], [1.0, 4.0, 3.0], [0.0, 0.0, 0.0], [8.0, 8.0, 8.0]])[:, :accumulate]
    counts = torch.tensor([[2.0, 0.0, 5.0], [0.0, 1.0, 9.0], [0.0, 0.0, 0.0], [3.0, 5.0, 1.0]])[:, :accumulate]
    found = []
    for scale in (1.0, 0.0):
        counter = Counted(share)
        mine = sum(counter.mean_of((sums[rank, i], scale * counts[rank, i])) for i in range(accumulate))
        left = counter.left()
        total = mine * (1.0 if left is None else left)
        torch.distributed.all_reduce(total)
        found.append(float(total) / 4)
    return found[0], found[1], float(sums.sum() / counts.sum())


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_sums_and_counts_make_the_mean_of_a_step(world: object, accumulate: int) -> None:
    for mean, of_nothing, expected in world.run(4, counted, accumulate):  # type: ignore[attr-defined]
        assert mean == pytest.approx(expected, rel=1e-6)
        assert of_nothing == of_nothing  # no NaN
