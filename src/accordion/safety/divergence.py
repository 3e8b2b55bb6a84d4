"""Detect ranks that execute different steps.

Ranks meet when one leaves the recorded order, and each tells where it is when a wait takes long.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
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
from accordion.safety.liveness import wording
from accordion.safety.liveness.hub import ECHO_S, Hub, Position
from accordion.safety.liveness.messages import InputDigest, MeetingOver, StepDigest
from accordion.safety.liveness.polling import poll
from accordion.safety.liveness.wording import ADVICE, advice

log = logging.getLogger("accordion")
LOST_S = 600.0  # as long as NCCL lets a collective wait
# Beyond the timeout of the job's process group, if that is shorter: in a collective ranks wait no longer. What follows, the
# question to the others and the program's end, has to fit into the five seconds that are promised, too.
MARGIN_S = 1.0
PATIENCE_S = 4.0  # a wait beyond it is told to the others
POLL_S = 1.0
HEARD_S = 2.0  # in which ranks that have diverged have said where they are
NOTICE_S = 0.05  # after it a rank that waits looks whether others have called a meeting
NOTICE = timedelta(seconds=NOTICE_S)
SILENT_POLLS = 30  # after which a rank that waits names those of which it hears nothing
# After so many forwards without a meeting a device is not asked to compare tags: it would take kernels.
CALM_PASSES = 3
SAID_STEPS = 8  # how often ranks tell the first one the digest of their steps, if no reduce bears it
POLLS = 3  # one after the other, in all of which ranks must be found to wait in a circle: one may just be leaving
UNHEARD = (
    'Here ranks that wait in a collective cannot be asked, and end by the backend\'s time-out; debug="order" has all ranks '
    "agree on each unit."
)


Noticed = Callable[[str], dict[int, dict[str, Any]]]
"""Callback that joins the meeting called by another rank: takes what this rank does, returns what each rank says."""


class DivergenceMonitor(Observer):
    """Tells the other ranks where this one is, over the hub of the model's ranks. Nothing is said in the common case.

    Ranks meet if one leaves the order of the last pass. A rank that did not leave it waits in its next collective meanwhile,
    notices the meeting and comes too; `OrderAgreement` finds what each does. If ranks wait for each other in other ways, each
    posts where it is after `PATIENCE_S`: when all wait and nobody can go on, each says where all are.
    On streams of NCCL the host does not wait and notices nothing; the ranks that left the order name themselves after `LOST_S`.
    """

    def __init__(self, communicators: Sequence[Communicator], ranks: Sequence[int], hub: Hub | None = None) -> None:
        """Make the monitor of a model. A collective.

        Args:
            communicators: those of this rank.
            ranks: all ranks of the model, by their number in the job.
            hub: of these ranks; by default the job's.
        """
        communicators = [each for each in communicators if each.num_ranks > 1 and not each.is_fake]
        self._ranks = sorted(ranks)
        # Ranks that wait do so on their devices, or in works of which no wait may time out, and are not asked meanwhile.
        self.asks_in_vain = not all(communicator.can_poll for communicator in communicators)
        self.listens = bool(communicators)  # whether there is any other rank
        self.broken: str | None = None  # why no collective is safe any more: what others have sent may still arrive
        self._noticed: Callable[[], Noticed | None] = lambda: None
        self._post: dict[str, Any] | None = None  # what others see of this rank
        self._num_looks = self._num_met = 0
        self.num_calm = 0  # forwards of the whole model since ranks met
        self._prefix, self._rank = f"accordion/{common_name(communicators)}", dist.get_rank() if communicators else 0
        self._own_hub = hub
        if self.listens and hub is None:
            self._own_hub = hub = Hub.of_job(self._ranks, self._rank, _torch.default_store(), self._prefix)
            hub.position.may_wait_on_device |= self.asks_in_vain
        self._position = Position() if hub is None else hub.position  # of this rank, for those who ask
        self.num_steps = 0  # of optimizers, on parameters of this model
        self._failed_in = ""  # the unit in whose forward an error came up
        self._facts: dict[str, Any] = {}  # of this rank's last passes, for `advice`
        self._awaits_backward = self._has_caught = self._in_backward = False
        # Of `StepWatch`: what it tells of this rank's steps, and what differs between those of ranks.
        self.history: Callable[[], dict[str, Any]] = dict
        self.compare: Callable[[Mapping[int, Mapping[str, Any]]], str] = lambda posts: ""

    @property
    def _hub(self) -> Hub | None:
        """The hub of the model's ranks; None without other ranks, and after the job's process groups, which it ends with."""
        hub = self._own_hub
        return None if hub is None or hub.is_closed else hub

    def listen(self, noticed: Noticed) -> None:
        """Have the method `noticed`, of an object that others keep, called if others call a meeting while this rank waits."""
        self._noticed = weakref.WeakMethod(noticed)

    def check(self) -> None:
        """Raise if a pass of the model could not end: ranks have diverged before, or this one has left its process group."""
        if self.listens and self._hub is None and not dist.is_initialized():
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
            self._facts["caught"] = f"failed {self._position.phase}{wording.while_handling(sys.exception())}"
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
            failed = f"{wording.failure(error, self._phase('in the forward'))}{self._failed_in}"
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
        self._position.phase, self._position.doing = self._phase(where), None

    def _phase(self, where: str) -> str:
        return f"{where} of step {self.num_steps + 1}"

    def busy(self, what: str | None) -> None:
        """Set what this rank does with others, for those who ask."""
        self._position.doing = what

    def _doing(self, what: str) -> str:
        phase = self._position.phase
        if not phase:
            return what
        return f"{what} (step {self.num_steps + 1})" if "ward" in what else f"{what} {phase}"

    # -- meetings

    def meet(self, said: Mapping[str, Any]) -> dict[int, dict[str, Any]] | None:
        """Wait until every rank has come here; return what each `said`, by rank, or None if all said the same.

        `said`: JSON; `what` in it is for messages. Raises `DivergenceError` if ranks wait for each other elsewhere.
        """
        self.num_calm = 0
        if (hub := self._hub) is None:
            return None
        name = self._meeting
        hub.arrive(name, len(self._ranks), json.dumps(said), self._facts, wakes=True)
        over = self._until(hub, lambda: hub.over(name), said["what"])
        self.forget()
        self._num_met += 1
        return None if over.said is None else {rank: {**json.loads(text), **facts} for rank, text, facts in over.said}

    @property
    def _meeting(self) -> str:
        """The name of the next meeting, the same on all ranks."""
        return f"{self._prefix}/{self._num_met}"

    def _until(self, hub: Hub, ready: Callable[[], MeetingOver | None], what: str) -> MeetingOver:
        lost_s = min(LOST_S, _torch.timeout_s_of_job() + MARGIN_S)
        num_circles, next_s = 0, min(PATIENCE_S, lost_s)

        def look(waited_s: float) -> None:
            nonlocal num_circles, next_s
            if (gone := self._gone(self._ranks)) is not None and not hub.has_over(self._meeting):
                self._break(wording.meanwhile(self._doing(what), *gone), of_rank=gone[0])
            if waited_s < next_s:
                return
            next_s = waited_s + POLL_S
            self.busy(what)
            num_circles = self._look(hub, self._ranks, what, num_circles)

        over = poll(ready, lost_s, look, hub.pause)
        if over is None:
            unheard = self._unheard(hub, hub.posts(self._prefix))
            others = f"other ranks have come to nothing new in {lost_s:g} s{unheard and f': {unheard}'}"
            self.fail(f"this rank {what}, and {others}; {ADVICE}")
        self.busy(None)
        return over

    def apart(self, said: Mapping[int, Mapping[str, Any]]) -> NoReturn:
        """Fail because what all ranks have said does not go together."""
        self.fail(f"ranks are not at the same place: {wording.doing_of(said)}; {advice(said)}")

    # -- other ranks that are gone

    def _gone(self, ranks: Sequence[int]) -> tuple[int, str] | None:
        """Return the rank of `ranks` that has ended, or because of which one has, and what happened to it."""
        if (hub := self._hub) is None or (gone := hub.gone(ranks)) is None:
            return None
        return hub.cause(0.0, self._prefix) or gone

    def _echo(self, what: str, error: BaseException) -> NoReturn:
        """A backend has failed under this rank: mostly because of another one, who is named."""
        if (hub := self._hub) is not None:
            is_out_of_time = wording.is_out_of_time(error)
            cause = hub.cause(0.0 if is_out_of_time else ECHO_S, self._prefix)
            if cause is not None:
                self._break(wording.meanwhile(self._doing(what), *cause), error, of_rank=cause[0])
            if others := hub.others(self._ranks, silent_too=is_out_of_time):
                self.fail(
                    f"this rank {self._doing(what)}, and others did not come in {_torch.timeout_s_of_job():g} s or left it: "
                    f"{others}; all ranks must do the same with the model.",
                    error,
                )
        # The backend's own words are obscure if ranks have diverged: sizes or peers that do not fit.
        self.fail(
            f"a collective failed while this rank {what}: {str(error).splitlines()[0]}; another rank has failed, cannot be "
            f"reached, or is elsewhere: {ADVICE}",
            error,
        )

    # -- in a collective

    def wait(self, pending: Pending, what: str) -> None:
        """Wait for works; raise `DivergenceError` if another rank has failed, or is somewhere else for good."""
        # Without a timeout, until the backend's own is over.
        notice = NOTICE if pending.communicator.can_poll else None
        for work in pending.works:
            if not self._done(work, notice, what):
                self._wait_long(work, pending.communicator.ranks, what)
        for work in pending.sends:
            self._done(work, None, what)
        if self._post is not None:
            self.forget()
            self.busy(None)

    def _wait_long(self, work: Any, ranks: list[int], what: str) -> None:
        """Wait for a work, and look now and then what became of the ranks that take part in it."""
        done, num_circles = False, 0
        gone_s: float | None = None  # when a rank was first seen to be gone
        called_s: float | None = None  # when others first called a meeting

        def wait(seconds: float) -> None:
            nonlocal done
            done = self._done(work, timedelta(seconds=seconds), what)

        def look(waited_s: float) -> None:
            nonlocal num_circles, gone_s, called_s
            self.busy(what)
            if (hub := self._hub) is None:
                return
            if (gone := self._gone(ranks)) is not None:
                gone_s = waited_s if gone_s is None else gone_s
                if waited_s - gone_s >= POLL_S and not work.is_completed():
                    self._break(wording.meanwhile(self._doing(what), *gone), of_rank=gone[0])
            if hub.is_called(self._meeting):
                noticed = self._noticed()
                assert noticed is not None, "who meets others can be asked by them"
                said, called_s = noticed(what), waited_s if called_s is None else called_s
                if waited_s - called_s > POLLS * PATIENCE_S and not work.is_completed():
                    self.apart(said)  # was asked before, and is where it was
            elif waited_s >= PATIENCE_S:
                num_circles = self._look(hub, ranks, what, num_circles)

        poll(lambda: done, math.inf, look, wait, first_s=2 * NOTICE_S, longest_s=POLL_S)

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

    def _look(self, hub: Hub, ranks: list[int], what: str, num_circles: int) -> int:
        """Tell the others that this rank waits for `ranks`; fail if all wait for each other in different places.

        `num_circles`: polls up to now, one after the other, in which that was so; returns it with this one.
        """
        self._tell({"ranks": ranks, "what": self._doing(what), **self._facts})
        posts = hub.posts(self._prefix)
        for rank, post in posts.items():
            if "failed" in post:
                self._break(wording.meanwhile(self._doing(what), rank, post["failed"]), of_rank=rank)
        self._num_looks += 1
        if self._num_looks == SILENT_POLLS and (silent := self._unheard(hub, posts)):
            hint = f" {UNHEARD}" if self.asks_in_vain else ""
            log.warning("rank %d %s, %s: all must call the model.%s", self._rank, what, silent, hint)
        # If all ranks that one waits for are there, it is slow, but it goes on.
        places = {rank: (post.get("ranks"), post.get("what")) for rank, post in posts.items()}
        goes_on = any(all(places.get(r) == places[rank] for r in post.get("ranks", ())) for rank, post in posts.items())
        if goes_on or len(posts) < len(self._ranks):
            return 0
        if num_circles + 1 == POLLS:
            each = wording.doing_of(posts)
            self.fail(f"ranks wait for each other in different places: {each}; {advice(posts)}")
        return num_circles + 1

    def _unheard(self, hub: Hub, posts: Mapping[int, Any]) -> str:
        """Return where the ranks without a post are, if they answer."""
        ranks = [rank for rank in self._ranks if rank not in posts]
        where = hub.where(ranks) if ranks else {}
        if ranks and set(where) >= set(ranks):
            return wording.each_of(where, ", ")
        return f"nothing is heard of rank {wording.numbers(ranks)}" if ranks else ""

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
        self._tell({"failed": wording.of_another(text), **self._facts})

    def _tell(self, post: dict[str, Any]) -> None:
        if (hub := self._hub) is not None and post != self._post:
            self._post = post
            hub.post(self._prefix, post)

    def forget(self) -> None:
        """What was told holds no longer."""
        if self._post is not None and (hub := self._hub) is not None:
            hub.post(self._prefix, None)
        self._post, self._num_looks = None, 0

    def looks(self, device: torch.device) -> bool:
        """Whether tags are compared now: those of ranks that go on as in the last pass are the last pass's."""
        return self.listens and (self.num_calm <= CALM_PASSES or device.type == "cpu")

    def same_everywhere(self, rows: Tensor, mine: Tensor, what: str) -> None:
        """Fail unless each row of `rows` (num_ranks, n) is `mine` (n,); on a device, assert there. `what` this rank does."""
        if not self.listens:
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
        if (hub := self._hub) is None:
            return
        at = hub.steps_differ_at(self._prefix)
        if at is not None and num >= at:
            self._fail_apart("begins a backward")
        if num <= SAID_STEPS or num % SAID_STEPS == 0:
            hub.send_to_first(StepDigest(rank=hub.rank, model=self._prefix, num=num, chain=chain))

    def say_inputs(self, digest: int) -> None:
        """Send the digest of this rank's first inputs to the first rank, which warns if another rank has the same."""
        if (hub := self._hub) is not None:
            hub.send_to_first(InputDigest(rank=hub.rank, model=self._prefix, digest=digest))

    def _fail_apart(self, what: str) -> NoReturn:
        """Fail because what ranks have sent does not go together: say what each one does, or in what their steps differ."""
        post = {"what": what, **self._facts, **self.history()}
        self._tell(post)
        posts: dict[int, dict[str, Any]] = {}
        if (hub := self._hub) is not None:  # ranks that diverge find it at one time
            poll(lambda: len(hub.posts(self._prefix)) == len(self._ranks), HEARD_S, pause=hub.pause)
            posts = hub.posts(self._prefix)
        text = self.compare(posts)
        if not text:
            if len(posts) == len(self._ranks) and all("what" in post for post in posts.values()):
                each = wording.doing_of(posts)
            else:
                others = {rank: post for rank, post in posts.items() if rank != self._rank and "what" in post}
                gone = self._gone(self._ranks)
                ended = "" if gone is None else f"; rank {gone[0]} {gone[1]}"
                each = f"this rank {what}, {wording.doing_of(others) or 'another rank another one'}{ended}"
            text = f"ranks are in different units: {each}; {advice(posts)}"
        self._tell({**post, "failed": f"failed: {wording.of_another(text)}"})
        self._break(text)


def monitor_of(context: ShardingContext) -> DivergenceMonitor:
    """The one with which a context was made."""
    assert isinstance(context.waiter, DivergenceMonitor), "who makes contexts gives them one"
    return context.waiter
