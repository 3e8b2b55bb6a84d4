"""Describe errors, stacks and ranks as parts of sentences. Pure functions."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accordion.errors import DivergenceError

ERROR_LETTERS = 400
LINE_LETTERS = 120  # of a line of a program
SILENT_END = (
    "has ended without a report: it was killed (out of memory?), has called os._exit, its machine is gone, or its backend has "
    "ended it, as gloo does if the collectives of ranks do not match; see its output or its machine's log"
)
PROGRAM_END = "has ended its program while others train; see its last output, and run equally many steps on all ranks"
LEFT_END = "has left its process group{}; all ranks must destroy it together, after training"
STOPPED = "whose process has not started, is stopped, or hangs"
LOST_END = "has not answered for {:g} s: its machine, or the network to it, is gone"
CRASH = "Fatal Python error: "
SAME_INPUTS = (
    "ranks %d and %d got the same inputs in their first two training steps, and compute the same gradients; give each rank data "
    "of its own, as with DataLoader(dataset, sampler=torch.utils.data.DistributedSampler(dataset))."
)
# Parts of errors that backends and the job's store raise if another rank is gone or does not respond.
BACKEND_ERRORS = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting|Socket Timeout|gloo|NCCL|timeout in"
    r"|Connection refused|recvValue|sendBytes|unbound_buffer|Failed to recv|simccl|Application timeout"
)
OWN_FOLDERS = tuple(f"{folder}{os.sep}" for folder in (Path(inspect.getfile(torch)).parent, Path(__file__).parents[2]))
STANDARD = f"{Path(threading.__file__).parent}{os.sep}"


# -- errors


def is_echo(error: BaseException) -> bool:
    """Return True if `error` is a follow-on error: it was raised because another rank is gone or does not respond."""
    return is_backends_echo(error) or (isinstance(error, DivergenceError) and error.of_rank is not None)


def is_backends_echo(error: BaseException) -> bool:
    """Return True if `error` is a follow-on error that a backend raised, which does not name the other rank."""
    return isinstance(error, RuntimeError) and BACKEND_ERRORS.search(str(error)) is not None


def is_out_of_time(error: BaseException) -> bool:
    """Return True if `error` is the timeout of a backend, for which gloo has two phrases."""
    return any(words in str(error) for words in ("imed out", "Application timeout"))


def failure(error: BaseException, phase: str = "") -> str:
    """Return text for other ranks on how this rank failed, the end of a sentence that begins with "rank R". `phase`: the phase of
    its step, such as "in the forward of step 3"."""
    place = place_of_error(error)
    when = f" {phase}" if phase else ""
    if was_interrupted(error):
        return f"was interrupted (Ctrl-C or SIGINT){when}"
    if is_backends_echo(error):
        # If it waited in an exception handler (a barrier in `finally`), the handled error is the cause.
        return f"waited for others in vain {place or 'in a collective'}{when}{while_handling(_handled_by(error))}"
    return f"failed{when}: {_named(error, place)}"


def was_interrupted(error: BaseException) -> bool:
    """Return True if `error` is a KeyboardInterrupt, or a backend's error that was raised while one was being handled."""
    return isinstance(_handled_by(error) if is_backends_echo(error) else error, KeyboardInterrupt)


def while_handling(error: BaseException | None) -> str:
    """Return a suffix such as " while it handles ValueError: ..."; "" for None, SystemExit, StopIteration and GeneratorExit."""
    if error is None or isinstance(error, (SystemExit, StopIteration, GeneratorExit)):
        return ""
    return f" while it handles {_named(error, place_of_error(error))}"


def _handled_by(error: BaseException) -> BaseException | None:
    """Return the newest error that was being handled when `error` was raised and that is no follow-on error, or None."""
    seen, context = {id(error)}, error.__context__
    while context is not None and is_echo(context) and id(context) not in seen:
        seen.add(id(context))
        context = context.__context__
    return None if context is None or is_echo(context) else context


def _named(error: BaseException, place: str) -> str:
    lines = of_another(str(error)).splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return f"{text[:ERROR_LETTERS]}{f' ({place})' if place and not isinstance(error, DivergenceError) else ''}"


def of_another(text: str) -> str:
    """Return `text`, which a rank wrote about itself, for other ranks to print: with "it" in place of "this rank"."""
    return text.replace("this rank", "it")


# -- stacks


def place_of(stack: Iterable[tuple[Any, int]]) -> str:
    """Return "at file:line `code`" of the first frame in `stack` that is not in torch, this package or the standard library; ""
    if there is none. `stack`: pairs of (frame, line number), the innermost first."""
    return _place((frame.f_code.co_filename, number) for frame, number in stack)


def place_of_error(error: BaseException) -> str:
    """Return "at file:line `code`" of the innermost frame of user code in the traceback of `error`; "" if there is none."""
    return place_of(reversed(list(traceback.walk_tb(error.__traceback__))))


def _place(lines: Iterable[tuple[str, int]]) -> str:
    for file, number in lines:
        if file.startswith(("<", *OWN_FOLDERS)) or (file.startswith(STANDARD) and "-packages" not in file):
            continue
        text = linecache.getline(file, number).strip()[:LINE_LETTERS]
        return f"at {os.path.basename(file)}:{number}{f' `{text}`' if text else ''}"
    return ""


def end_of(lines: Sequence[str]) -> str:
    """Return text on how a process ended that sent no report, as the end of a sentence that begins with "rank R". `lines`: what
    `faulthandler` wrote when the process crashed; otherwise empty."""
    if not lines or not lines[0].startswith(CRASH):
        return SILENT_END
    stacks: list[list[tuple[str, int]]] = [[]]
    is_current = False
    for line in lines[1:]:
        if "most recent call first" in line:
            if is_current:  # the thread that crashed; if none is marked, the main thread, which is the last
                break
            is_current = line.startswith("Current")
            stacks.append([])
        elif frame := re.match(r' *File "(.+)", line (\d+)', line):
            stacks[-1].append((frame[1], int(frame[2])))
    place = _place(stacks[-1])
    kind = lines[0].removeprefix(CRASH)
    return f"has crashed ({kind}){f' {place}' if place else ''}; gloo can crash if ranks call different collectives"


# -- ranks


def each_of(texts: Mapping[int, str]) -> str:
    """Return "rank R TEXT" of each rank, in rank order, joined with semicolons."""
    return "; ".join(f"rank {rank} {text}" for rank, text in sorted(texts.items()))


def numbers(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def meanwhile(doing: str, rank: int, text: str) -> str:
    return f"while this rank {doing}, rank {rank} {text}"


def doing_of(posts: Mapping[int, Mapping[str, Any]]) -> str:
    """Return "rank R WHAT" of each rank, joined with commas. WHAT is the entry `what` of its post, or else "has failed"."""
    return ", ".join(f"rank {rank} {post.get('what', 'has failed')}" for rank, post in posts.items())


# -- usual causes of divergence

ADVICE = "ranks may call different units only in a forward that all begin in the same way; put code that differs inside one unit."
ALL_TOGETHER = (
    "saves a checkpoint",
    "loads a checkpoint",
    "takes the full state dict",
    "shows full parameters",
    "clips gradients",
    "loads full tensors",
    "begins a backward",
)


def advice(reports: Mapping[int, Mapping[str, Any]]) -> str:
    """Return a sentence with the likely cause of a divergence and what to do; `ADVICE` if `reports` show no cause.

    `reports`: by rank, a dict with `what`, text on what the rank does; `caught`, text of an error it caught, or ""; and flags:
    its forward has no gradients (`evaluates`), it skipped a backward (`left_out`), its backward does not reduce (`adds_up`).
    """
    alone = {rank: one["what"] for rank, one in reports.items() if str(one.get("what", "")).startswith(ALL_TOGETHER)}
    for key, text in (
        (
            "caught",
            "has caught an error and continued ({}); all ranks must handle an error together, or the program must end",
        ),
        ("evaluates", "runs a forward without gradients and others do not; evaluate equally many batches on all ranks"),
        ("left_out", "has skipped the backward of its last forward; skip a batch on all ranks or on none"),
        ("adds_up", "runs its backward under no_sync and others do not; all ranks must"),
    ):
        ranks = [rank for rank, one in reports.items() if one.get(key)]
        if ranks and len(ranks) < len(reports):
            return f"{_each_of(ranks)} {text.format(reports[ranks[0]][key])}."
    if alone and len(alone) < len(reports):
        first = next(iter(alone))
        return f"{_each_of(list(alone))} {alone[first].split(',')[0]} alone; all ranks must do it."
    return ADVICE


def _each_of(ranks: list[int]) -> str:
    """Return "rank R" or "each of ranks R, S", so that a verb in the singular can follow."""
    return f"{'rank' if len(ranks) == 1 else 'each of ranks'} {numbers(ranks)}"


# -- steps that differ

STEPS = "steps before it"  # key of a record: the number of optimizer steps since the last backward
OF_FORWARD = frozenset({"autocast", "model"})  # keys of a record that come from its own forward
SHOWN = 3  # differences of a rank in a message


def step_differences(histories: Mapping[int, Mapping[str, Any]]) -> str:
    """Return an error text that names each rank whose record of a backward differs from the first rank's, and what differs in
    the first such backward; "" if no record differs. `histories`: by rank, a dict with the list `records`, whose entries are
    (number of the backward, step, dict of what the rank did before that backward)."""
    ranks = [rank for rank in sorted(histories) if histories[rank].get("records")]
    if len(ranks) < 2:
        return ""
    first = {num: record for num, _, record in histories[ranks[0]]["records"]}
    begun, differing = 0, []
    for rank in ranks[1:]:
        for num, step, record in histories[rank]["records"]:
            if (theirs := first.get(num, record)) == record:
                continue
            keys = [key for key in {**theirs, **record} if theirs.get(key) != record.get(key)]
            # If only one rank stepped, its options are no news.
            keys = [key for key in keys if (key in theirs) == (key in record)] or keys
            each = [
                f"{key} {record.get(key, 'none')} (rank {ranks[0]}: {theirs.get(key, 'none')})" for key in keys[:SHOWN]
            ]
            if record[STEPS] != "0" and OF_FORWARD.issuperset(keys):
                step += 1  # the step of the backward; other keys belong to the optimizer step before it
            differing.append(f"rank {rank} has {'; '.join(each)}")
            begun = min(begun or step, step)
            break
    if not differing:
        return ""
    return (
        f"ranks step differently since step {begun}: {' / '.join(differing)}; give every rank the same optimizer, options "
        "and number of steps, and modify weights in the same way on all ranks."
    )
