"""`acc.fit` in a process group of the program's own, in a thread, as Ray Train calls it."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import accordion as acc
from accordion.checkpoint import latest
from tests import devices
from tests.support.own_tasks import Held
from tests.support.ranked import on_world

RANKS = 4


class Task(Held):
    """Stepped by a fused optimizer, so that an accelerator's figures are read one step later."""

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.02, fused=True)


def in_a_thread(run_dir: Path, steps: int, on_step: Any) -> Any:
    """Return what `acc.fit` returns, or the exception that it raises, in a thread that is not the main one."""
    results: list[Any] = []

    def train() -> None:
        try:
            options = {"run.dir": str(run_dir), "train.steps": steps, "train.micro_batch": 1, "log.tensorboard": False}
            options["launch.device"] = devices.device().type
            results.append(acc.fit(Task(), options=options, on_step=on_step))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return results[0]


def test_the_package_travels_by_name() -> None:
    """Else Ray could not ship a function to its workers that says `acc.fit`."""
    assert pickle.loads(pickle.dumps(acc)) is acc


@on_world(RANKS)
def test_a_run_in_the_programs_group_saves_where_one_rank_asks_and_leaves_the_group(mesh: Any, tmp_path: Path) -> None:
    group, reported = dist.group.WORLD, list[dict[str, float]]()

    def on_step(metrics: dict[str, float]) -> bool:
        reported.append(metrics)
        return dist.get_rank() == 2 and metrics["step"] >= 3  # as a node that is about to be taken away

    fit = in_a_thread(tmp_path / "run", 6, on_step)
    assert (fit.state, fit.step) == ("finished", 6), fit
    assert dist.group.WORLD is group
    assert [metrics["step"] for metrics in reported] == [1, 2, 3, 4, 5, 6]
    losses: list[Any] = [None] * RANKS
    dist.all_gather_object(losses, [metrics["loss"] for metrics in reported])
    assert losses == [losses[0]] * RANKS
    assert fit.loss == losses[0][-1]
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    asked = 4 if devices.device().type == "cpu" else 5
    assert saved == [f"step-{asked:06d}", "step-000006"]  # asked for once; and the last one

    def fails(metrics: dict[str, float]) -> None:
        raise ConnectionError(f"no report of step {metrics['step']}")

    dist.barrier()
    error = in_a_thread(tmp_path / "run", 9, fails)  # resumes after the sixth
    assert str(error) == "no report of step 7", error
    assert latest(tmp_path / "run" / "checkpoints") == fit.checkpoint
    assert dist.group.WORLD is group
    dist.barrier()
    fit = in_a_thread(tmp_path / "run", 9, None)
    assert (fit.state, fit.step) == ("finished", 9), fit
