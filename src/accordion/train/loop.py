"""The training loop: everything a rank does from joining the process group to the sample at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from accordion.checkpoint.prune import BEST
from accordion.describe import describe
from accordion.errors import UsageError
from accordion.observe.recorder import observe
from accordion.train import checkpoints
from accordion.train.build import Run, agree, run_of
from accordion.train.config import as_yaml
from accordion.train.ending import IS_PREEMPTED, PREEMPTED, TIME_IS_OVER, Signals
from accordion.train.failures import FILES, recorded
from accordion.train.launch import RankPlace, first_does, join_group
from accordion.train.metrics import MetricsLog, StepMetrics
from accordion.train.owner import claim
from accordion.train.prepare import Prepared
from accordion.train.run_files import RUN_CONFIG
from accordion.train.saves import RunSaves
from accordion.train.screen import Screen
from accordion.train.steps import Steps
from accordion.train.trackers import trackers_of

OBSERVED = 3  # steps that `train.observe` records
OnStep = Callable[[dict[str, float]], bool | None]
"""Function that a program passes to `fit`, called with each step's metrics (name -> value); if it returns True, the run
saves."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: "finished", "stopped" for the reason `why`, or "preempted"."""

    state: str
    why: str = ""


def train(place: RankPlace, store: Store, prepared: Prepared, kind: str, signals: Signals | None = None) -> int:
    """Train on one rank and return its exit code: 0, or `PREEMPTED` if a signal ended the run early. Collective. After an
    error, the folders stay locked and the process group open until the process ends. `kind`: type of device."""
    outcome = trained(place, store, prepared, kind, signals or Signals(), ExitStack())
    return PREEMPTED if outcome.state == "preempted" else 0


def trained(
    place: RankPlace,
    store: Store,
    prepared: Prepared,
    kind: str,
    signals: Signals,
    cleanups: ExitStack,
    on_step: OnStep | None = None,
) -> Outcome:
    """Train on one rank and return the outcome. Collective. Trains in the process group that exists, on the current device of
    type `kind`, or creates one. `cleanups`: gets callbacks that wait for the last save, destroy a process group created here,
    and release the run's folders. They are called at the end; after an error, the caller has to call them."""
    config = prepared.config
    with ExitStack() as stack:
        screen = stack.enter_context(Screen(speaks=place.rank == 0))
        owned = first_does(place.rank == 0, store, "accordion/first", lambda: _claimed(prepared, place, screen))
        if owned is not None:
            cleanups.callback(owned.close)
        stack.enter_context(recorded(prepared.run_dir, place.rank, place.world))
        if dist.is_initialized():  # the program's own
            device = torch.device(kind, 0 if kind == "cpu" else torch.accelerator.current_device_index())
        else:
            device = join_group(place, store, kind, config.launch.timeout_s)
            cleanups.callback(dist.destroy_process_group)
        agree(prepared, place)
        run = run_of(prepared, place, device, signals, screen)
        saves = RunSaves(run)
        cleanups.callback(saves.settle)
        screen.note(str(describe(run.model)))
        for line in prepared.work.notes(run.share):
            screen.note(line)
        done = saves.resume()
        log = stack.enter_context(_open_record(run, done)) if place.rank == 0 else None
        step, outcome = _steps(run, saves, log, done, on_step)
        _finish(run, saves, log, step, outcome)
        dist.barrier()  # the first rank that exits with a code of its own may have its launcher end the others
    cleanups.close()
    return outcome


def _steps(run: Run, saves: RunSaves, log: MetricsLog | None, done: int, on_step: OnStep | None) -> tuple[int, Outcome]:
    """Run the steps after the first `done`, and return (number of steps done in all, outcome). `log`: None on ranks other than
    0. `on_step`: called with the metrics of each step. Collective."""
    screen = run.screen

    def record(metrics: StepMetrics) -> None:
        screen.step(metrics)
        run.ending.took("step", metrics.step_s)
        if log is not None:
            log.step(metrics)
        if on_step is not None:
            run.ending.ask(bool(on_step(metrics.values())))

    screen.start(done, run.config.train.steps)
    steps, step, over = Steps(run, saves, record), done, _over(run, done)
    first = run.config.train.observe
    with ExitStack() as recording:
        while over is None:
            step += 1
            if step == first:
                recording.enter_context(_observed(run))
            steps.take(step)
            if step == first + OBSERVED:
                recording.close()
            saves.poll()
            over = _after_step(run, saves, steps, step, log)
    screen.stop()
    return step, over


@contextmanager
def _observed(run: Run) -> Iterator[None]:
    """Context manager that records the first steps in its body, at most `OBSERVED`. At its end rank 0 writes the record into
    the run folder as HTML and JSON, and shows what would make the steps faster; nothing if no step was recorded."""
    first = run.config.train.observe
    with observe(run.model, steps=OBSERVED) as trace:
        yield
    if run.place.rank == 0 and trace.ranks[0].steps:
        path = run.prepared.run_dir / f"trace-{first}.html"
        lines = trace.lines()
        try:
            trace.html(path)
            trace.save(path.with_suffix(".json"))
            lines.append(f"drawn: {path}")
        except UsageError as error:  # a full disk must not end the training
            lines.append(str(error))
        for line in lines:
            run.screen.note(line)


def _after_step(run: Run, saves: RunSaves, steps: Steps, step: int, log: MetricsLog | None) -> Outcome | None:
    """Validate, save and show a sample, each if due after `step`. Return the outcome if the run ends, or None. Collective."""
    options, due = run.config.train, _due(run.config.train.eval_every, step)
    if run.ending.decided or step == options.steps or due:
        steps.settle()
    # Validate before saving, so that the checkpoint has the result.
    due = due or (step == options.steps and options.keep_best)
    is_best = due and not run.ending.decided and _validate(run, step, log)
    over = _over(run, step)
    saved = over is not None or run.ending.saves or _due(run.config.checkpoint.every, step)
    if is_best and not saved:
        saves.save(step, last=False, name=BEST)
    if saved:
        steps.settle()
        saves.save(step, last=over is not None)
        run.ending.saves = False
    if over is None and _due(options.sample_every, step):
        steps.settle()
        run.screen.note(f"after {step} steps:")
        _sample(run)
    return over


def _sample(run: Run) -> None:
    with run.averaged():
        run.prepared.work.finish(run.model, run.device, run.config.train.seed, run.screen)


def _due(every: int, step: int) -> bool:
    return every != 0 and step % every == 0


def _over(run: Run, step: int) -> Outcome | None:
    """Return the outcome if training ends after `step` steps, otherwise None; equal on all ranks."""
    if run.ending.decided == IS_PREEMPTED:
        return Outcome("preempted")
    if step >= run.config.train.steps:
        return Outcome("finished")
    if run.ending.decided == TIME_IS_OVER:
        return Outcome("stopped", f"train.hours {run.config.train.hours:g} have passed")
    if run.best.is_over:
        return Outcome("stopped", f"no lower validation loss in {run.best.waited} validations (train.patience)")
    return None


def _claimed(prepared: Prepared, place: RankPlace, screen: Screen) -> ExitStack:
    """Take ownership of the run's folders, remove the files in which ranks of an earlier start reported a failure, and return a
    stack whose `close` releases the folders. Raises `UsageError` if another job owns a folder."""
    # Ranks of an earlier start end by themselves: after a timeout in a collective, and one more in a request to the store.
    owned = claim(prepared.folders, place.job, 2 * prepared.config.launch.timeout_s, screen.note)
    for path in prepared.run_dir.glob(FILES):
        path.unlink(missing_ok=True)
    return owned


def _open_record(run: Run, done: int) -> MetricsLog:
    """Write config.yaml into the run folder, open the trackers, and return the log of metrics, which goes on after the first
    `done` steps. Called on rank 0 only. Raises `UsageError` if the folder cannot be written."""
    folder, say = run.prepared.run_dir, run.screen.note
    try:
        (folder / RUN_CONFIG).write_text(as_yaml(run.config), encoding="utf-8")
        return MetricsLog(folder, done, say, trackers_of(run.config, folder, done, say))
    except OSError as error:
        raise UsageError(
            f"the metrics of the run cannot be written to run.dir {str(folder)!r}: {error.strerror or error}; free some space, "
            "or take another run.dir."
        ) from None


def _validate(run: Run, step: int, log: MetricsLog | None) -> bool:
    """Validate, and report the result on screen, and to `log` if that is not None. Return True, on all ranks, if the loss is
    the lowest so far and `train.keep_best` is set; otherwise False, also if there is no validation data. Collective."""
    began_s, best = time.perf_counter(), run.best
    with run.averaged():
        validation = run.prepared.work.validate(run.model, run.share, run.device)
    best.last = step
    if validation is None:
        return False
    run.ending.took("validation", time.perf_counter() - began_s)
    is_best = best.observe(step, validation.loss) and run.config.train.keep_best
    words = f"{validation.words}{', the best so far' * is_best}"
    of = "" if run.ema is None else " of the averaged weights"
    run.screen.note(f"validation loss{of} {validation.loss:.4f} after {step} steps{words}")
    if log is not None:
        log.validation(step, validation)
    return is_best


def _finish(run: Run, saves: RunSaves, log: MetricsLog | None, steps: int, over: Outcome) -> None:
    """End a run after `steps` steps: validate unless the last step did, and with `train.keep_best` save the run as `best` if
    its loss is the lowest; show the run's files and a sample. After a signal or the time limit, only show files. Collective."""
    note, folder, run_dir = run.screen.note, saves.folder, run.prepared.run_dir
    has_time, is_finished = not run.ending.decided, over.state == "finished"
    if has_time and run.best.last != steps and _validate(run, steps, log):
        saves.save(steps, last=True, name=BEST)
    if not is_finished:
        note(f"stopped after {steps} of {run.config.train.steps} steps: {over.why or over.state}")
    newest = checkpoints.path_of(folder, steps)
    at = newest if newest.is_dir() else run.prepared.resume
    note(f"checkpoint: {at}" if at else f"no checkpoint in {folder}")
    shown = f"; tensorboard --logdir {run_dir}" if run.config.log.tensorboard else ""
    note(f"metrics: {run_dir / 'metrics.jsonl'}{shown}")
    if run.config.train.keep_best and run.place.rank == 0 and (best := checkpoints.best_in(folder)) is not None:
        note(f"best: {folder / BEST}, validation loss {best[0]:.4f} after {best[1]} steps")
    if has_time:
        _sample(run)
    else:
        left_out = "makes the last validation, for which there was no time"
        note(f"the same command {left_out if is_finished else 'resumes from there'}")
