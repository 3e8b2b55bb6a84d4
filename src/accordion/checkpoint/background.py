"""Saves that go on while training does: one thread for each, one save at a time for each model."""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from accordion import _torch
from accordion.checkpoint.collective import QUOTED, Team, agreed, told
from accordion.checkpoint.peers import Peers
from accordion.checkpoint.writing import FileLayout, HostBuffer
from accordion.errors import CheckpointError
from accordion.safety.party_line import PartyLine, lines_of_job

log = logging.getLogger("accordion")

T = TypeVar("T")
GRACE_S = 60.0  # for the others where this program has come to its end
POLL_S = 0.005
SAVER = "_accordion_saver"  # attribute of a model


class Saving:
    """A save that was begun. Owns its thread and what became of it."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._failure: CheckpointError | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="accordion-save")

    @classmethod
    def done(cls) -> Saving:
        """One that is over and went well."""
        return cls(lambda: None)

    def start(self) -> Saving:
        self._thread.start()
        return self

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except CheckpointError as error:
            self._failure = error
        except Exception as error:  # whatever a store or a file system says
            self._failure = CheckpointError(told(error))

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do, be it that it failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for its end. Raises `CheckpointError` where it failed, once."""
        if self._thread.ident is not None:
            self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"the checkpoint in the background was not written: {failure}") from failure


class Saver:
    """Owns a model's host buffer and the save that is under way."""

    def __init__(self) -> None:
        self._buffer = HostBuffer()
        self._saving: Saving | None = None
        self._watched: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._agreement: StoreAgreement | None = None  # of the save that was begun last
        self._ends_with_program = False

    def __deepcopy__(self, memo: object) -> Saver:
        return Saver()

    def __reduce__(self) -> tuple[type[Saver], tuple[()]]:
        return Saver, ()

    def wait(self) -> None:
        """Wait for the save that is under way. Raises `CheckpointError` where it failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def start(
        self,
        plan: FileLayout,
        run: Callable[..., None],
        agree: StoreAgreement,
        team: Team,
        optimizer: torch.optim.Optimizer | None,
    ) -> Saving:
        """Copy what `plan` lays out, then call `run(agree, host)` in a thread."""
        host = team.agree(lambda: self._buffer.copy(plan))
        agree.meet()
        self._agreement = agree
        if not self._ends_with_program:
            self._ends_with_program = before_pools_end(weakref.WeakMethod(self.end))
        self._saving = saving = Saving(partial(agree.during, partial(run, agree, host))).start()
        if optimizer is not None and optimizer not in self._watched:
            self._watched.add(optimizer)
            optimizer.register_step_post_hook(self._look)
        return saving

    def end(self) -> None:
        """Wait for the save that is under way when the program ends, and tell if it failed: nobody else will."""
        if self._agreement is not None:
            self._agreement.program_ends.set()
        try:
            self.wait()
        except CheckpointError as error:
            log.error("%s", error)

    def _look(self, *_: object) -> None:
        """Raise what became of a save behind a step: the step is done, so ranks may hear of it at different ones."""
        if self._saving is not None and self._saving.is_done:
            self.wait()


def before_pools_end(method: weakref.WeakMethod[Callable[[], None]]) -> bool:
    """Have Python call a method of a living object when the program ends, while thread pools still take work. True: it will.

    Python closes the pools of `concurrent.futures` first, then waits for threads, then runs what `atexit` knows. Libraries of
    remote storage look up addresses in such pools, so a save that is merely waited for as a thread fails. Python has no public
    name for that moment; 3.11 to 3.13 (and the newest in 2026) have this one, which `concurrent.futures` itself uses.
    """

    def call() -> None:
        found = method()
        if found is not None:
            found()

    register = getattr(threading, "_register_atexit", None)
    if register is None:
        return False
    try:
        register(call)
    except RuntimeError:  # the program is ending already
        return False
    return True


def saver_of(model: nn.Module) -> Saver:
    """The saver of a model, made at its first save."""
    saver = vars(model).setdefault(SAVER, Saver())
    assert isinstance(saver, Saver)
    return saver


class StoreAgreement:
    """`Team.agree` for a thread, which must not use the engine's groups: through the job's key-value store."""

    def __init__(self, store: Any, prefix: str, team: Team) -> None:
        self._store, self._prefix, self._team = store, prefix, team
        self._count = 0
        self._timeout_s = team.timeout_s
        self._peers: Peers | None = None
        self._line: PartyLine | None = None  # of a sharded model; a thread of it looks whether the store answers
        self._lost = ""  # why this rank gave up waiting for the others
        self.program_ends = threading.Event()  # set by who waits for the save then

    def meet(self) -> None:
        """Have this rank notice where another one ends. A collective."""
        if self._store is not None:
            self._peers = Peers.meet(self._team)

    def during(self, save: Callable[[], None]) -> None:
        """Do `save`, and let the others know where this rank gives it up."""
        try:
            save()
        finally:
            if self._peers is not None:
                self._peers.close(self._lost)

    @classmethod
    def of(cls, team: Team, name: str) -> StoreAgreement:
        """`name`: of the save, under which the ranks meet."""
        if len(team.ranks) == 1:
            return cls(None, "", team)
        line = next((line for line in lines_of_job() if set(team.ranks) <= set(line.ranks)), None)
        agreement = cls(_torch.default_store() if line is None else line.store, f"accordion/save/{name}", team)
        agreement._line = line
        return agreement

    def __call__(self, action: Callable[[], T], /) -> T:
        return agreed(action, self._shared, self._team.index)

    def _shared(self, text: str) -> list[str]:
        """The texts of all ranks: rank 0 collects them and tells the others."""
        if self._store is None:
            return [text]
        here = f"{self._prefix}/{self._count}"
        self._count += 1
        everyone = range(len(self._team.ranks))
        if not self._team.leads:
            self._store.set(f"{here}/{self._team.index}", text)
            heard: list[str] = json.loads(self._get(f"{here}/all"))
            self._store.add(f"{here}/read", 1)
            return heard
        heard = [text, *(self._get(f"{here}/{index}").decode() for index in everyone[1:])]
        self._store.set(f"{here}/all", json.dumps(heard))
        self._until(lambda: self._store.add(f"{here}/read", 0) == len(everyone) - 1)
        for key in ("all", "read", *everyone[1:]):
            self._store.delete_key(f"{here}/{key}")
        return heard

    def _get(self, key: str) -> bytes:
        self._until(lambda: self._store.check([key]))
        found: bytes = self._store.get(key)
        return found

    def _until(self, ready: Callable[[], bool]) -> None:
        """Ask again and again: a wait in the store would block the other threads' requests."""
        begun, pause_s = time.monotonic(), POLL_S
        ended: float | None = None
        while not self._asked(ready):
            now = time.monotonic()
            if ended is None and (self.program_ends.is_set() or not threading.main_thread().is_alive()):
                ended = now
            if (lost := self._peers and self._peers.lost()) and not self._asked(ready):
                self._give_up(lost)
            if now > begun + self._timeout_s or (ended is not None and now > ended + GRACE_S):
                others = "one may have ended" if self._line is None else self._line.told_of(self._team.ranks)
                self._give_up(f"other ranks did not come to the end of the save within {now - begun:.0f} s: {others}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    def _asked(self, ready: Callable[[], bool]) -> bool:
        """What the store says, which ends with the rank that has it."""
        try:
            return ready()
        except RuntimeError as error:
            if self._line is not None and (lost := self._line.store.lost()):
                self._give_up(lost)
            self._give_up(
                f"the job's store does not answer, its rank has ended ({str(error).splitlines()[0][:QUOTED]})"
            )

    def _give_up(self, why: str) -> NoReturn:
        self._lost = why.rstrip(".")
        raise CheckpointError(f"{self._lost}.")
