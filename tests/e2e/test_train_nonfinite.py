"""NaN and inf in a run: the unit that produced them is named, and the step is skipped or the run ends, as configured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store
from torch.utils.data import TensorDataset

from accordion.checkpoint import latest
from accordion.checkpoint.reading import verify
from accordion.errors import NonFiniteError
from accordion.options import made
from accordion.train import launch, loop
from accordion.train.config import JobConfig
from accordion.train.prepare import prepare
from accordion.train.screen import Screen
from accordion.train.steps import Steps
from tests.support import forked
from tests.support.checkpoints import differing

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SKIP, FP16 = {"train.on_nonfinite": "skip"}, {"shard.precision": "fp16"}
# Place of the fault, its rank, its steps, and keys of the run.
JOBS: dict[str, tuple[str, int, list[int], dict[str, Any]]] = {
    "loss stops": ("loss", 1, [3], {}),
    "gradients skipped": ("backward", 1, [2], SKIP),
    "forward skipped in fp16": ("forward", 0, [2], {**SKIP, **FP16}),
    "gradients stop fp16": ("backward", 1, [1], FP16),
    "a scale too large": ("scale", 0, [], {**FP16, "train.steps": 5}),
    "too many": ("loss", 0, [2, 3, 4], {"train.on_nonfinite": "skip:1"}),
    "once": ("once", 1, [2], SKIP),
    "resumed": ("nowhere", 0, [], {}),
}


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh())


class Faulty:
    """A task of two blocks, in which something goes wrong at `where` in `steps` on one rank."""

    units = [Block]
    now = 0  # the step; not counted again when it is repeated

    def __init__(self, where: str, rank: int, steps: list[int]) -> None:
        self.where, self.rank, self.steps = where, rank, steps

    def model(self) -> nn.Module:
        def spoil(module: nn.Module, args: Any, out: Tensor) -> None:
            if self.fails("backward"):
                out.register_hook(lambda grad: grad * float("inf"))

        model = nn.Sequential(Block(), Block())
        model[1].register_forward_hook(lambda module, args, out: out * float("nan") if self.fails("forward") else out)
        model[0][0].register_forward_hook(spoil)
        return model

    def dataset(self, split: str) -> TensorDataset | None:
        draw = torch.Generator().manual_seed(5)
        return TensorDataset(torch.randn(64, 8, generator=draw)) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = (model(batch[0]).float() - 1).square().mean()
        fails = self.fails("loss") or self.fails("once")
        if self.fails("once"):
            self.steps = []
        return loss * float("nan") if fails else loss

    def fails(self, where: str) -> bool:
        return self.where == where and Faulty.now in self.steps and dist.get_rank() == self.rank


@contextmanager
def watched(where: str, notes: list[str]) -> Iterator[None]:
    """Context manager that counts steps for `Faulty`, and records notes on skipped steps."""

    class Recorder(Screen):
        def note(self, text: str) -> None:
            notes.extend([text] if " is skipped" in text else [])

    def counted(steps: Steps, step: int) -> None:
        Faulty.now = step
        take(steps, step)

    take = Steps.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "take", counted)
        patch.setattr(loop, "Screen", Recorder)
        if where == "scale":
            patch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**19))
        yield


def troubled(place: launch.RankPlace, store: Store, folder: Path, jobs: dict[str, Any]) -> None:
    found = {}
    for name, prepared in jobs.items():
        if name == "resumed":
            path = folder / "gradients skipped" / "checkpoints" / "step-000003"  # did not exist when jobs were prepared
            config = replace(prepared.config, checkpoint=replace(prepared.config.checkpoint, resume=str(path)))
            prepared = replace(prepared, config=config, resume=path)
        notes: list[str] = []
        error = ""
        with watched(JOBS[name][0], notes):
            try:
                loop.train(place, PrefixStore(name, store), prepared, "cpu")
            except NonFiniteError as caught:
                error = str(caught)
                dist.destroy_process_group()
        found[name] = {"notes": notes, "error": error}
    (folder / f"{place.rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any], list[Any]]]:
    """Run all jobs once. Returns a function: name -> (folder of its checkpoints, notes and error, lines of its steps)."""
    folder = tmp_path_factory.mktemp("nonfinite")
    keys = {"train.steps": 4, "train.micro_batch": 2, "checkpoint.every": 1, "log.tensorboard": False}
    jobs = {}
    for name, (where, rank, steps, more) in JOBS.items():
        config = made(JobConfig, {**keys, "run.dir": str(folder / name), **more})
        task = Faulty(where, rank, steps)
        jobs[name] = prepare(config, forked.PLACE, folder, Screen(speaks=False), began_s=0.0, task=task)
    assert forked.start(troubled, (folder, jobs), 2) == 0
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second  # every rank reports the same

    def of(name: str) -> tuple[Path, dict[str, Any], list[Any]]:
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        newest = latest(folder / name / "checkpoints")
        assert newest is None or verify(newest) == []
        return folder / name / "checkpoints", first[name], [json.loads(line) for line in lines]

    return of


@pytest.mark.parametrize(
    ("name", "skipped", "words"),
    [
        ("loss stops", [False, False], ["step 3: loss nan", "outputs are finite and the loss is nan on rank 1"]),
        ("gradients skipped", [False, True, False, False], ["(0), in the gradients", "on rank 1"]),
        ("forward skipped in fp16", [False, True, False, False], ["(1), in what its forward returned, on rank 0"]),
        ("gradients stop fp16", [], ["(0), in the gradients"]),
        ("too many", [False, True], ["step 3 is not finite, nor are the 1 before it"]),
        ("once", [False, True, False, False], ["did not happen again when the step was repeated"]),
    ],
)
def test_a_run_that_stops_or_skips_names_the_place_and_leaves_checkpoints(
    runs: Any, name: str, skipped: list[bool], words: list[str]
) -> None:
    checkpoints, said, steps = runs(name)
    assert [line["skipped"] for line in steps] == skipped
    assert bool(said["error"]) == (len(steps) < 4)
    text = said["error"] or said["notes"][0]
    assert all(part in text for part in words), text
    assert latest(checkpoints) == (str(checkpoints / f"step-{len(steps):06d}") if steps else None)


def test_a_skipped_step_changes_neither_weights_nor_optimizer_nor_schedule(runs: Any) -> None:
    checkpoints, _, steps = runs("gradients skipped")
    assert steps[1]["grad_norm"] is None
    assert steps[2]["lr"] == steps[1]["lr"]
    assert differing(checkpoints / "step-000001", checkpoints / "step-000002") == set()
    assert differing(checkpoints / "step-000002", checkpoints / "step-000003")


def test_a_scale_that_is_too_large_is_lowered_by_the_scaler(runs: Any) -> None:
    _, said, steps = runs("a scale too large")
    skipped = [line["skipped"] for line in steps]
    assert skipped[0]
    assert not all(skipped)
    assert len(said["notes"]) == sum(skipped)
    for halvings, note in enumerate(said["notes"]):
        assert f"overflowed at scale {2.0 ** (19 - halvings):g}" in note


def test_a_resumed_run_knows_how_many_steps_were_skipped(runs: Any) -> None:
    after, before = runs("resumed")[2][-1], runs("gradients skipped")[2][-1]
    assert {key: after[key] for key in ("step", "loss", "lr")} == {key: before[key] for key in ("step", "loss", "lr")}
