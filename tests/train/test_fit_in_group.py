"""`acc.fit` in a process group of the program's own, in a thread, as Ray Train calls it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import accordion as acc
from accordion.checkpoint import latest
from tests.support.own_tasks import Held
from tests.support.ranked import on_world

pytestmark = pytest.mark.cpu("the calls around a run, which are equal on any device")
RANKS = 4
OPTIONS = {"train.micro_batch": 1, "launch.device": "cpu", "log.tensorboard": False}


def in_a_thread(run_dir: Path, steps: int, on_step: Any) -> Any:
    """Return what `acc.fit` returns, or the exception that it raises, in a thread that is not the main one."""
    results: list[Any] = []

    def train() -> None:
        try:
            options = {**OPTIONS, "run.dir": str(run_dir), "train.steps": steps}
            results.append(acc.fit(Held(), options=options, on_step=on_step))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return results[0]


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
    assert saved == ["step-000004", "step-000006"]  # asked for once, after step 3; and the last one

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
