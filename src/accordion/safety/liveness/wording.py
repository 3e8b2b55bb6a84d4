"""How ranks describe errors, stacks and each other, as parts of sentences. Pure functions."""

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
    "has ended without a word: it was killed (is memory full?), has called os._exit, its machine is gone, or its backend has "
    "ended it, as gloo does where collectives of ranks do not match; its output or its machine's log may tell"
)
PROGRAM_END = (
    "has ended its program, while others train; see what it printed last, and have all ranks take as many steps"
)
LEFT_END = "has left its process group{}; all ranks must leave it together, when all have trained"
STOPPED = "whose process has not begun, is stopped, or hangs"
LOST_END = "has not answered for {:g} s: its machine, or the network to it, is gone"
CRASH = "Fatal Python error: "
# Parts of errors by which backends and the job's store say that another rank is gone or does not come.
BACKEND_ERRORS = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting|Socket Timeout|gloo|NCCL|timeout in"
    r"|Connection refused|recvValue|sendBytes|unbound_buffer|Failed to recv|simccl|Application timeout"
)


def spellings(file: str, up: int = 0) -> tuple[str, ...]:
    """Return the folder `up` levels above a file's own, as its path is written and with links resolved."""
    return tuple(f"{path.parents[up]}{os.sep}" for path in (Path(file).absolute(), Path(file).resolve()))


OWN_FOLDERS = (*spellings(inspect.getfile(torch)), *spellings(__file__, 2))
STANDARD = spellings(threading.__file__)


# -- errors


def is_echo(error: BaseException) -> bool:
    """Return True if an error only says that another rank is gone or does not come: its cause is on that rank."""
    if isinstance(error, DivergenceError):
        return error.of_rank is not None
    return isinstance(error, RuntimeError) and BACKEND_ERRORS.search(str(error)) is not None


def is_backends_echo(error: BaseException) -> bool:
    """Return True for an echo in a backend's words; our own errors say more."""
    return is_echo(error) and not isinstance(error, DivergenceError)


def is_out_of_time(error: BaseException) -> bool:
    """Return True if a backend gave up waiting. gloo has two phrases for that."""
    return any(words in str(error) for words in ("imed out", "Application timeout"))


def failure(error: BaseException, phase: str = "") -> str:
    """Describe this rank's failure for others, as the end of a sentence that begins with its number.

    `phase`: where its step was, as in "in the forward of step 3".
    """
    place = _place_of_error(error)
    when = f" {phase}" if phase else ""
    if was_interrupted(error):
        return f"was interrupted (Ctrl-C or SIGINT){when}"
    if is_backends_echo(error):
        # If it waited in a handler (a barrier in `finally`), the handled error is the news; the waits are its echoes.
        return f"waited for others in vain {place or 'in a collective'}{when}{while_handling(_handled_by(error))}"
    return f"failed{when}: {_named(error, place)}"


def was_interrupted(error: BaseException) -> bool:
    """Return True for a KeyboardInterrupt, and for a wait that failed while one was handled."""
    return isinstance(_handled_by(error) if is_backends_echo(error) else error, KeyboardInterrupt)


def while_handling(error: BaseException | None) -> str:
    """Return a suffix such as " while it handles ValueError: ..."; empty if `error` is None or ends a program by itself."""
    if error is None or isinstance(error, (SystemExit, StopIteration, GeneratorExit)):
        return ""
    return f" while it handles {_named(error, _place_of_error(error))}"


def _handled_by(error: BaseException) -> BaseException | None:
    """Return the newest error in whose handlers `error` was raised and that is no echo; None if there is none."""
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
    """Turn what a rank says of itself into what others say of it."""
    return text.replace("this rank", "it")


# -- stacks


def place_of(stack: Iterable[tuple[Any, int]]) -> str:
    """Return "at file:line `code`" of the first frame of `stack` (innermost first) that is the user's; else an empty text."""
    return _place((frame.f_code.co_filename, number) for frame, number in stack)


def _place_of_error(error: BaseException) -> str:
    return place_of(reversed(list(traceback.walk_tb(error.__traceback__))))


def _place(lines: Iterable[tuple[str, int]]) -> str:
    for file, number in lines:
        if file.startswith(("<", *OWN_FOLDERS)) or (file.startswith(STANDARD) and "-packages" not in file):
            continue
        text = linecache.getline(file, number).strip()[:LINE_LETTERS]
        return f"at {os.path.basename(file)}:{number}{f' `{text}`' if text else ''}"
    return ""


def end_of(lines: Sequence[str]) -> str:
    """Describe the end of a process that reported nothing. `lines`: what `faulthandler` wrote of a crash, if anything."""
    if not lines or not lines[0].startswith(CRASH):
        return SILENT_END
    stacks: list[list[tuple[str, int]]] = [[]]
    is_current = False
    for line in lines[1:]:
        if "most recent call first" in line:
            if is_current:  # the thread that crashed; without one the main thread, which is the last
                break
            is_current = line.startswith("Current")
            stacks.append([])
        elif frame := re.match(r' *File "(.+)", line (\d+)', line):
            stacks[-1].append((frame[1], int(frame[2])))
    place = _place(stacks[-1])
    kind = lines[0].removeprefix(CRASH)
    return f"has crashed ({kind}){f' {place}' if place else ''}; gloo lets a process crash where ranks call different collectives"


# -- ranks


def each_of(texts: Mapping[int, str], between: str = "; ") -> str:
    """Join "rank R TEXT" of all ranks."""
    return between.join(f"rank {rank} {text}" for rank, text in sorted(texts.items()))


def numbers(ranks: Iterable[int]) -> str:
    """Join the numbers of ranks with commas."""
    return ", ".join(map(str, ranks))


def others_are(where: Mapping[int, str], silent: Sequence[int]) -> str:
    """Say where ranks are, or how they have ended, and which ones do not answer."""
    parts = [each_of(where)] if where else []
    if silent:
        parts.append(f"nothing is heard of rank {numbers(silent)}, {STOPPED}")
    return "; ".join(parts)


def in_vain(this: str, cause: tuple[int, str] | None, where: Mapping[int, str]) -> str:
    """Say why a rank that waited in vain ends. `this`: its `failure`. `where`: of the others, if no `cause` is known."""
    if cause is not None:
        return f"this rank {this}, and rank {cause[0]} {cause[1].rstrip('.')}."
    return f"this rank {this}, and {each_of(where) or 'nothing is heard of the others'}: all ranks must do the same."


def meanwhile(doing: str, rank: int, text: str) -> str:
    """Say that this rank was `doing` something with others, and what became of another rank."""
    return f"while this rank {doing}, rank {rank} {text}"


def nothing_new(what: str, waited_s: float, others: str, advice: str) -> str:
    """Say that other ranks have not come to a meeting. `others`: what is known of them."""
    return f"this rank {what}, and other ranks have come to nothing new in {waited_s:g} s{others and f': {others}'}; {advice}"


def absent(doing: str, timeout_s: float, others: str) -> str:
    """Say that other ranks have not come to a collective, and where they are."""
    return (
        f"this rank {doing}, and others did not come in {timeout_s:g} s or left it: {others}; all ranks must do the same with "
        "the model."
    )


def collective_failed(what: str, error: BaseException, advice: str) -> str:
    """Give a backend's own words, which are obscure if ranks have diverged: sizes or peers that do not fit."""
    return (
        f"a collective failed while this rank {what}: {str(error).splitlines()[0]}; another rank has failed, cannot be reached, "
        f"or is elsewhere: {advice}"
    )


def circle(posts: Mapping[int, Mapping[str, Any]], advice: str) -> str:
    """Say that ranks wait for each other in different places."""
    return f"ranks wait for each other in different places: {doing_of(posts)}; {advice}"


def not_together(posts: Mapping[int, Mapping[str, Any]], advice: str) -> str:
    """Say that what all ranks are about to do does not fit together."""
    return f"ranks are not at the same place: {doing_of(posts)}; {advice}"


def in_different_units(each: str, advice: str) -> str:
    """Say that messages of different units have met in one collective."""
    return f"ranks are in different units: {each}; {advice}"


def doing_of(posts: Mapping[int, Mapping[str, Any]]) -> str:
    """Join what each rank does."""
    return ", ".join(f"rank {rank} {post.get('what', 'has failed')}" for rank, post in posts.items())


def waits_on_device(rank: int, text: str, place: str) -> str:
    """Say that another rank will not come, if this one may wait for it in a collective on its device."""
    return (
        f"rank {rank} {text.rstrip('.')}, and this rank {place} and may wait for it on its device, where no wait ends by itself; "
        "all ranks must take the same way through the model."
    )


def same_inputs(ranks: Sequence[int]) -> str:
    """Say that two ranks train on the same data."""
    return (
        f"ranks {ranks[0]} and {ranks[1]} got the same inputs in their first two training steps, and compute the same gradients; "
        "give each rank data of its own, as with DataLoader(dataset, sampler=torch.utils.data.DistributedSampler(dataset))."
    )
