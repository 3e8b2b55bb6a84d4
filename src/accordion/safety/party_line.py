"""The party line: one connection of each rank to the first, on which all hear who has failed or ended, and where each one is.

It is used by nobody in the common case: a thread sleeps until somebody speaks or hangs up. It needs no collective, no device and
not the job's store, which ends with the rank that keeps it. The end of a process closes its connection, however it came.
"""

from __future__ import annotations

import errno
import faulthandler
import inspect
import json
import linecache
import logging
import os
import re
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from accordion import _torch
from accordion.errors import DivergenceError
from accordion.safety.connections import AskedStore, give_up, limit_s_of
from accordion.safety.mixed_tensors import advise

log = logging.getLogger("accordion")
KEPT = "accordion/line/"  # before the ranks of a line, in the name under which it is kept
CONNECT_S = 5.0
MEETING_S = (
    60.0  # after which nobody can join: the socket that listens is open while ranks meet, and not during the job
)
GREETING_BYTES = 40  # the word of this line, 32 letters, and the rank, 8 digits: a stranger does not count
READ_BYTES = 1 << 16
TOLD_LETTERS = 400  # of an error
LINE_LETTERS = 120  # of a line of a program
ECHO_S = 2.0  # in which the cause of what looks like an echo is heard, if anybody tells
NAMED_S = 3.0  # after which a rank whose device may wait for another one says so
KEPT_STEPS = 64  # digests of steps that the first rank keeps
NOTICED_STEPS = 4  # backwards in which all ranks have heard that some step differently, to say how at one and the same
LOOK_S = 1.0  # between two looks of the thread whether the job's store answers
WARNED = -1  # in place of a digest of inputs, once it was said that two ranks have the same
ANSWER_S = 1.0  # in which a thread that listens has answered
SILENT_END = (
    "has ended without a word: it was killed (is memory full?), has called os._exit, its machine is gone, or its backend has "
    "ended it, as gloo does where collectives of ranks do not match; its output or its machine's log may tell"
)
PROGRAM_END = (
    "has ended its program, while others train; see what it printed last, and have all ranks take as many steps"
)
LEFT_END = "has left its process group{}; all ranks must leave it together, when all have trained"
STOPPED = "whose process has not begun, is stopped, or hangs"
LOST_END = "its machine, or the network to it, is gone"
CRASH = "Fatal Python error: "
LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)  # as the system says it
BACKEND_WORDS = (
    *(
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Timed out waiting",
        "Socket Timeout",
        "gloo",
    ),
    *(
        "NCCL",
        "timeout in",
        "Connection refused",
        "recvValue",
        "sendBytes",
        "unbound_buffer",
        "Failed to recv",
        "simccl",
        "Application timeout",
    ),
)


def spellings(file: str, up: int = 0) -> tuple[str, ...]:
    """A folder around a file, as its files may name it: an environment is often reached through a link."""
    return tuple(f"{path.parents[up]}{os.sep}" for path in (Path(file).absolute(), Path(file).resolve()))


OWN_FOLDERS = (*spellings(inspect.getfile(torch)), *spellings(__file__, 1))
STANDARD = spellings(threading.__file__)


def is_echo(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone or does not come: its cause lies there."""
    if isinstance(error, DivergenceError):
        return error.of_rank is not None
    return isinstance(error, RuntimeError) and any(word in str(error) for word in BACKEND_WORDS)


def told(error: BaseException, phase: str = "") -> str:
    """How others are told that this rank fails with an error, as the end of a sentence that begins with its number."""
    place = _place_of_error(error)
    when = f" {phase}" if phase else ""
    if _was_interrupted(error):
        return f"was interrupted (Ctrl-C or SIGINT){when}"
    if _waited_in_vain(error):
        # An error whose handlers wait (barriers in `finally`) is what the others are to be told of: the waits are its echoes.
        return f"waited for others in vain {place or 'in a collective'}{when}{in_hand(_handled_by(error))}"
    return f"failed{when}: {_named(error, place)}"


def _waited_in_vain(error: BaseException) -> bool:
    """Whether it is an echo as a backend words it; ours say more."""
    return is_echo(error) and not isinstance(error, DivergenceError)


def _was_interrupted(error: BaseException) -> bool:
    return isinstance(_handled_by(error) if _waited_in_vain(error) else error, KeyboardInterrupt)


def _handled_by(error: BaseException) -> BaseException | None:
    """The newest error in whose handlers `error` was raised that is no echo itself; None if there is none."""
    seen, found = {id(error)}, error.__context__
    while found is not None and is_echo(found) and id(found) not in seen:
        seen.add(id(found))
        found = found.__context__
    return None if found is None or is_echo(found) else found


def _named(error: BaseException, place: str) -> str:
    lines = of_another(str(error)).splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return f"{text[:TOLD_LETTERS]}{f' ({place})' if place and not isinstance(error, DivergenceError) else ''}"


def of_another(text: str) -> str:
    """What a rank says of itself as the others tell it."""
    return text.replace("this rank", "it")


def in_hand(error: BaseException | None) -> str:
    """That a rank does what it does because of an error, or in the midst of one: as the end of a sentence; empty without one."""
    if error is None or isinstance(error, (SystemExit, StopIteration, GeneratorExit)):
        return ""
    return f" while it handles {_named(error, _place_of_error(error))}"


def _error_of(thread: int) -> BaseException | None:
    """What `sys.exception()` gives that thread."""
    found: Any = sys._current_exceptions().get(thread)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # 3.11 gives what `sys.exc_info` does
    return error


def _place_of_error(error: BaseException) -> str:
    return place_of(reversed(list(traceback.walk_tb(error.__traceback__))))


class PartyLine:
    """Owns this rank's end of the line over `ranks`; the thread that listens and the sockets go with it.

    `ended`: by rank, how its program has ended, for good. `failed`: by rank, of which model, what it says of a step that failed,
    until it goes on. `doing`: what this rank does with others now, in words; None where that is nothing.
    """

    def __init__(self, ranks: Sequence[int], rank: int, store: Any, name: str) -> None:
        """A collective of `ranks`, who meet in `store` under `name`."""
        self.doing: str | None = None
        self.names_waits = False  # whether this rank may wait on its device, where only the thread can say for whom
        self.phase = ""  # of the step under way, in words that follow a verb
        self.store = AskedStore(store, _torch.timeout_s_of_job())
        self._ends = _Ends(sorted(ranks), rank, weakref.ref(self), self.store)
        self.ended, self.failed = self._ends.ended, self._ends.failed
        word = secrets.token_hex(16)
        if self._ends.leads:
            own = ""
            with suppress(OSError):
                own = f"{word} {self._ends.open(word)}"
            store.set(f"{name}/line", own)
        elif said := store.get(f"{name}/line").decode():
            word, port, host = said.split(" ", 2)
            with suppress(OSError):
                self._ends.connect(host, int(port), f"{word}{rank:08d}".encode())
        self._ends.start()
        self._before = sys.excepthook
        self._hook = _told_first(weakref.ref(self), self._before)
        sys.excepthook = self._hook
        self._hang_up = weakref.finalize(self, _hang_up, self._ends, self._hook, self._before)

    @classmethod
    def of_job(cls, ranks: Sequence[int], rank: int, store: Any, name: str) -> PartyLine:
        """The line of these ranks, made at the first call; it goes with the job's process groups. A collective."""
        kept = f"{KEPT}{sorted(ranks)}"
        found: list[PartyLine] = _torch.kept_with_job(kept)
        if found and not found[0].is_closed:
            return found[0]
        made = cls(ranks, rank, store, name)
        _torch.keep_with_job(kept, made)
        return made

    @property
    def is_closed(self) -> bool:
        return self._ends.closed or self._ends.pid != os.getpid()

    def close(self) -> None:
        """Hang up, telling the others that this rank has left."""
        self._hang_up()

    @property
    def ranks(self) -> list[int]:
        return self._ends.ranks

    # -- what this rank says

    def say_failed(self, model: str, text: str) -> None:
        """A step of a model has failed here, so that others wait for it in vain; `text` follows the rank's number."""
        self._ends.say({"failed": of_another(text), "model": model})

    def say_waits(self, what: str) -> None:
        """This rank waits long where others may not notice; empty: no more."""
        self._ends.say({"waits": what})

    def say_well(self, model: str) -> None:
        """What was said of that model holds no longer."""
        self._ends.say({"well": model})

    def say_ended(self, text: str, *, echo: bool = False) -> None:
        """This rank's program ends, and why; said once. `echo`: because of what another rank did."""
        self._ends.say_ended(text, echo)

    def say_steps(self, model: str, num: int, chain: int) -> None:
        """The digest of all steps of a model up to its backward `num`; the first rank holds it against its own."""
        self._ends.say_steps(model, num, chain)

    def say_inputs(self, model: str, digest: int) -> None:
        """The digest of a model's first inputs on this rank; the first rank warns if it had it from another one."""
        self._ends.say_inputs(self._ends.rank, model, digest)

    # -- what it hears

    def unlike_at(self, model: str) -> int | None:
        """At which backward of a model all ranks say how they have stepped, because some differ; None while none do."""
        return self._ends.unlike.get(model)

    def gone(self, ranks: Sequence[int]) -> tuple[int, str] | None:
        """The first of `ranks` that has ended, and how; None while all are there."""
        return next(((rank, self.ended[rank]) for rank in list(self.ended) if rank in ranks), None)

    def cause(self, wait_s: float = 0.0, model: str | None = None) -> tuple[int, str] | None:
        """The rank that failed or ended first, of itself, and what it says; waits a little for it, since echoes are fast.

        `model`: steps of others that failed do not count.
        """
        return self._ends.cause(wait_s, model)

    def where(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where each of `ranks` is that can be asked, in words."""
        return self._ends.where([rank for rank in ranks if rank not in self.ended])

    def told_of(self, ranks: Sequence[int], *, all_of_them: bool = True) -> str:
        """The same as a sentence's part, and how those ended that have; `all_of_them`: with those that cannot be asked."""
        where = self.where(ranks)
        where |= {rank: text for rank, text in list(self.ended.items()) if rank in ranks}
        others = [f"rank {rank} {text}" for rank, text in sorted(where.items())]
        silent = [str(rank) for rank in ranks if rank not in (*where, self._ends.rank)]
        if silent and all_of_them:
            others.append(f"nothing is heard of rank {', '.join(silent)}, {STOPPED}")
        return "; ".join(others)


class _Ends:
    """Owns the sockets of one rank and what was heard on them; shared by the line and its thread, and keeps no line alive."""

    def __init__(self, ranks: list[int], rank: int, line: weakref.ref[PartyLine], store: AskedStore) -> None:
        self._store = store
        self.ranks, self.rank, self._line, self.pid = ranks, rank, line, os.getpid()
        self.leads = rank == ranks[0]
        self.ended: dict[int, str] = {}
        self.failed: dict[int, dict[str, str]] = {}
        self.closed = False
        # In the order in which they were heard: rank, model or "" for the whole program, and what was said.
        self._causes: list[tuple[int, str, str]] = []
        self._echoes: list[tuple[int, str, str]] = []
        self._waits: dict[int, str] = {}  # by rank, of those that wait long
        self.unlike: dict[str, int] = {}  # by model whose ranks step differently, the backward at which all say how
        # Of the first rank, by model and backward: its own digest of steps, and which ranks have said another.
        self._steps: dict[str, dict[int, int]] = {}
        self._others: dict[str, dict[int, set[int]]] = {}
        self._inputs: dict[
            str, dict[int, int]
        ] = {}  # of the first rank: by model and digest of inputs, which rank had it
        self._answers: dict[int, dict[int, str]] = {}
        self._num_asked = 0
        self._heard, self._sending = threading.Condition(), threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._server: socket.socket | None = None
        self._word = b""
        self._peers: dict[int, socket.socket] = {}
        self._parts: dict[int, bytes] = {}
        self._has_said_end = False
        self._main = threading.main_thread().ident
        self._timeout_s = _torch.timeout_s_of_job()
        self._crashes: dict[int, list[str]] = {}  # by rank, what its last words are where it crashes
        self._to_crash: int | None = (
            None  # a descriptor, which stays open as long as Python may write such words into it
        )

    # -- connections

    def open(self, word: str) -> str:
        """Of the first rank: take connections; gives port and address."""
        family, host = own_address()
        self._word = word.encode()
        self._server = socket.create_server((host, 0), family=family, backlog=len(self.ranks))
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ, None)
        return f"{self._server.getsockname()[1]} {host}"

    def connect(self, host: str, port: int, greeting: bytes) -> None:
        first = socket.create_connection((host, port), CONNECT_S)
        first.sendall(greeting)
        self._take(self.ranks[0], first)

    def _take(self, rank: int, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.settimeout(CONNECT_S)  # of what is sent: a few hundred bytes
        give_up(peer, self._timeout_s)
        self._peers[rank] = peer
        self._parts[rank] = b""
        self._selector.register(peer, selectors.EVENT_READ, rank)
        if not faulthandler.is_enabled():  # else the user, or a line before this one, has those words elsewhere
            self._to_crash = os.dup(peer.fileno())
            faulthandler.enable(self._to_crash)

    def start(self) -> None:
        if self._server is None and not self._peers:
            return
        os.register_at_fork(after_in_child=_weakly(weakref.WeakMethod(self._forked)))
        threading.Thread(target=self._listen, name="accordion-party-line", daemon=True).start()

    def _forked(self) -> None:
        """In a child that holds the sockets too: its life must not pass for the rank's."""
        self.closed = True
        self._aim_crash()
        self._close()

    def _aim_crash(self) -> None:
        """Have the words of a crash go to one who hears them, or nowhere. Who may have asked for them since is left alone."""
        if self._to_crash is None:
            return
        hears = None if self.closed else next(iter(self._peers.values()), None)
        target = os.open(os.devnull, os.O_WRONLY) if hears is None else os.dup(hears.fileno())
        os.dup2(target, self._to_crash, inheritable=False)
        os.close(target)

    def _close(self) -> None:
        for each in [*self._peers.values(), *([] if self._server is None else [self._server])]:
            with suppress(OSError):
                each.close()

    def hang_up(self) -> None:
        """Say that this rank leaves, if nothing was said, and close."""
        if self.closed or self.pid != os.getpid():
            return
        error = sys.exception()
        over = sys.is_finalizing() or not _main_runs()
        self.say_ended(PROGRAM_END if over else LEFT_END.format(in_hand(error)), error is not None and is_echo(error))
        self.closed = True
        self._aim_crash()
        for peer in list(self._peers.values()):
            with suppress(OSError):
                peer.shutdown(socket.SHUT_WR)  # wakes who listens there, and what was said still arrives

    # -- the thread

    def _listen(self) -> None:
        deadline = time.monotonic() + MEETING_S
        while not self.closed or self._peers:  # closed, it waits for the others to hang up too: what was said arrives
            left = LOOK_S if self._server is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
            events = self._selector.select(CONNECT_S if self.closed else left)
            if self.closed and not events:
                break
            self._store.look()
            for key, _ in events:
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data, key.fileobj)
            if self._server is not None and (len(self._peers) == len(self.ranks) - 1 or time.monotonic() > deadline):
                self._selector.unregister(self._server)
                self._server.close()
                self._server = None
        self._close()
        self._selector.close()

    def _accept(self) -> None:
        assert self._server is not None, "who accepts listens"
        try:
            peer, _ = self._server.accept()
            peer.settimeout(CONNECT_S)
            greeting = b""
            while len(greeting) < GREETING_BYTES and (part := peer.recv(GREETING_BYTES - len(greeting))):
                greeting += part
        except OSError:
            return
        if greeting[:32] == self._word and len(greeting) == GREETING_BYTES:
            self._take(int(greeting[32:]), peer)
            for told in self._history():
                self._send(peer, told)
        else:
            peer.close()

    def _history(self) -> list[dict[str, Any]]:
        """What one who comes late has not heard."""
        return [{"rank": rank, "ended": text} for rank, text in self.ended.items()]

    def _read(self, rank: int, peer: Any) -> None:
        is_lost = False
        try:
            data = peer.recv(READ_BYTES)
        except OSError as error:
            if error.errno is None:  # nothing is there after all
                return
            data, is_lost = b"", error.errno in LOST
        if not data:
            self._selector.unregister(peer)
            self._peers.pop(rank, None)
            self._aim_crash()
            peer.close()
            if rank not in self.ended and not self.closed:
                crash = crash_of(self._crashes.get(rank, []))
                silent = f"has crashed {crash}" if crash else SILENT_END
                end = f"has not answered for {limit_s_of(self._timeout_s):g} s: {LOST_END}" if is_lost else silent
                self._hear({"rank": rank, "ended": end}, None)
            return
        *lines, self._parts[rank] = (self._parts[rank] + data).split(b"\n")
        for line in lines:
            if line.startswith(b"{") and line.endswith(b"}"):
                self._hear(json.loads(line), rank)
            else:
                self._crashes.setdefault(rank, []).append(line.decode(errors="replace"))

    def _hear(self, said: dict[str, Any], through: int | None) -> None:
        """Note what a rank says, and pass it on where this rank is the first."""
        if "chain" in said:
            self._compare(said["model"], said["num"], said["chain"], own=False)
            return
        if "inputs" in said:
            self.say_inputs(said["rank"], said["model"], said["inputs"])
            return
        with self._heard:
            self._note(said)
            self._heard.notify_all()
        if self.leads and said["rank"] != self.rank:
            self._send_all(said, but=said["rank"])
        line = self._line()
        if line is not None and line.names_waits and said["rank"] != self.rank and self._names(said["rank"]):
            timer = threading.Timer(NAMED_S, self._name, (said["rank"], self._names(said["rank"]), self._here()))
            timer.daemon = True
            timer.start()
        if "ask" in said:
            self._send_all({"rank": self.rank, "answers": said["ask"], "to": said["rank"], "where": self._here()})

    def _names(self, rank: int) -> str:
        """Why it is of no use to wait for a rank on a device; empty where nothing is known."""
        failed = [text for r, _, text in self._causes if r == rank]
        return failed[0] if failed else self._waits.get(rank, "")

    def _name(self, rank: int, text: str, place: str) -> None:
        """Some time has passed since `rank` said so: name it, if this rank is where it was then."""
        if not self.closed and self._names(rank) == text and self._here() == place:
            log.error(
                "rank %d %s, and this rank %s and may wait for it on its device, where no wait ends by itself; all ranks must "
                "take the same way through the model.", rank, text.rstrip("."), place,
            )  # fmt: skip

    def _note(self, said: dict[str, Any]) -> None:
        rank = said["rank"]
        if "waits" in said:
            self._waits[rank] = said["waits"]
        if "ended" in said:
            self.ended.setdefault(rank, said["ended"])
            (self._echoes if said.get("echo") else self._causes).append((rank, "", said["ended"]))
        elif "failed" in said:
            self.failed.setdefault(rank, {})[said["model"]] = said["failed"]
            self._causes.append((rank, said["model"], said["failed"]))
        elif "well" in said:
            self.failed.get(rank, {}).pop(said["well"], None)
            self._causes = [each for each in self._causes if each[:2] != (rank, said["well"])]
        elif "unlike" in said:
            self.unlike.setdefault(said["model"], said["unlike"])
        elif "answers" in said and said["to"] == self.rank and said["answers"] in self._answers:
            self._answers[said["answers"]][rank] = said["where"]

    def _here(self) -> str:
        """Where this rank is: what it does with others, and the line of the user's program at which its main thread is."""
        line = self._line()
        if line is None:
            return "is outside of the model"
        doing = line.doing or ("is in the model" if line.phase.startswith("in ") else "is outside of the model")
        place = place_of(traceback.walk_stack(frame) if (frame := sys._current_frames().get(self._main or 0)) else ())
        parts = (doing, line.phase, "" if " at " in doing else place)
        return " ".join(part for part in parts if part) + in_hand(_error_of(self._main or 0))

    # -- sending

    def _send(self, peer: socket.socket, said: Mapping[str, Any]) -> None:
        with self._sending, suppress(OSError):
            peer.sendall(json.dumps(said).encode() + b"\n")

    def _send_all(self, said: Mapping[str, Any], but: int | None = None) -> None:
        for rank, peer in list(self._peers.items()):
            if rank != but:
                self._send(peer, said)

    def say(self, said: Mapping[str, Any]) -> None:
        if not self.closed:
            self._send_all({"rank": self.rank, **said})

    def say_ended(self, text: str, echo: bool = False) -> None:
        if not self._has_said_end:
            self._has_said_end = True
            self.say({"ended": text, "echo": echo})

    def say_steps(self, model: str, num: int, chain: int) -> None:
        if self.leads:
            self._compare(model, num, chain, own=True)
        else:
            self.say({"model": model, "num": num, "chain": chain})

    def _compare(self, model: str, num: int, chain: int, *, own: bool) -> None:
        """Of the first rank: hold a digest against its own, or its own against those that came before it."""
        with self._heard:
            steps, others = self._steps.setdefault(model, {}), self._others.setdefault(model, {})
            if own:
                steps[num] = chain
                while len(steps) > KEPT_STEPS:
                    del steps[next(iter(steps))]
                differs = bool(others.pop(num, set()) - {chain})
            else:
                differs = num in steps and steps[num] != chain
                if num not in steps and num > max(steps, default=0):  # this rank is not so far yet
                    others.setdefault(num, set()).add(chain)
            if not differs or model in self.unlike:
                return
            at = self.unlike[model] = max(steps) + NOTICED_STEPS
        self._send_all({"rank": self.rank, "model": model, "unlike": at})

    def say_inputs(self, rank: int, model: str, digest: int) -> None:
        if not self.leads:
            self.say({"model": model, "inputs": digest})
            return
        with self._heard:
            ranks = self._inputs.setdefault(model, {})
            other = ranks.setdefault(digest, rank)
            is_first = other != rank and WARNED not in ranks
            if is_first:
                ranks[WARNED] = rank
        if is_first:
            log.warning(
                "ranks %d and %d got the same inputs in their first two training steps, and compute the same gradients; give "
                "each rank data of its own, as with DataLoader(dataset, sampler=torch.utils.data.DistributedSampler(dataset)).",
                *sorted((other, rank)),
            )

    def cause(self, wait_s: float, model: str | None) -> tuple[int, str] | None:
        deadline = time.monotonic() + wait_s

        def found() -> list[tuple[int, str, str]]:
            return [each for each in self._causes if model is None or each[1] in ("", model)]

        with self._heard:
            while not found() and (left := deadline - time.monotonic()) > 0:
                self._heard.wait(left)
            return next(((rank, text) for rank, _, text in [*found(), *self._echoes]), None)

    def where(self, ranks: Sequence[int]) -> dict[int, str]:
        with self._heard:
            self._num_asked += 1
            number, wanted = self._num_asked, (set(ranks) - {self.rank}) if self._peers else set[int]()
            self._answers[number] = {}
        self.say({"ask": number})
        deadline = time.monotonic() + ANSWER_S
        with self._heard:
            while not wanted <= set(self._answers[number]) and (left := deadline - time.monotonic()) > 0:
                self._heard.wait(left)
            return dict(sorted(self._answers.pop(number).items()))


def _weakly(method: weakref.WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    def call() -> None:
        found = method()
        if found is not None:
            found()

    return call


def _main_runs() -> bool:
    """Whether the program has not come to its end."""
    return threading.main_thread().is_alive() and not sys.is_finalizing()


def place_of(stack: Iterable[tuple[Any, int]]) -> str:
    """The innermost line of a stack that is neither torch's nor ours: "at" a file, its line, and what stands there."""
    return _place((frame.f_code.co_filename, number) for frame, number in stack)


def _place(lines: Iterable[tuple[str, int]]) -> str:
    for file, number in lines:
        if file.startswith(("<", *OWN_FOLDERS)) or (file.startswith(STANDARD) and "-packages" not in file):
            continue
        text = linecache.getline(file, number).strip()[:LINE_LETTERS]
        return f"at {os.path.basename(file)}:{number}{f' `{text}`' if text else ''}"
    return ""


def crash_of(words: Sequence[str]) -> str:
    """What `faulthandler` writes of a crash, as a sentence's end: the stack of the thread that crashed, else of the main one."""
    if not words or not words[0].startswith(CRASH):
        return ""
    stacks: list[list[tuple[str, int]]] = [[]]
    is_current = False
    for line in words[1:]:
        if "most recent call first" in line:
            if is_current:
                break
            is_current = line.startswith("Current")
            stacks.append([])
        elif found := re.match(r' *File "(.+)", line (\d+)', line):
            stacks[-1].append((found[1], int(found[2])))
    place = _place(stacks[-1])
    kind = words[0].removeprefix(CRASH)
    return f"({kind}){f' {place}' if place else ''}; gloo lets a process crash where ranks call different collectives"


def _hang_up(ends: _Ends, hook: Callable[..., None], before: Callable[..., None]) -> None:
    ends.hang_up()
    if sys.excepthook is hook:
        sys.excepthook = before


def _told_first(reference: weakref.ref[PartyLine], before: Callable[..., Any]) -> Callable[..., None]:
    """The hook for what ends a program: the others are told, and of an echo its cause is said before anything else."""

    def hook(kind: type[BaseException], error: BaseException, tb: Any) -> None:
        line = reference()
        # torch has a warning that became an error printed so, while another error is on its way, and the program goes on.
        if line is not None and not line.is_closed and not isinstance(error, Warning):
            with suppress(Exception):  # what is said here is a help, and never in the way of the error itself
                explain(line, error)
        before(kind, error, tb)

    return hook


def explain(line: PartyLine, error: BaseException) -> str:
    """This rank ends with `error`: tell the others, and print the cause where the error itself is only an echo of it.

    Return the printed text. Torch's error about mixed tensors gets a note.
    """
    said = ""
    advise(error)
    interrupted = _was_interrupted(error)
    if _waited_in_vain(error) and not interrupted:
        line.doing = told(error)
        said = why_in_vain(line, told(error, line.phase), echo_s(error))
        print(f"accordion: {said}", file=sys.stderr, flush=True)
    line.say_ended(told(error, line.phase), echo=is_echo(error) and not interrupted)
    return said


def echo_s(error: BaseException) -> float:
    """For how long to wait for the cause of an echo: where only time has run out nobody has ended."""
    return 0.0 if is_out_of_time(error) else ECHO_S


def is_out_of_time(error: BaseException) -> bool:
    """Whether a backend gave up waiting: gloo has two words for it."""
    return any(words in str(error) for words in ("imed out", "Application timeout"))


def why_in_vain(line: PartyLine, this: str, wait_s: float) -> str:
    """One sentence on why this rank, which waited in vain, ends: who ended first, or where the others are."""
    if (cause := line.cause(wait_s)) is not None:
        return f"this rank {this}, and rank {cause[0]} {cause[1].rstrip('.')}."
    others = "; ".join(f"rank {rank} {text}" for rank, text in line.where(line.ranks).items())
    return f"this rank {this}, and {others or 'nothing is heard of the others'}: all ranks must do the same."


@contextmanager
def together(what: str) -> Iterator[None]:
    """What ranks do together before there is a line: where a backend fails, the words say what this rank did."""
    try:
        yield
    except RuntimeError as error:
        if not is_echo(error):
            raise
        raise DivergenceError(
            f"this rank {what}, and another rank has ended, cannot be reached, or does something else, as its own words tell; "
            "all ranks must do it together."
        ) from error


def lines_of_job() -> list[PartyLine]:
    """All of this process that are open."""
    return [line for line in _torch.kept_with_job(KEPT) if not line.is_closed]


def own_address() -> tuple[Any, str]:
    """Under which the others reach this machine: from where it would speak to the job's store. Raises `OSError`."""
    store = _torch.default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = (store.host, store.port) if isinstance(store, TCPStore) else (socket.gethostname(), 1)
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # which sends nothing
        probe.connect(address)
        return family, str(probe.getsockname()[0])
