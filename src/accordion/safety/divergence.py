"""Detect ranks that execute different steps: they exchange reports if one leaves the order of its last pass, or waits long."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from accordion.safety.liveness.messages import InputDigest
from accordion.safety.liveness.polling import poll

log = logging.getLogger("accordion")
LOST_S = 600.0  # as long as NCCL lets a collective wait
# Added to the timeout of the job's process group if that is shorter than `LOST_S`, since a collective fails after the timeout.
# Asking the other ranks and ending the program must also fit into the promised five seconds.
MARGIN_S = 1.0
REPORT_AFTER_S = 4.0  # of a wait, until the rank reports it
POLL_S = 1.0
POSTS_S = 2.0  # time for all ranks that have diverged to post their position
MEETING_POLL_S = 0.05  # poll interval of a waiting rank for meetings of others
MEETING_POLL = timedelta(seconds=MEETING_POLL_S)
SILENT_POLLS = 30  # after which a waiting rank names the ranks that did not report
# After so many forwards without a meeting, devices stop comparing tags, which takes kernels.
COMPARED_PASSES = 3
DIGEST_STEPS = 8  # if no reduce carries the digest of steps, the first rank gets every 8th, and the first 8
NOTICED_STEPS = 4  # backwards after which all ranks know that such digests differ
POLLS = 3  # polls in a row in which ranks must wait for each other: a rank may just be leaving a wait
CANNOT_ASK = (
    'On this backend, ranks that wait in a collective cannot be asked, and end with its timeout; debug="order" makes all ranks '
    "agree on each unit."
)


@dataclass(slots=True)
class _Wait:
    """A long wait of this rank for `ranks`. `what`: text on what this rank does. `num_polls`: calls of `_report` in this wait."""

    ranks: list[int]
    what: str
    num_polls: int = 0
    num_circles: int = 0  # polls in a row in which ranks waited for each other


class DivergenceMonitor(Observer):
    """Observer that reports to the other ranks what this rank does, and raises `DivergenceError` if ranks diverge. Each context
    is created with one; `monitor_of` returns it.

    Reports go over a `Hub` (TCP connections), not in collectives; in the common case nothing is sent. A rank that leaves the
    order of its last pass opens a meeting (`meet`), a barrier with reports. The others, which wait in their next collective
    (`wait`), see that and join, and `OrderAgreement` decides what to do. In other waits, each rank posts (sends to all others)
    after `REPORT_AFTER_S` what it waits for; if all ranks wait and none can continue, each raises an error with all posts. On
    NCCL the host does not wait in collectives and sees no meeting: ranks that left the order raise after `LOST_S`, or the job's
    timeout if that is shorter. `OrderAgreement` sets `join`; `StepWatch` sets `history` and counts `num_steps`.
    """

    def __init__(self, communicators: Sequence[Communicator], ranks: Sequence[int], hub: Hub | None = None) -> None:
        """Create the monitor of a model on the global `ranks`. A collective. `communicators`: those that include this rank.
        `hub`: the connections of the ranks; by default those of the job, opened with a thread if there are none."""
        communicators = [each for each in communicators if each.num_ranks > 1 and not each.is_fake]
        self.ranks = sorted(ranks)
        # True if ranks wait on their devices, or in works whose wait must not time out, and cannot answer meanwhile.
        self.cannot_ask = not all(communicator.can_poll for communicator in communicators)
        self.listens = bool(communicators)  # there are other ranks
        self.broken: str | None = None  # why no collective is safe any more: messages of others may still arrive
        # Weak reference to `OrderAgreement.join_meeting`, called if another rank opens a meeting while this rank waits.
        self.join: Callable[[], Callable[[str], dict[int, dict[str, Any]]] | None] = lambda: None
        self._post: dict[str, Any] | None = None  # this rank's current post
        self._num_met = 0  # meetings
        self.num_since_meeting = 0  # forwards of the whole model
        self._prefix = f"accordion/{common_name(communicators)}"
        self._own_hub = hub
        if self.listens and hub is None:
            self._own_hub = hub = Hub.of_job(self.ranks, dist.get_rank(), _torch.default_store(), self._prefix)
            hub.position.may_wait_on_device |= self.cannot_ask
        self.position = Position() if hub is None else hub.position  # for ranks that ask
        self.num_steps = 0  # optimizer steps of parameters of this model
        self._failed_in = ""  # the unit whose forward raised
        self._facts: dict[str, Any] = {}  # about this rank's last passes, for `advice`
        self._awaits_backward = self._has_caught = self._in_backward = False
        self.history: Callable[[], dict[str, Any]] = dict  # `StepWatch.history`: the records of this rank's steps

    @property
    def _hub(self) -> Hub | None:
        """The hub of the model's ranks. None without other ranks, and after the job's process groups are destroyed."""
        hub = self._own_hub
        return None if hub is None or hub.is_closed else hub

    def check(self) -> None:
        """Raise `DivergenceError` if this monitor has raised one before. Raise `UsageError` if there are other ranks, and the
        job's process group was destroyed."""
        if self.listens and self._hub is None and not dist.is_initialized():
            raise UsageError(
                "a sharded model was called after dist.destroy_process_group(), so its ranks cannot reach each other; call it "
                "before, or shard it again in the next process group."
            )
        if self.broken is not None:
            raise DivergenceError(f"ranks of this model have diverged before; restart the job: {self.broken}")

    # -- the moments of a step

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        self.num_since_meeting += 1
        self.forget()
        if self._in_backward:  # an error has ended the backward
            self._has_caught, self._in_backward = True, False
            self._facts["caught"] = f"failed {self.position.phase}{wording.while_handling(sys.exception())}"
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
        if error is not None and not isinstance(error, DivergenceError):  # every rank raises that one
            when = f"in the forward of step {self.num_steps + 1}"
            failed = f"{wording.failure(error, when)}{self._failed_in}"
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
        self.position.phase, self.position.doing = f"{where} of step {self.num_steps + 1}", None

    def _doing(self, what: str) -> str:
        phase = self.position.phase
        if not phase:
            return what
        return f"{what} (step {self.num_steps + 1})" if "ward" in what else f"{what} {phase}"

    # -- meetings

    def meet(self, report: Mapping[str, Any]) -> dict[int, dict[str, Any]] | None:
        """Join the next meeting, and wait until all ranks have joined it. Return None if all reports are equal, else a dict
        from rank to its `report` together with its facts for `advice`.

        `report`: JSON data; `report["what"]` tells what this rank does, for messages. Raises `DivergenceError` if a rank has
        failed or ended, if ranks wait for each other in different places, or after `LOST_S` or the job's timeout, whichever is
        shorter. Without other ranks, and after the job's process groups were destroyed, returns None at once.
        """
        self.num_since_meeting = 0
        if (hub := self._hub) is None:
            return None
        name, what = f"{self._prefix}/{self._num_met}", report["what"]
        hub.arrive(name, len(self.ranks), json.dumps(report), self._facts, wakes=True)
        lost_s = min(LOST_S, _torch.timeout_s_of_job() + MARGIN_S)
        wait, next_s = _Wait(self.ranks, what), REPORT_AFTER_S

        def check(waited_s: float) -> None:
            nonlocal next_s
            if (gone := hub.gone(self.ranks, self._prefix)) is not None and name not in hub.over:
                self.position.doing = what
                self._break(wording.meanwhile(self._doing(what), *gone), of_rank=gone[0])
            if waited_s >= next_s:
                next_s = waited_s + POLL_S
                self.position.doing = what
                self._report(hub, wait)

        over = poll(lambda: hub.over.pop(name, None), lost_s, check, hub.pause)
        if over is None:
            others = self._without_post(hub)
            no_progress = f"other ranks have made no progress for {lost_s:g} s{others and f': {others}'}"
            self.fail(f"this rank {what}, and {no_progress}; {wording.ADVICE}")
        self.position.doing = None
        self.forget()
        self._num_met += 1
        return None if over.reports is None else {r: {**json.loads(text), **facts} for r, text, facts in over.reports}

    def fail_diverged(self, reports: Mapping[int, Mapping[str, Any]]) -> NoReturn:
        """Raise `DivergenceError` with what each rank does, from the `reports` of a meeting."""
        self.fail(f"ranks have diverged: {wording.doing_of(reports)}; {wording.advice(reports)}")

    def _fail_in_backend(self, what: str, error: BaseException) -> NoReturn:
        """Raise `DivergenceError` in place of a backend's `error`. Its text names the rank that caused `error` if that rank's
        report arrives within `ECHO_S` (if `error` is a timeout: has arrived before), or else what the other ranks do, or else
        quotes `error`. `what`: text on what this rank does."""
        self.position.doing = what
        if (hub := self._hub) is not None:
            is_out_of_time = wording.is_out_of_time(error)
            cause = hub.cause(0.0 if is_out_of_time else ECHO_S, self._prefix)
            if cause is not None:
                self._break(wording.meanwhile(self._doing(what), *cause), error, of_rank=cause[0])
            if others := hub.others(self.ranks, silent_too=is_out_of_time):
                self.fail(
                    f"this rank {self._doing(what)}, and other ranks did not join within {_torch.timeout_s_of_job():g} s or "
                    f"left: {others}; all ranks must do the same with the model.",
                    error,
                )
        # The backend's error is obscure if ranks have diverged: sizes or peers that do not match.
        self.fail(
            f"a collective failed while this rank {what}: {str(error).splitlines()[0]}; another rank has failed, cannot be "
            f"reached, or does something else: {wording.ADVICE}",
            error,
        )

    # -- in a collective

    def wait(self, pending: Pending, what: str) -> None:
        """Let the host wait for the works of `pending`, and join meetings that other ranks open meanwhile if the backend
        `can_poll`. Raises `DivergenceError` if a work fails, or if a rank has ended or diverged. `what`: text on what this rank
        does, for messages."""
        # Without a timeout of ours, a work waits until the backend's.
        timeout = MEETING_POLL if pending.communicator.can_poll else None
        for work in pending.works:
            if not self._done(work, timeout, what):
                self._wait_long(work, pending.communicator.ranks, what)
        for work in pending.sends:
            self._done(work, None, what)
        if self._post is not None:
            self.forget()
            self.position.doing = None

    def _wait_long(self, work: Any, ranks: list[int], what: str) -> None:
        """Poll until `work`, a collective of `ranks`, has ended, and join the meetings that other ranks open meanwhile. Raises
        `DivergenceError` if `work` fails, or a rank has ended or diverged. `what`: text on what this rank does, for messages."""
        done, long_wait = False, _Wait(ranks, what)
        gone_s: float | None = None  # when a rank was first seen to be gone
        called_s: float | None = None  # when another rank first opened a meeting

        def wait(seconds: float) -> None:
            nonlocal done
            done = self._done(work, timedelta(seconds=seconds), what)

        def check(waited_s: float) -> None:
            nonlocal gone_s, called_s
            self.position.doing = what
            if (hub := self._hub) is None:
                return
            if (gone := hub.gone(ranks, self._prefix)) is not None:
                gone_s = waited_s if gone_s is None else gone_s
                if waited_s - gone_s >= POLL_S and not work.is_completed():
                    self._break(wording.meanwhile(self._doing(what), *gone), of_rank=gone[0])
            if f"{self._prefix}/{self._num_met}" in hub.called:
                join = self.join()
                assert join is not None, "`OrderAgreement` lives as long as its engine"
                reports, called_s = join(what), waited_s if called_s is None else called_s
                if waited_s - called_s > POLLS * REPORT_AFTER_S and not work.is_completed():
                    self.fail_diverged(reports)  # this rank has joined before, and the work still waits
            elif waited_s >= REPORT_AFTER_S:
                self._report(hub, long_wait)

        poll(lambda: done, math.inf, check, wait, first_s=2 * MEETING_POLL_S, longest_s=POLL_S)

    def _done(self, work: Any, timeout: timedelta | None, what: str) -> bool:
        """Wait for `work`, at most for `timeout`, and return True if it has ended, else False. If `timeout` is None, that of the
        backend applies. Raises `DivergenceError` if `work` has failed."""
        try:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        except RuntimeError as error:
            if timeout is not None and "Operation timed out" in str(error):
                # The work may have ended since; a wait without a timeout raises if it has failed.
                return work.is_completed() and self._done(work, None, what)
            self._fail_in_backend(what, error)
        return True

    def _report(self, hub: Hub, wait: _Wait) -> None:
        """Post that this rank waits, and count this call in `wait`. Raise `DivergenceError` if a rank has failed, or if all
        ranks waited in different places in `POLLS` calls in a row. In call number `SILENT_POLLS`, log ranks without post."""
        doing = self._doing(wait.what)
        self._tell({"ranks": wait.ranks, "what": doing, **self._facts})
        posts = hub.posts(self._prefix)
        for rank, post in posts.items():
            if "failed" in post:
                self._break(wording.meanwhile(doing, rank, post["failed"]), of_rank=rank)
        wait.num_polls += 1
        if wait.num_polls == SILENT_POLLS and (others := self._without_post(hub)):
            hint = f" {CANNOT_ASK}" if self.cannot_ask else ""
            log.warning("rank %d %s, and %s; all ranks must call the model.%s", hub.rank, wait.what, others, hint)
        # A wait that all of its ranks have joined is slow, but will end.
        places = {rank: (post.get("ranks"), post.get("what")) for rank, post in posts.items()}
        goes_on = any(all(places.get(r) == places[rank] for r in post.get("ranks", ())) for rank, post in posts.items())
        wait.num_circles = 0 if goes_on or len(posts) < len(self.ranks) else wait.num_circles + 1
        if wait.num_circles == POLLS:
            each = wording.doing_of(posts)
            self.fail(f"ranks wait for each other in different places: {each}; {wording.advice(posts)}")

    def _without_post(self, hub: Hub) -> str:
        """Ask the ranks that have posted nothing what they do. Return text on each, even if silent; "" if all have posted."""
        posts = hub.posts(self._prefix)
        ranks = [rank for rank in self.ranks if rank not in posts]
        return hub.others(ranks) if ranks else ""

    # -- failures

    def fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        """Post to the other ranks that this rank has failed, and raise `DivergenceError(text)`."""
        self.tell(f"failed: {text}")
        self._break(text, cause)

    def _break(self, text: str, cause: BaseException | None = None, of_rank: int | None = None) -> NoReturn:
        self.broken = text
        error = DivergenceError(text)
        error.of_rank = of_rank
        error.doing = f"{self.position.doing} {self.position.phase}".strip() if self.position.doing else ""
        raise error from cause

    def tell(self, text: str) -> None:
        """Post to the other ranks that this rank has failed. `text`: how, as the end of a sentence that begins with "rank R"."""
        self._tell({"failed": wording.of_another(text), **self._facts})

    def _tell(self, post: dict[str, Any] | None) -> None:
        if (hub := self._hub) is not None and post != self._post:
            self._post = post
            hub.post(self._prefix, post)

    def forget(self) -> None:
        """Withdraw what this rank has last posted about the model, if anything."""
        self._tell(None)

    def looks(self, device: torch.device) -> bool:
        """Return True if ranks compare the tags that collectives carry to identify their unit: on a CPU always, on other devices
        in the first `COMPARED_PASSES` forwards and in as many after a meeting. Return False if there are no other ranks."""
        return self.listens and (self.num_since_meeting <= COMPARED_PASSES or device.type == "cpu")

    def same_everywhere(self, rows: Tensor, expected: Tensor, what: str) -> None:
        """Raise `DivergenceError` unless each row of `rows` (num_ranks, n), the tags of all ranks, equals `expected` (n,). On
        an accelerator the device asserts this, and no host waits. `what`: text on what this rank does. Call this only if
        `looks` is true."""
        if rows.device.type != "cpu":
            text = f"ranks are in different units: this rank {what}, and another rank does something else; {wording.ADVICE}"
            _torch.assert_on_device((rows == expected).all(), text)
        elif not torch.equal(rows, expected.expand_as(rows)):
            self._fail_mismatch(what)

    def send_steps(self, num: int, chain: int) -> None:
        """Send `chain`, the digest of this rank's optimizer steps up to its backward number `num`, to the first rank, which
        compares it over ranks; only for the first `DIGEST_STEPS` backwards, and then for every `DIGEST_STEPS`-th. Nobody waits.
        Raises `DivergenceError` if digests of some backwards ago differed, at the same backward on every rank. Does nothing
        without other ranks."""
        if (hub := self._hub) is None:
            return
        # Digests are chained, so the last one that every rank knows of also tells that earlier ones differed.
        last = num - NOTICED_STEPS
        last -= last % DIGEST_STEPS if last > DIGEST_STEPS else 0
        if f"{self._prefix}/steps/{last}" in hub.over:
            self._fail_mismatch("begins a backward")
        if num <= DIGEST_STEPS or num % DIGEST_STEPS == 0:
            hub.arrive(f"{self._prefix}/steps/{num}", len(self.ranks), str(chain), quiet=True)

    def send_inputs(self, digest: int) -> None:
        """Send the digest of this rank's first inputs to the first rank, which logs a warning if two ranks have equal ones."""
        if (hub := self._hub) is not None:
            hub.send_to_first(InputDigest(rank=hub.rank, model=self._prefix, digest=digest))

    def _fail_mismatch(self, what: str) -> NoReturn:
        """Raise `DivergenceError` because tags or digests differ; the error tells how the steps of ranks differ, or what each
        rank does. Waits up to `POSTS_S` for the posts of all ranks. `what`: text on what this rank does."""
        hub, post = self._hub, {"what": what, **self._facts, **self.history()}
        assert hub is not None, "other ranks took part in a collective just now, or have sent digests"
        self._tell(post)
        # All ranks detect the mismatch at about the same time.
        poll(lambda: len(hub.posts(self._prefix)) == len(self.ranks), POSTS_S, pause=hub.pause)
        posts = hub.posts(self._prefix)
        text = wording.step_differences(posts)
        if not text:
            if len(posts) == len(self.ranks) and all("what" in post for post in posts.values()):
                each = wording.doing_of(posts)
            else:
                others = {rank: one for rank, one in posts.items() if "what" in one and rank != hub.rank}
                gone = hub.gone(self.ranks, self._prefix)
                ended = "" if gone is None else f"; rank {gone[0]} {gone[1]}"
                each = f"this rank {what}, {wording.doing_of(others) or 'and another rank does something else'}{ended}"
            text = f"ranks are in different units: {each}; {wording.advice(posts)}"
        self._tell({**post, "failed": f"failed: {wording.of_another(text)}"})
        self._break(text)


def monitor_of(context: ShardingContext) -> DivergenceMonitor:
    """Return the monitor that `context` was created with."""
    assert isinstance(context.waiter, DivergenceMonitor), "each context is created with one"
    return context.waiter
