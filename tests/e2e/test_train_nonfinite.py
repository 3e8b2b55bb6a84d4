"""NaN and inf in a run: found, told with the unit where they came up, left out or the end, as configured."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store

from accordion.checkpoint import latest
from accordion.checkpoint.reading import verify
from accordion.errors import NonFiniteError
from accordion.train import language_work, launch, loop
from accordion.train.command import read
from accordion.train.prepare import prepare
from accordion.train.screen import Screen
from accordion.train.steps import Steps
from tests.support import forked
from tests.support.checkpoints import differing

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TEXT = str(Path(asyncio.__file__).parent)
TINY = ["--model.preset", "llama-tiny", "--data.path", TEXT, "--launch.device", "cpu"]
TINY += ["--data.seq_len", "16", "--train.micro_batch", "2", *forked.UNTRACKED]
# Where, on which rank, at which steps; and the flags of the run.
JOBS: dict[str, tuple[str, int, list[int], list[str]]] = {
    "loss stops": ("loss", 1, [3], []),
    "gradients skipped": (
        "backward",
        1,
        [2],
        ["--train.on_nonfinite", "skip"],
    ),
    "forward skipped in fp16": ("forward", 0, [2], ["--train.on_nonfinite", "skip", "--shard.precision", "fp16"]),
    "gradients stop fp16": ("backward", 1, [1], ["--shard.precision", "fp16"]),
    "a scale too large": ("scale", 0, [], ["--shard.precision", "fp16", "--train.steps", "5"]),
    "too many": ("loss", 0, [2, 3, 4], ["--train.on_nonfinite", "skip:1"]),
    "once": ("once", 1, [2], ["--train.on_nonfinite", "skip"]),
    "resumed": ("nowhere", 0, [], []),
}


class Spoils(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float("inf")


class Fault:
    """Something that goes wrong in some steps on this rank."""

    def __init__(self, where: str, steps: list[int]) -> None:
        self.where, self.steps, self.now = where, steps, 0
        self.real_take, self.real_model, self.real_losses = (
            Steps.take,
            language_work.trained_model,
            language_work.label_losses,
        )

    def take(self, steps: Steps, step: int) -> None:
        self.now = step
        self.real_take(steps, step)

    def model(self, *args: Any) -> nn.Module:
        model = self.real_model(*args)
        model.model.layers[1].register_forward_hook(self.forward)
        model.model.layers[0].mlp.register_forward_hook(self.backward)
        return model

    def comes(self, where: str) -> bool:
        return self.where == where and self.now in self.steps

    def forward(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * float("nan") if self.comes("forward") else out

    def backward(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return Spoils.apply(out) if self.comes("backward") else out

    def losses(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = self.real_losses(model, batch)
        if self.comes("once"):
            self.steps = []
            return total * float("nan"), count
        return (total * float("nan") if self.comes("loss") else total), count


@contextmanager
def planted(fault: Fault, notes: list[str]) -> Iterator[None]:
    class Heard(Screen):
        def note(self, text: str) -> None:
            notes.extend([text] if " is skipped" in text else [])

    scaler = torch.amp.GradScaler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "take", lambda steps, step: fault.take(steps, step))
        patch.setattr(language_work, "trained_model", fault.model)
        patch.setattr(language_work, "label_losses", fault.losses)
        patch.setattr(loop, "_finish", lambda *_: None)
        patch.setattr(loop, "Screen", Heard)
        if fault.where == "scale":
            patch.setattr(torch.amp, "GradScaler", partial(scaler, init_scale=2.0**19))
        yield


def troubled(place: launch.RankPlace, store: Store, folder: Path, jobs: dict[str, Any]) -> None:
    found = {}
    for name, (config, prepared) in jobs.items():
        where, rank, steps, _ = JOBS[name]
        if name == "resumed":
            path = folder / "gradients skipped" / "checkpoints" / "step-000003"  # of a run that was not there yet
            config = replace(config, checkpoint=replace(config.checkpoint, resume=str(path)))
            prepared = replace(prepared, config=config, resume=path)
        notes: list[str] = []
        error = ""
        with planted(Fault(where, steps if rank == place.rank else []), notes):
            try:
                loop.train(place, PrefixStore(name, store), prepared, "cpu")
            except NonFiniteError as caught:
                error = str(caught)
                torch.distributed.destroy_process_group()
        found[name] = {"notes": notes, "error": error}
    (folder / f"{place.rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any], list[Any]]]:
    """All jobs, run once: the folder of one, what it said, and its steps."""
    folder = tmp_path_factory.mktemp("nonfinite")
    jobs = {}
    for name, (*_, flags) in JOBS.items():
        more = ["--train.steps", "4", "--checkpoint.every", "1", "--run.dir", str(folder / name)]
        config = read([*TINY, *more, *flags])
        jobs[name] = config, prepare(config, forked.PLACE, folder / "cache", Screen(speaks=False), began_s=0.0)
    assert forked.start(troubled, (folder, jobs), 2) == 0
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second  # every rank says the same

    def of(name: str) -> tuple[Path, dict[str, Any], list[Any]]:
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        newest = latest(folder / name / "checkpoints")
        assert newest is None or verify(newest) == []
        return folder / name / "checkpoints", first[name], [json.loads(line) for line in lines]

    return of


def test_stop_names_the_place_and_leaves_checkpoints(runs: Any) -> None:
    checkpoints, said, steps = runs("loss stops")
    assert "step 3: loss nan" in said["error"]
    assert "outputs are finite and the loss is nan on rank 1" in said["error"]
    assert (len(steps), latest(checkpoints)) == (2, str(checkpoints / "step-000002"))


def test_a_step_that_is_left_out_changes_neither_weights_nor_optimizer_nor_schedule(runs: Any) -> None:
    checkpoints, said, steps = runs("gradients skipped")
    assert [line["skipped"] for line in steps] == [False, True, False, False]
    told = said["notes"][0]
    assert "(model.layers.0), in the gradients" in told
    assert "on rank 1" in told
    assert steps[1]["grad_norm"] is None
    assert steps[2]["lr"] == steps[1]["lr"]
    assert differing(checkpoints / "step-000001", checkpoints / "step-000002") == set()
    assert differing(checkpoints / "step-000002", checkpoints / "step-000003")


def test_with_a_gradient_scaler(runs: Any) -> None:
    _, said, steps = runs("forward skipped in fp16")
    assert [line["skipped"] for line in steps] == [False, True, False, False]
    told = said["notes"][0]
    assert "(model.layers.1), in what its forward returned, on rank 0" in told
    _, said, steps = runs("gradients stop fp16")
    assert "(model.layers.0), in the gradients" in said["error"]
    assert steps == []


def test_a_scale_that_is_too_large_is_the_scalers_business(runs: Any) -> None:
    _, said, steps = runs("a scale too large")
    skipped = [line["skipped"] for line in steps]
    assert skipped[0]
    assert not all(skipped)
    assert len(said["notes"]) == sum(skipped)
    for halvings, note in enumerate(said["notes"]):
        assert f"overflowed at scale {2.0 ** (19 - halvings):g}" in note


def test_only_so_many_in_a_row(runs: Any) -> None:
    checkpoints, said, steps = runs("too many")
    assert "step 3 is not finite, nor are the 1 before it" in said["error"]
    assert [line["skipped"] for line in steps] == [False, True]
    assert latest(checkpoints) == str(checkpoints / "step-000002")


def test_what_does_not_come_up_again_is_told_so(runs: Any) -> None:
    _, said, steps = runs("once")
    assert [line["skipped"] for line in steps] == [False, True, False, False]
    assert "did not happen again when the step was repeated" in said["notes"][0]


def test_a_resumed_run_knows_how_many_were_left_out(runs: Any) -> None:
    after, before = runs("resumed")[2][-1], runs("gradients skipped")[2][-1]
    assert {key: after[key] for key in ("step", "loss", "lr")} == {key: before[key] for key in ("step", "loss", "lr")}
