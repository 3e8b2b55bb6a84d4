"""Save in the background while training goes on: one thread for each save, one save at a time for each model."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from accordion import _torch
from accordion.checkpoint.collective import Team, agreed, message_of
from accordion.checkpoint.writing import FileLayout, bytes_of
from accordion.errors import CheckpointError
from accordion.offload.arena import Arena
from accordion.safety.liveness.hub import Hub, hubs_of_job
from accordion.safety.liveness.polling import poll

log = logging.getLogger("accordion")

GRACE_S = 60.0  # how long a save waits for the other ranks once this program is ending
LONGEST_PAUSE_S = 0.1
# By model; not an attribute, which copies of a model would share.
SAVERS: WeakKeyDictionary[nn.Module, Saver] = WeakKeyDictionary()


class Saving:
    """Handle of a save, with `is_done` and `wait()`. The handle of a save in the foreground is done from the beginning."""

    def __init__(self, write: Callable[[], None] | None = None, saver: Saver | None = None) -> None:
        """Start a thread that calls `write`; `wait` raises its error. Without `write` the save counts as done. `saver`:
        referenced until the thread ends, so that `saver.end` waits for the thread even if the model has been freed."""
        self._failure: CheckpointError | None = None
        self._saver = saver
        self._thread: threading.Thread | None = None
        if write is not None:
            self._thread = threading.Thread(target=self._run, args=(write,), name="accordion-save")
            self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except CheckpointError as error:
            self._failure = error
        except Exception as error:  # remote stores and file systems raise errors of many classes
            self._failure = CheckpointError(message_of(error))
        finally:
            self._saver = None

    @property
    def is_done(self) -> bool:
        """True once the save has ended, also if it failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the save ends. Raises `CheckpointError` if it failed, unless this error was raised before: by an earlier
        call, the next save or load of the model, or a step of the optimizer."""
        if self._thread is not None:
            self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"the checkpoint in the background was not written: {failure}") from failure


class Saver:
    """Runs the background saves of one model, one at a time; made by `saver_of`. Call `wait` before `start`, which overwrites
    the host memory of the save before."""

    def __init__(self) -> None:
        self._arena: Arena | None = None  # torch's pinned allocator would take up to twice as much memory
        self._saving: Saving | None = None
        self._watched: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._agreement: ThreadAgreement | None = None  # of the latest save

    def wait(self) -> None:
        """Wait for the latest save, if any. Raises `CheckpointError` if that failed and its error has not been raised yet."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def start(
        self,
        plan: FileLayout,
        run: Callable[..., None],
        agree: ThreadAgreement,
        team: Team,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> Saving:
        """Copy the parts of `plan` to host memory `host`, then call `run(agree, host)` in a thread; return the save's handle.

        Collective. Registers a step hook on each of `optimizers`: if the save fails, the next step of any of them raises its
        error. At exit Python waits for the thread. Raises `UsageError` on all ranks if one of them lacks host memory.
        """
        host = team.agree(lambda: self.copy(plan))
        team.agree(agree.meet)
        if self._agreement is None:
            before_pools_end(weakref.WeakMethod(self.end))
        self._agreement = agree
        self._saving = saving = Saving(partial(agree.during, partial(run, agree, host)), self)
        for optimizer in optimizers:
            if optimizer not in self._watched:
                self._watched.add(optimizer)
                optimizer.register_step_post_hook(self._raise_failure)
        return saving

    def copy(self, plan: FileLayout) -> memoryview:
        """Copy all parts of `plan` to host memory, pinned if one is on an accelerator; return the bytes, which the next call
        overwrites. Raises `UsageError` if the memory cannot be allocated or pinned."""
        device = next((part.data.device for part in plan.parts if part.data.device.type != "cpu"), None)
        if self._arena is None or self._arena.num_bytes < plan.num_bytes:
            self._arena = None  # frees the old arena before the new one is allocated
            self._arena = Arena(
                plan.num_bytes, device or torch.device("cpu"), "a save in the background", "save with background=False"
            )
        memory, at = self._arena.memory, 0
        for part in plan.parts:
            into = memory[at : at + part.data.nbytes].view(part.data.dtype).view(part.data.shape)
            into.copy_(part.data, non_blocking=device is not None)
            at += part.data.nbytes
        if device is not None:
            torch.accelerator.synchronize(device)
        return bytes_of(memory[:at])

    def end(self) -> None:
        """Wait for the save in progress, at most `GRACE_S` for other ranks, and log its error. Called when the program ends."""
        if self._agreement is not None:
            self._agreement.program_ends.set()
        try:
            self.wait()
        except CheckpointError as error:
            log.error("%s", error)

    def _raise_failure(self, *_: object) -> None:
        """Optimizer step hook: if the latest save has failed, raise its error once; ranks may raise after different steps."""
        if self._saving is not None and self._saving.is_done:
            self.wait()


def before_pools_end(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Have `method` called at the program's end, while thread pools still work. Does nothing if this Python cannot do so."""

    # Python closes the pools of `concurrent.futures` first, then waits for threads, then runs `atexit` functions. Libraries for
    # remote storage look up addresses in such pools, so a save that is only waited for as a thread would fail. Python has no
    # public name for this moment; 3.11 to 3.13 (and the newest in 2026) have the one that `concurrent.futures` itself uses.
    def call() -> None:
        if (end := method()) is not None:
            end()

    with suppress(AttributeError, RuntimeError):  # another version of Python, or the program is ending already
        threading._register_atexit(call)  # type: ignore[attr-defined]


def saver_of(model: nn.Module) -> Saver:
    """Return the saver of `model`, which the first call creates."""
    return SAVERS.setdefault(model, Saver())


class ThreadAgreement:
    """`Team.agree` for a background thread: calls an action and returns its result once the action has succeeded on all ranks;
    if it fails on any, all ranks raise. Uses no collectives: ranks exchange messages over the connections of a `Hub`. First
    call `meet`, which is collective; the thread then makes all calls inside `during`. `name`: unique name of the save, the same
    on all ranks. `Saver.end` sets `program_ends`, after which a call waits for other ranks at most `GRACE_S`."""

    def __init__(self, team: Team, name: str) -> None:
        self._team, self._name, self._num_agreed = team, f"accordion/save/{name}", 0
        self._hub: Hub | None = None
        self._lease: Any = None  # keeps the hub open if the job's process groups end before the save does
        self._lost = ""  # why this rank gave up waiting for the others
        self.program_ends = threading.Event()  # set by `Saver.end`

    def meet(self) -> None:
        """Choose or create the `Hub`, which connects all ranks of the team and detects ranks that exit. Collective. Does
        nothing for a team of one rank."""
        if len(self._team.ranks) < 2:
            return
        # A hub that contains all of these ranks exists on each of them, so the smallest one is the same on all.
        hubs = [hub for hub in hubs_of_job() if set(self._team.ranks) <= set(hub.ranks)]
        rank = self._team.ranks[self._team.index]
        self._hub = min(hubs, key=lambda hub: (len(hub.ranks), hub.ranks)) if hubs else None
        if self._hub is None:
            self._hub = Hub.of_job(self._team.ranks, rank, _torch.default_store(), self._name)
        self._lease = self._hub.lease()

    def during(self, save: Callable[[], None]) -> None:
        """Call `save`, then release the hub. If this rank gave up waiting for others meanwhile, first report that to them."""
        try:
            save()
        finally:
            if self._hub is not None and self._lost:
                self._hub.post(self._name, {"gives up": self._lost})
            self._lease = None

    def __call__(self, action: Callable[[], object], /) -> object:
        return agreed(action, self._shared, self._team.ranks)

    def _shared(self, text: str) -> list[str]:
        """Send `text` over the hub; return the texts of all ranks, in order. Collective. Raises `CheckpointError` if a rank has
        exited, has given up, or does not answer in time, or if this program began to end `GRACE_S` ago."""
        hub, ranks = self._hub, self._team.ranks
        if hub is None:
            return [text]
        name = f"{self._name}/{self._num_agreed}"
        self._num_agreed += 1
        hub.arrive(name, len(ranks), text)
        timeout_s = _torch.timeout_s_of_job()
        ended_s: float | None = None

        def check(waited_s: float) -> None:
            nonlocal ended_s
            needed = (*ranks, hub.ranks[0])  # the hub's first rank passes on all messages
            lost = next((f"rank {rank} {text}" for rank, text in list(hub.lost.items()) if rank in needed), "")
            lost = lost or next((post["gives up"] for post in hub.posts(self._name).values()), "")
            if lost and name not in hub.over:
                self._lost = lost.rstrip(".")
                raise CheckpointError(f"{self._lost}.")
            if ended_s is None and (self.program_ends.is_set() or not threading.main_thread().is_alive()):
                ended_s = waited_s
            if ended_s is not None and waited_s > ended_s + GRACE_S:
                self._give_up(hub, waited_s)

        over = poll(lambda: hub.over.pop(name, None), timeout_s, check, hub.pause, longest_s=LONGEST_PAUSE_S)
        if over is None:
            self._give_up(hub, timeout_s)
        if over.reports is None:
            return [text] * len(ranks)
        texts = {rank: text for rank, text, _ in over.reports}
        return [texts[rank] for rank in ranks]

    def _give_up(self, hub: Hub, waited_s: float) -> NoReturn:
        others = hub.others(self._team.ranks)
        self._lost = f"other ranks did not finish the save within {waited_s:.0f} s: {others}"
        raise CheckpointError(f"{self._lost}.")
