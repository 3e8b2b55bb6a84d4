"""The hub: a star of TCP connections over which ranks report failures, ends and positions, and hold barriers with reports.

In the common case nothing is sent: a thread of each rank sleeps until a message arrives or a connection closes.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Any

from accordion import _torch
from accordion.errors import WAYS_OUT, advise
from accordion.safety.liveness import messages, wording
from accordion.safety.liveness.links import HubLinks
from accordion.safety.liveness.polling import poll

log = logging.getLogger("accordion")
KEPT = "accordion/hub/"  # prefix of the names under which the job keeps hubs
ANSWER_S = 1.0  # time for ranks to answer a question
ECHO_S = 2.0  # time for the rank that caused a follow-on error to report
NAMED_S = 3.0  # after which a rank that may wait on its device for a failed rank logs that
FOR_FIRST = (messages.Arrival, messages.InputDigest)  # messages that the first rank alone acts on
WARNED = -1  # in place of a digest of inputs, after the warning


class Position:
    """The position of this rank; `DivergenceMonitor` sets its attributes. `str` returns it as text for other ranks: what the
    rank is `doing` with others, or else if it is in the model; the `phase` of its step; and the line of the program."""

    def __init__(self) -> None:
        self.doing: str | None = None
        self.phase = ""
        self.may_wait_on_device = False  # such a wait never ends, so the hub's thread logs which rank will not join
        self._thread = threading.get_ident()  # that shards the model; Ray Train's is not the main one

    def __str__(self) -> str:
        doing = self.doing or ("is in the model" if self.phase.startswith("in ") else "is outside of the model")
        frame = sys._current_frames().get(self._thread)
        place = ""
        if " at " not in doing:
            place = wording.place_of(traceback.walk_stack(frame)) if frame is not None else ""
            # While Python prints an uncaught error, the stack has been unwound; the error's traceback has the place.
            if not place and (error := last_error()) is not None:
                place = wording.place_of_error(error)
        current: Any = sys._current_exceptions().get(self._thread)
        handled = current[1] if isinstance(current, tuple) else current  # 3.11 gives `sys.exc_info()`
        return " ".join(text for text in (doing, self.phase, place) if text) + wording.while_handling(handled)


class Hub:
    """This rank's side of the connections between `links.ranks`, from `of_job`: sends reports (`post`, `explain`, `arrive`),
    and stores those of other ranks (`posts`, `gone`, `cause`, `over`).

    `ended`: by rank, text on how its program has ended. `lost`: the entries of `ended` for ranks whose connection is closed. A
    meeting is a barrier with a name at which ranks exchange texts if these differ. `called`: names of the meetings that another
    rank has joined with `wakes=True` and that are not over. `over`: by name, the result of each meeting that all ranks have
    joined; whoever waits for the result removes it.
    """

    def __init__(self, links: HubLinks) -> None:
        self._links, self.ranks, self.rank = links, links.ranks, links.rank
        self.position = Position()
        self.ended: dict[int, str] = {}
        self.lost: dict[int, str] = {}
        self._changed = threading.Condition()
        # In order of arrival: rank, model or "" for the whole program, and text. Echoes are follow-on errors.
        self._causes: list[tuple[int, str, str]] = []
        self._echoes: list[tuple[int, str, str]] = []
        self._posts: dict[str, dict[int, dict[str, Any]]] = {}  # by model and rank
        self._answers: dict[int, dict[int, str]] = {}  # by number of the question
        self._questions = count()
        self.called: set[str] = set()
        self.over: dict[str, messages.MeetingOver] = {}
        # On the first rank: arrivals at meetings, by name and rank, and by model and digest of inputs the rank that had it first.
        self._arrivals: dict[str, dict[int, messages.Arrival]] = {}
        self._inputs: dict[str, dict[int, int]] = {}
        self._has_reported_end = self._is_explained = False
        self.lease: Callable[[], Any] = lambda: None  # returns the lease, while there is one

    @classmethod
    def of_job(cls, ranks: Sequence[int], rank: int, store: Any, name: str) -> Hub:
        """Return the hub of `ranks`. The first call creates it and starts its thread, and is a collective. The hub closes when
        the job's process groups are destroyed and no save holds its lease. `store`, `name`: the first rank puts its address
        into `store` under a key that begins with `name`. Raises `DivergenceError` if ranks cannot connect."""
        ranks = sorted(ranks)
        hubs = [hub for hub in hubs_of_job() if hub.ranks == ranks]
        if hubs:
            return hubs[0]
        hub = cls(HubLinks(ranks, rank))
        hub._links.connect(store, f"{name}/hub")
        hub._links.start(hub.receive, hub._check_main_thread)
        lease = _Lease(hub)
        hub.lease = weakref.ref(lease)
        _torch.keep_with_job(f"{KEPT}{ranks}", lease)
        return hub

    @property
    def is_closed(self) -> bool:
        """True after `end`, and in a forked process."""
        return self._links.closed

    def pause(self, seconds: float) -> None:
        """Sleep until this rank stores or answers a message, its own posts included, at most for `seconds`."""
        with self._changed:
            self._changed.wait(seconds)

    # -- what this rank reports

    def post(self, model: str, report: dict[str, Any] | None) -> None:
        """Send `report` (see `Post`) on the model named `model` to all ranks, in place of the last; None withdraws that."""
        message = messages.Post(rank=self.rank, model=model, report=report)
        self._note(message)
        self._links.send(message)

    def say_ended(self, text: str, *, echo: bool = False) -> None:
        """Report that this program ends, for the reason `text`; only the first call counts. `echo`: another rank caused it."""
        if not self._has_reported_end:
            self._has_reported_end = True
            self._links.send(messages.HasEnded(rank=self.rank, text=text, echo=echo))

    def explain(self, error: BaseException) -> None:
        """Report that this rank ends with `error`. If a backend raised `error` because of another rank, first wait up to
        `ECHO_S` (not after a timeout) for the cause, and print a sentence with the cause, or else with what other ranks do.
        Later calls do nothing."""
        if self._is_explained:
            return
        self._is_explained = True
        if wording.is_backends_echo(error) and not wording.was_interrupted(error):
            this = f"this rank {wording.failure(error, self.position.phase)}"
            self.position.doing = wording.failure(error)
            cause = self.cause(0.0 if wording.is_out_of_time(error) else ECHO_S)
            if cause is not None:
                why = f"rank {cause[0]} {cause[1].rstrip('.')}."
            else:
                others = wording.each_of(self.where(self.ranks)) or "no other rank answers"
                why = f"{others}: all ranks must do the same."
            print(f"accordion: {this}, and {why}", file=sys.stderr, flush=True)
        self._say_failed(error)

    def _say_failed(self, error: BaseException) -> None:
        is_echo = wording.is_echo(error) and not wording.was_interrupted(error)
        self.say_ended(wording.failure(error, self.position.phase), echo=is_echo)

    def end(self) -> None:
        """Report to the other ranks that this rank leaves, unless it has reported its end, and close the hub. If an uncaught
        error ends the program, report the error instead, and print its cause or advice. Does nothing if the hub is closed."""
        if self.is_closed:
            return
        is_exit = sys.is_finalizing() or not threading.main_thread().is_alive()
        error = last_error() if is_exit else sys.exception()
        if is_exit and error is not None:
            self.explain(error)
            if advise(error):  # Python has printed the error
                print(f"accordion: {WAYS_OUT}", file=sys.stderr, flush=True)
        text = wording.PROGRAM_END if is_exit else wording.LEFT_END.format(wording.while_handling(error))
        self.say_ended(text, echo=error is not None and wording.is_echo(error))
        self._links.close()

    def _check_main_thread(self) -> None:
        """If the main thread has ended, report the end of the program or its error, even if other threads (a save) go on. Does
        nothing if this rank has reported its end before."""
        if self.is_closed or self._has_reported_end or threading.main_thread().is_alive():
            return
        if (error := last_error()) is None:
            self.say_ended(wording.PROGRAM_END)
        else:
            self._say_failed(error)

    def arrive(self, name: str, num: int, text: str, facts: dict[str, Any] | None = None, **how: bool) -> None:
        """Join meeting `name` of `num` ranks, without waiting; the result will be in `over`. Ranks compare `text`, not `facts`.
        `how`: with `wakes=True` ranks that wait in a collective join; with `quiet=True` equal texts have no result."""
        self.send_to_first(messages.Arrival(rank=self.rank, name=name, num=num, text=text, facts=facts or {}, **how))

    # -- what other ranks report

    def posts(self, model: str) -> dict[int, dict[str, Any]]:
        """Return a copy of the reports on the model named `model` that are not withdrawn, by rank and in rank order."""
        with self._changed:
            return dict(sorted(self._posts.get(model, {}).items()))

    def gone(self, ranks: Sequence[int], model: str | None = None) -> tuple[int, str] | None:
        """Return None if none of `ranks` has ended. Otherwise return (rank, text) of the failure or end that came first, which
        may be that of another rank. With `model`, failed steps of other models do not count."""
        gone = next(((rank, text) for rank, text in list(self.ended.items()) if rank in ranks), None)
        return None if gone is None else self.cause(model=model) or gone

    def cause(self, wait_s: float = 0.0, model: str | None = None) -> tuple[int, str] | None:
        """Return (rank, text) of the first failure or end of another rank; None if none is known within `wait_s`. A follow-on
        error counts only if no other failure is known. With `model`, failed steps of other models do not count."""

        def causes_of_model() -> list[tuple[int, str, str]]:
            with self._changed:
                return [each for each in self._causes if model is None or each[1] in ("", model)]

        causes = poll(causes_of_model, wait_s, pause=self.pause) or self._echoes
        return next(((rank, text) for rank, _, text in causes), None)

    def where(self, ranks: Sequence[int]) -> dict[int, str]:
        """Ask those of `ranks`, except this one, that have not ended for their positions; return rank -> text of the answers
        within `ANSWER_S`."""
        wanted = {rank for rank in ranks if rank not in (*self.ended, self.rank)}
        number = next(self._questions)
        answers = self._answers[number] = {}
        self._links.send(messages.PositionQuestion(rank=self.rank, number=number))
        if self._links.peers:
            poll(lambda: wanted <= set(answers), ANSWER_S, pause=self.pause)
        with self._changed:
            return dict(sorted((rank, text) for rank, text in self._answers.pop(number).items() if rank in wanted))

    def others(self, ranks: Sequence[int], *, silent_too: bool = True) -> str:
        """Ask those of `ranks` that have not ended what they do, wait up to `ANSWER_S`, and return text on what each one does or
        how it ended. `silent_too`: also name ranks that do not answer. The text is "" if there is nothing to tell."""
        where = self.where(ranks) | {rank: text for rank, text in list(self.ended.items()) if rank in ranks}
        silent = [rank for rank in ranks if rank not in (*where, self.rank)] if silent_too else []
        if not self._links.leads and self.ranks[0] in silent:
            silent = self.ranks[:1]  # all answers pass through it, so nothing is known about the others
        unknown = f"there is no answer from rank {wording.numbers(silent)}, {wording.STOPPED}" if silent else ""
        return "; ".join(text for text in (wording.each_of(where), unknown) if text)

    def send_to_first(self, message: messages.HubMessage) -> None:
        """Send `message` to the first rank, which acts on it. On the first rank, act on it now."""
        if self._links.leads:
            self.receive(message)
        else:
            self._links.send(message, to=self.ranks[0])

    # -- receiving

    def receive(self, message: messages.HubMessage) -> None:
        """On the first rank, pass `message` on. On every rank, answer or store it, unless its kind is in `FOR_FIRST`."""
        with self._changed:
            if self._links.leads:  # forwards first, since the message may end its process
                self._pass_on(message)
            if not isinstance(message, FOR_FIRST):
                self._note(message)

    def _pass_on(self, message: messages.HubMessage) -> None:
        """Count arrivals at meetings, warn if two ranks have equal inputs, send an answer to the rank that asked, and any other
        message to all ranks."""
        match message:
            case messages.Arrival(name=name):
                arrivals = self._arrivals.setdefault(name, {})
                arrivals[message.rank] = message
                if len(arrivals) == message.num:
                    del self._arrivals[name]
                    reports = [(rank, arrival.text, arrival.facts) for rank, arrival in sorted(arrivals.items())]
                    is_same = len({text for _, text, _ in reports}) == 1
                    over = messages.MeetingOver(rank=self.rank, name=name, reports=None if is_same else reports)
                    self._send_and_note(over, [] if is_same and message.quiet else arrivals)
                elif len(arrivals) == 1 and message.wakes:
                    others = [rank for rank in self.ranks if rank != message.rank]
                    self._send_and_note(messages.MeetingCalled(rank=message.rank, name=name), others)
            case messages.InputDigest(rank=rank):
                ranks = self._inputs.setdefault(message.model, {})
                other = ranks.setdefault(message.digest, rank)
                if other != rank and WARNED not in ranks:
                    ranks[WARNED] = other
                    log.warning(wording.SAME_INPUTS, *sorted((other, rank)))
            case messages.PositionAnswer():
                self._links.send(message, to=message.to)
            case _:
                self._links.send(message, but=message.rank)

    def _send_and_note(self, message: messages.HubMessage, to: Collection[int]) -> None:
        """Send a message of the first rank to the ranks `to`, and store it here if this rank is one of them."""
        for rank in to:
            if rank != self.rank:
                self._links.send(message, to=rank)
        if self.rank in to:
            self._note(message)

    def _note(self, message: messages.HubMessage) -> None:
        with self._changed:
            match message:
                case messages.HasEnded(rank=rank, text=text):
                    if rank not in self.ended:
                        self.ended[rank] = text
                        (self._echoes if message.echo else self._causes).append((rank, "", text))
                    if message.closed:
                        self.lost[rank] = self.ended[rank]
                case messages.Post():
                    self._note_post(message)
                case messages.PositionQuestion(rank=rank, number=number):
                    answer = messages.PositionAnswer(rank=self.rank, number=number, to=rank, where=str(self.position))
                    self._links.send(answer, to=rank if self._links.leads else None)
                case messages.PositionAnswer(number=number):
                    if message.to == self.rank and number in self._answers:
                        self._answers[number][message.rank] = message.where
                case messages.MeetingCalled():
                    self.called.add(message.name)
                case messages.MeetingOver():
                    self.called.discard(message.name)
                    self.over[message.name] = message
            self._changed.notify_all()
        if self.position.may_wait_on_device and message.rank != self.rank and (why := self._why_not(message.rank)):
            timer = threading.Timer(NAMED_S, self._log_wait, (message.rank, why, str(self.position)))
            timer.daemon = True
            timer.start()

    def _note_post(self, message: messages.Post) -> None:
        posts = self._posts.setdefault(message.model, {})
        posts.pop(message.rank, None)
        if message.report is not None:
            posts[message.rank] = message.report
        if message.rank != self.rank:
            self._causes = [each for each in self._causes if each[:2] != (message.rank, message.model)]
            if message.report is not None and "failed" in message.report:
                self._causes.append((message.rank, message.model, message.report["failed"]))

    def _why_not(self, rank: int) -> str:
        """Return text on why `rank` will not join a collective on a device; "" if nothing is known."""
        causes = {model: text for r, model, text in self._causes if r == rank}
        posts = [posts[rank]["what"] for posts in self._posts.values() if "what" in posts.get(rank, {})]
        # The end of its program counts most. A rank that waits with one model has continued after a failed step of another one.
        return causes.get("") or next(iter([*posts, *causes.values()]), "")

    def _log_wait(self, rank: int, text: str, place: str) -> None:
        """Log that `rank` will not join a collective for which this rank may wait on its device. `text`: the reason. `place`:
        this rank's position. Does nothing if the reason or the position is another one by now, because a rank has moved on."""
        if not self.is_closed and self._why_not(rank) == text and str(self.position) == place:
            log.error(
                "rank %d %s, and this rank %s and may wait for it on its device, where waits never time out; all ranks must "
                "call the same units.",
                rank,
                text.rstrip("."),
                place,
            )


class _Lease:
    """Ends `hub` when nothing refers to this object any more: neither the job's process groups nor a save in progress."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        weakref.finalize(self, hub.end)


def hubs_of_job() -> list[Hub]:
    """Return the open hubs of this process."""
    return [lease.hub for lease in _torch.kept_with_job(KEPT) if not lease.hub.is_closed]


def last_error() -> BaseException | None:
    """Return the uncaught error that ended the program, which Python keeps until its exit; None if there is none, if it is a
    warning, and in an interactive session."""
    error: BaseException | None = getattr(sys, "last_exc", getattr(sys, "last_value", None))
    # An interactive session keeps the last error of any statement. torch prints a warning that became an error like one that
    # ends the program, and continues.
    return None if isinstance(error, Warning) or hasattr(sys, "ps1") else error
