"""Whether all ranks do the same: asked where a rank does what it did not do last time, and where one is waited for long."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import Communicator, Pending, common_name
from accordion.engine.context import ShardingContext
from accordion.engine.observer import CallInForward, Observer
from accordion.errors import DivergenceError, UsageError
from accordion.safety.causes import ADVICE, advice
from accordion.safety.party_line import PartyLine, echo_s, in_hand, is_out_of_time, of_another, told

log = logging.getLogger("accordion")
LOST_S = 600.0  # as long as NCCL lets a collective wait
# Beyond the time-out of the job's process group, if that is shorter: in a collective ranks wait no longer. What follows, the
# question to the others and the program's end, has to fit into the five seconds that are promised, too.
MARGIN_S = 1.0
PATIENCE_S = 4.0  # a wait beyond it is told to the others
POLL_S = 1.0
HEARD_S = 2.0  # in which ranks that part have said where they are
NOTICE_S = 0.05  # after it a rank that waits looks whether others ask where it is
NOTICE = timedelta(seconds=NOTICE_S)
SILENT_POLLS = 30  # after which a rank that waits names those of which it hears nothing
CALM_PASSES = (
    3  # after so many without a word between ranks a device is not asked to compare tags: it would take kernels
)
SAID_STEPS = 8  # how often ranks tell the first one the digest of their steps, where no reduce bears it
POLLS = 3  # one after the other, in all of which ranks must be found apart: one may just be leaving
UNHEARD = (
    'Here ranks that wait in a collective cannot be asked, and end by the backend\'s time-out; debug="order" has all ranks '
    "agree on each unit."
)


Noticed = Callable[[str], dict[int, dict[str, Any]]]
"""Given what this rank does: meets the others, and gives what each of them says."""


class DivergenceMonitor(Observer):
    """Owns what this rank tells the others of where it is, through the job's store. Nothing is said in the common case.

    Ranks meet where one leaves the order of the last pass. A rank that did not leave it waits in its next collective
    meanwhile, notices that others ask, and comes too; `OrderAgreement` finds what each does. Where ranks wait for each other in
    other ways, each says so after `PATIENCE_S`: when all wait and nobody can go on, each says where all are.
    On streams of NCCL the host does not wait and notices nothing; the ranks that left the order name themselves after `LOST_S`.
    """

    def __init__(self, communicators: Sequence[Communicator], ranks: Sequence[int]) -> None:
        """`communicators`: of this rank. `ranks`: all of the model, by their number in the job. A collective."""
        communicators = [each for each in communicators if each.num_ranks > 1 and not each.is_fake]
        self._ranks = sorted(ranks)
        # Ranks that wait do so on their devices, or in works of which no wait may time out, and are not asked meanwhile.
        self.asks_in_vain = not all(communicator.can_poll for communicator in communicators)
        self.listens = bool(communicators)  # whether there is any other rank
        self.broken: str | None = None  # why no collective is safe any more: what others have sent may still arrive
        self._noticed: Callable[[], Noticed | None] = lambda: None
        self._posted, self._num_looks = False, 0
        self._num_met = 0
        self.num_calm = 0  # forwards of the whole model since ranks met
        self._passed: tuple[str, ...] = ()  # this rank's keys of the last meeting
        self._prefix, self._rank = f"accordion/{common_name(communicators)}", dist.get_rank() if communicators else 0
        # Weakly: it ends with the job's process groups, which a model may outlive.
        self._line: Callable[[], PartyLine | None] = lambda: None
        self._store: Any = None  # an `AskedStore` where there are other ranks
        if self.listens:
            line = PartyLine.of_job(self._ranks, self._rank, _torch.default_store(), self._prefix)
            self._store = line.store
            line.names_waits = line.names_waits or self.asks_in_vain
            self._line = weakref.ref(line)
        self.num_steps = 0  # of optimizers, on parameters of this model
        self._failed_in = ""  # the unit in whose forward an error came up
        self._has_told = False
        self._facts: dict[str, Any] = {}  # of this rank's last passes, for `advice`
        self._awaits_backward = self._has_caught = self._in_backward = False
        # Of `StepWatch`: what it tells of this rank's steps, and what differs between those of ranks.
        self.history: Callable[[], dict[str, Any]] = dict
        self.compare: Callable[[Mapping[int, Mapping[str, Any]]], str] = lambda posts: ""

    def listen(self, noticed: Noticed) -> None:
        """Have the method `noticed`, of an object that others keep, called when this rank waits and others ask where it is."""
        self._noticed = weakref.WeakMethod(noticed)

    def check(self) -> None:
        """Raise where a pass of the model could not end: ranks have parted before, or this one has left its process group."""
        if self.listens and self._line() is None and not dist.is_initialized():
            raise UsageError(
                "a sharded model was called after dist.destroy_process_group(), where its ranks cannot reach each other; call it "
                "before, or shard it again in the next process group."
            )
        if self.broken is not None:
            raise DivergenceError(f"ranks of this model have drifted apart before, start the job anew: {self.broken}")

    # -- the moments of a step

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        self.num_calm += 1
        self.forget()
        if self._in_backward:  # which an error has ended
            self._has_caught, self._in_backward = True, False
            self._facts["caught"] = f"failed {self._last_phase()}{in_hand(sys.exception())}"
        self._facts = {
            "evaluates": not differentiable,
            "left_out": self._awaits_backward,
            "adds_up": not reduces,
            "caught": self._facts.get("caught", "") if self._awaits_backward or self._has_caught else "",
        }
        self._awaits_backward = self._awaits_backward or differentiable
        self._has_caught = False
        self._enters("in the forward" if differentiable else "in a forward without gradients")

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        if error is not None and not self._failed_in:
            self._failed_in = f", in unit {call.unit.index} ({call.unit.name or 'root'})"
        return out

    def forward_ends(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, DivergenceError):  # of that every rank knows
            failed = f"{told(error, self._phase('in the forward'))}{self._failed_in}"
            self.tell(failed)
            self._has_caught, self._facts["caught"] = True, failed
        self._failed_in = ""
        self._enters("after the forward")

    def backward_begins(self) -> None:
        self._awaits_backward, self._in_backward = False, True
        self._enters("in the backward")

    def backward_ended(self, reduced: bool) -> None:
        self._in_backward = False
        self._enters("after the backward")

    def _enters(self, where: str) -> None:
        line = self._line()
        if line is not None:
            line.phase, line.doing = self._phase(where), None

    def _last_phase(self) -> str:
        line = self._line()
        return "" if line is None else line.phase

    def _phase(self, where: str) -> str:
        return f"{where} of step {self.num_steps + 1}"

    # -- before a step that needs a word

    def meet(self, said: Mapping[str, Any]) -> dict[int, dict[str, Any]] | None:
        """Wait until every rank has come here; give what each `said`, by rank, or None where all said the same.

        `said`: JSON; `what` in it is for messages. Raises `DivergenceError` where ranks wait for each other elsewhere.
        """
        self.num_calm = 0
        if self._store is None:
            return None
        here, what, everyone = f"{self._prefix}/met/{self._num_met}", said["what"], len(self._ranks)
        mine = _as_summand(json.dumps(said), everyone)
        total = self._asked(self._store.add, f"{here}/all", mine, what=what)
        if not _is_of_all(total, everyone):
            total = self._until(lambda: self._total_of_all(f"{here}/all"), what)
        found = None
        if total != everyone * mine:
            keys = [f"{here}/{rank}" for rank in self._ranks]
            self._asked(self._store.set, f"{here}/{self._rank}", json.dumps({**said, **self._facts}), what=what)
            self._until(lambda: self._store.check(keys), what)
            found = {r: json.loads(self._store.get(key)) for r, key in zip(self._ranks, keys, strict=True)}
        self.forget()
        self._num_met += 1
        for key in self._passed:  # every rank has passed the one before
            self._store.delete_key(key)
        of_all = (f"{here}/all",) if self._rank == self._ranks[0] else ()
        self._passed = of_all if found is None else (f"{here}/{self._rank}", *of_all)
        return found

    def _total_of_all(self, key: str) -> int | None:
        """What all have added up, once the last has come."""
        total: int = self._store.add(key, 0)
        return total if _is_of_all(total, len(self._ranks)) else None

    def _until(self, ask: Callable[[], Any], what: str) -> Any:
        """Wait until `ask` gives something, which other ranks bring about; gives that."""
        lost_s = min(LOST_S, _torch.timeout_s_of_job() + MARGIN_S)
        num_apart, next_s, deadline, waits = 0, min(PATIENCE_S, lost_s), time.monotonic() + lost_s, False
        while not (answer := self._asked_for(ask, next_s, what)):
            self.busy(what)
            if self.asks_in_vain and not waits:
                waits = self._say_waits(self._doing(what))
            num_apart, next_s = self._look(self._ranks, what, num_apart), POLL_S
            if time.monotonic() > deadline:
                text = f"this rank {what}, and other ranks have come to nothing new in {lost_s:g} s"
                self.fail(f"{text}{self._unheard(self._posts(), ': ')}; {ADVICE}")
        self.busy(None)
        if waits:
            self._say_waits("")
        return answer

    def apart(self, said: Mapping[int, Mapping[str, Any]]) -> NoReturn:
        """What all ranks have said does not go together."""
        self.fail(f"ranks are not at the same place: {_each(said)}; {advice(said)}")

    def _asked_for(self, ask: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """The first answer that is something, or nothing in time. A wait in the store would warn of its time-out on stderr."""
        deadline, pause_s = time.monotonic() + timeout_s, 5e-5
        while not (answer := self._asked(ask, what=what)):
            if (gone := self._gone(self._ranks)) is not None and not (answer := self._asked(ask, what=what)):
                self._break(f"while this rank {self._doing(what)}, rank {gone[0]} {gone[1]}", of_rank=gone[0])
            if answer or time.monotonic() > deadline:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        return answer

    def _asked(self, ask: Callable[..., Any], *args: Any, what: str) -> Any:
        """What the store answers, which ends with the rank that keeps it."""
        try:
            return ask(*args)
        except RuntimeError as error:
            self._echo(what, error)

    # -- other ranks that are gone

    def _gone(self, ranks: Sequence[int]) -> tuple[int, str] | None:
        """Who of `ranks` has ended, or because of whom, and how."""
        line = self._line()
        if line is None or (gone := line.gone(ranks)) is None:
            return None
        return line.cause(0.0, self._prefix) or gone

    def busy(self, what: str | None) -> None:
        """What this rank does with others, for those who ask."""
        line = self._line()
        if line is not None:
            line.doing = what

    def _say_waits(self, what: str) -> bool:
        line = self._line()
        if line is not None:
            line.say_waits(what)
        return bool(what)

    def _doing(self, what: str) -> str:
        line = self._line()
        if line is None or not line.phase:
            return what
        return f"{what} (step {self.num_steps + 1})" if "ward" in what else f"{what} {line.phase}"

    def _where(self, ranks: Sequence[int]) -> dict[int, str]:
        line = self._line()
        return {} if line is None else line.where(ranks)

    def _echo(self, what: str, error: BaseException) -> NoReturn:
        """A backend or the store has failed under this rank: mostly because of another one, who is named."""
        line = self._line()
        cause = None if line is None else line.cause(echo_s(error), self._prefix)
        if cause is None and self._store is not None and (lost := self._store.lost()):
            self._break(f"while this rank {self._doing(what)}, {lost}", error)
        if cause is not None:
            self._break(f"while this rank {self._doing(what)}, rank {cause[0]} {cause[1]}", error, of_rank=cause[0])
        said = str(error).splitlines()[0]
        others = "" if line is None else line.told_of(self._ranks, all_of_them=is_out_of_time(error))
        if others:
            timeout_s = _torch.timeout_s_of_job()
            text = f"this rank {self._doing(what)}, and others did not come in {timeout_s:g} s or left it: {others}"
            self.fail(f"{text}; all ranks must do the same with the model.", error)
        # The backend's own words are obscure where ranks have drifted apart: sizes or peers that do not fit.
        text = f"a collective failed while this rank {what}: {said}; another rank has failed, "
        self.fail(f"{text}cannot be reached, or is elsewhere: {ADVICE}", error)

    # -- in a collective

    def wait(self, pending: Pending, what: str) -> None:
        """Wait for works; raise `DivergenceError` where another rank has failed, or is somewhere else for good."""
        for work in pending.works:
            num_apart, waited_s, asked_s, gone_s, next_s = 0, 0.0, None, None, NOTICE_S
            timeout = NOTICE if pending.communicator.can_poll else None  # without one, until the backend's own
            while not self._done(work, timeout, what):
                waited_s += next_s
                next_s = min(2 * next_s, POLL_S)
                timeout = timedelta(seconds=next_s)
                self.busy(what)
                if (gone := self._gone(pending.communicator.ranks)) is not None and gone_s is None:
                    gone_s = waited_s
                if gone is not None and waited_s - (gone_s or 0.0) >= POLL_S and not work.is_completed():
                    self._break(f"while this rank {self._doing(what)}, rank {gone[0]} {gone[1]}", of_rank=gone[0])
                if self._store is not None and self._asked(
                    self._store.check, [f"{self._prefix}/met/{self._num_met}/all"], what=what
                ):
                    noticed = self._noticed()
                    assert noticed is not None, "who meets others can be asked by them"
                    said, asked_s = noticed(what), waited_s if asked_s is None else asked_s
                    if waited_s - asked_s > POLLS * PATIENCE_S and not work.is_completed():
                        self.apart(said)  # was asked before, and is where it was
                elif waited_s >= PATIENCE_S:
                    num_apart = self._look(pending.communicator.ranks, what, num_apart)
        for work in pending.sends:
            self._done(work, None, what)
        if self._posted:
            self.forget()
            self.busy(None)

    def _done(self, work: Any, timeout: timedelta | None, what: str) -> bool:
        try:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        except RuntimeError as error:
            if timeout is not None and "Operation timed out" in str(error):
                # It may have ended since; whether well, a wait that cannot time out says.
                return work.is_completed() and self._done(work, None, what)
            self._echo(what, error)
        return True

    def _look(self, ranks: list[int], what: str, num_apart: int) -> int:
        """Tell the others that this rank waits for `ranks`; fail where all wait for each other in different places.

        `num_apart`: in how many polls up to now, one after the other, that was so; returns it with this one.
        """
        posts = self._asked(self._post_and_look, {"ranks": ranks, "what": self._doing(what), **self._facts}, what=what)
        for rank, post in posts.items():
            if "failed" in post:
                self._break(f"while this rank {self._doing(what)}, rank {rank} {post['failed']}", of_rank=rank)
        # Where all whom a rank waits for are there, it is slow, but it goes on.
        self._num_looks += 1
        silent = self._unheard(posts, "")
        hint = f" {UNHEARD}" if self.asks_in_vain else ""
        if silent and self._num_looks == SILENT_POLLS:
            log.warning("rank %d %s, %s: all must call the model.%s", self._rank, what, silent, hint)
        complete = any(all(_place(posts.get(r, {})) == _place(post) for r in post["ranks"]) for post in posts.values())
        if complete or len(posts) < len(self._ranks):
            return 0
        if num_apart + 1 == POLLS:
            self.fail(f"ranks wait for each other in different places: {_each(posts)}; {advice(posts)}")
        return num_apart + 1

    def _unheard(self, posts: Mapping[int, Any], before: str) -> str:
        ranks = [rank for rank in self._ranks if rank not in posts]
        if not ranks:
            return ""
        where = self._where(ranks)
        if set(where) >= set(ranks):
            return before + ", ".join(f"rank {rank} {text}" for rank, text in where.items())
        return f"{before}nothing is heard of rank {', '.join(map(str, ranks))}"

    def _post_and_look(self, what: dict[str, Any]) -> dict[int, dict[str, Any]]:
        self._post(what)
        return self._posts()

    def _post(self, what: dict[str, Any]) -> None:
        self._store.set(self._key(self._rank), json.dumps(what))
        self._posted = True

    def _posts(self) -> dict[int, dict[str, Any]]:
        found = {}
        for rank in self._ranks:
            if self._store.check([self._key(rank)]):
                found[rank] = json.loads(self._store.get(self._key(rank)))
        return found

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    # -- failures

    def fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        """Tell the others, who may wait for this rank, and raise."""
        self.tell(f"failed: {text}")
        self._break(text, cause)

    def _break(self, text: str, cause: BaseException | None = None, of_rank: int | None = None) -> NoReturn:
        self.broken = text
        error = DivergenceError(text)
        error.of_rank = of_rank
        raise error from cause

    def tell(self, text: str) -> None:
        """Let those who wait for this rank know that it will not come; `text` follows its number."""
        if (line := self._line()) is not None:
            line.say_failed(self._prefix, text)
            self._has_told = True
        if self._store is not None:
            with suppress(RuntimeError):  # the store has ended with the rank that kept it
                self._post({"failed": of_another(text), **self._facts})

    def forget(self) -> None:
        """What was told holds no longer."""
        if self._has_told and (line := self._line()) is not None:
            line.say_well(self._prefix)
        self._has_told = False
        if self._posted:
            self._store.delete_key(self._key(self._rank))
            self._posted, self._num_looks = False, 0

    def _heard(self) -> dict[int, dict[str, Any]]:
        """What each rank says, once all have said something or enough time is gone: those that part find it at one time."""
        deadline, posts = time.monotonic() + HEARD_S, {}
        with suppress(RuntimeError):
            while len(posts := self._posts()) < len(self._ranks) and time.monotonic() < deadline:
                time.sleep(0.02)
        return posts

    def looks(self, device: torch.device) -> bool:
        """Whether tags are compared now: those of ranks that go on as in the last pass are the last pass's."""
        return self.listens and (self.num_calm <= CALM_PASSES or device.type == "cpu")

    def same_everywhere(self, rows: Tensor, mine: Tensor, what: str) -> None:
        """Fail unless each row of `rows` (num_ranks, n) is `mine` (n,); on a device, assert there. `what` this rank does."""
        if self._store is None:
            return
        if rows.device.type != "cpu":
            apart = f"ranks are in different units: this rank {what}, another rank another one; {ADVICE}"
            _torch.assert_on_device((rows == mine).all(), apart)
        elif not torch.equal(rows, mine.expand_as(rows)):
            self._fail_apart(what)

    def say_steps(self, num: int, chain: int) -> None:
        """The digest of this rank's steps up to backward `num`: each of the first ones, then each `SAID_STEPS`-th.

        Raises `DivergenceError`, at the same backward on every rank, if those of some differ.
        """
        line = self._line()
        if line is None:
            return
        at = line.unlike_at(self._prefix)
        if at is not None and num >= at:
            self._fail_apart("begins a backward")
        if num <= SAID_STEPS or num % SAID_STEPS == 0:
            line.say_steps(self._prefix, num, chain)

    def say_inputs(self, digest: int) -> None:
        """Send the digest of this rank's first inputs to the first rank, which warns if another rank has the same."""
        line = self._line()
        if line is not None:
            line.say_inputs(self._prefix, digest)

    def _fail_apart(self, what: str) -> NoReturn:
        """What ranks have sent does not go together: say what each one does, or in what their steps differ."""
        self._has_told = True
        with suppress(RuntimeError):
            self._post(
                {
                    "failed": f"failed: ranks are apart, and this one {what}",
                    "what": what,
                    **self._facts,
                    **self.history(),
                }
            )
        posts = self._heard()
        text = self.compare(posts)
        if not text and all("what" in post for post in posts.values()) and len(posts) == len(self._ranks):
            text = f"ranks are in different units: {_each(posts)}; {advice(posts)}"
        elif not text:
            others = ", ".join(
                f"rank {rank} {post['what']}" for rank, post in posts.items() if rank != self._rank and "what" in post
            )
            gone = self._gone(self._ranks)
            ended = "" if gone is None else f"; rank {gone[0]} {gone[1]}"
            each = f"this rank {what}, {others or 'another rank another one'}{ended}"
            text = f"ranks are in different units: {each}; {advice(posts)}"
        if (line := self._line()) is not None:
            line.say_failed(self._prefix, f"failed: {text}")
        self._break(text)


def _as_summand(text: str, num: int) -> int:
    """A number of which `num` can be added up below 2 ** 63. The sum tells how many there are, and whether their texts differ.

    One counter of the store is all that a meeting costs so: with 20,000 ranks a digest still has 32 bits.
    """
    bits = num.bit_length()
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    return 1 + (digest % (1 << 62 - 2 * bits) << bits)


def _is_of_all(total: int, num: int) -> bool:
    return total % (1 << num.bit_length()) == num


def monitor_of(context: ShardingContext) -> DivergenceMonitor:
    """The one with which a context was made."""
    assert isinstance(context.waiter, DivergenceMonitor), "who makes contexts gives them one"
    return context.waiter


def _place(post: Mapping[str, Any]) -> tuple[Any, Any]:
    return post.get("ranks"), post.get("what")


def _each(posts: Mapping[int, Mapping[str, Any]]) -> str:
    return ", ".join(f"rank {rank} {post.get('what', 'has failed')}" for rank, post in posts.items())
