"""Training scripts in which one rank diverges from the others, and a function that runs many of them at a time.

Ranks are forks of this process, which has done all imports; a rank ends like a Python script, with exit hooks and exit code.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import accordion as acc
from accordion.safety import report_crashes
from tests.support import models

TIMEOUT_S = 20.0  # of the process group
MARGIN_S = 5.0  # beyond it every rank has ended
STEPS = 6
AT = 3  # the step in which ranks diverge, unless the way has another
NUM_AT_A_TIME = min(6, 2 * (os.cpu_count() or 1))  # more would be late for want of a core
ONE = 1  # the rank that diverges, unless the way has another


class Script:
    """The training of one rank. At the moment that its `Way` names, one rank runs the function `way.deed`.

    `folder`: a folder of this run, for all ranks. `at`: called when this rank diverges. `is_one`: True if this rank is the one
    that diverges. `here`: True if it diverges in this step.
    """

    def __init__(self, way: Way, rank: int, num_ranks: int, folder: str, at: Callable[[], None]) -> None:
        self.way, self.rank, self.num_ranks, self.folder, self._at = way, rank, num_ranks, folder, at
        self.step = 0

    @property
    def is_one(self) -> bool:
        return self.rank == self.way.one

    @property
    def here(self) -> bool:
        return self.is_one and self.step == self.way.step

    def is_at(self, moment: str) -> bool:
        """Return True if this rank diverges at `moment` of this step. If so, also call `at`, from which the run's time counts."""
        is_at = self.here and moment == self.way.moment
        if is_at:
            self._at()
        return is_at

    def reaches(self, moment: str) -> None:
        """Run the functions for `moment` of this step: first that of all ranks, then `way.deed` if this rank diverges now."""
        is_at = self.is_at(moment)
        if moment in self.way.all_do and self.step == (0 if moment == "before_training" else self.way.step):
            self.way.all_do[moment](self)
        if is_at:
            self.way.deed(self)

    def train(self) -> None:
        way = self.way
        if way.is_own:
            report_crashes()
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
        self.step = 0
        self.reaches("before_shard")
        options = dict(way.options)
        if self.is_one:
            if way.others_options:
                self._at()
            options |= way.others_options
        mesh = None
        if options.get("strategy", acc.FULL_SHARD).hybrid:
            mesh = init_device_mesh("cpu", (2, self.num_ranks // 2), mesh_dim_names=("replicate", "shard"))
        plain = models.Tiny(**(way.others_model if self.is_one else {}))
        self.model = acc.shard(plain, mesh, units={models.Block}, **options)
        kind, arguments = torch.optim.AdamW, {"lr": 1e-3}
        if self.is_one and way.others_optimizer:
            self._at()
            kind, arguments = way.others_optimizer
        self.optimizer = kind(self.model.parameters(), **arguments)
        if way.wrapped:
            self.optimizer = acc.wrap_optimizer(self.optimizer)
        self.model.blocks[1].register_forward_pre_hook(lambda module, args: self.reaches("forward"))
        self.model.head.register_forward_hook(self._watch)
        self.reaches("before_training")
        for step in range(1, way.num_steps + 1):
            self.step = step
            try:
                self.reaches("loader")
            except StopIteration:
                break
            if self.is_at("skips_step_of_loop"):
                continue
            tokens, targets = models.batch(self.step, 0, self.rank, vocab=48)
            self.one_step(tokens, targets)
        self.reaches("end")

    def _watch(self, module: nn.Module, args: Any, out: Tensor) -> None:
        if self.here and self.way.moment == "backward" and out.requires_grad:
            out.register_hook(lambda grad: self.reaches("backward"))

    def one_step(self, tokens: Tensor, targets: Tensor) -> None:
        try:
            with acc.no_sync(self.model) if self.is_at("no_sync") else contextlib.nullcontext():
                loss = self.loss(tokens, targets)
                if not self.is_at("skips_backward"):
                    loss.backward()
        except torch.OutOfMemoryError:
            if not self.way.swallows:
                raise
        self.reaches("after_backward")
        if not self.is_at("skips_clip") and self.way.clips:
            acc.clip_grad_norm_(self.model, 1.0)
        self.reaches("before_step")
        if not self.is_at("skips_step"):
            self.optimizer.step()
        self.reaches("after_step")
        if not self.is_at("skips_zero_grad"):
            self.optimizer.zero_grad()

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(tokens)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


Deed = Callable[[Script], Any]


def nothing(script: Script) -> None:
    """Do nothing: the `deed` of ways in which a rank skips something."""


@dataclass(frozen=True)
class Way:
    """One way in which a rank diverges, and the sentence that the other ranks must print.

    `sentence`: a key of `ways.SENTENCES`, or several with "|" between. `also`: a pattern that the printed text must match too.
    `deed`: function that rank `one` runs at `moment` of step `step`. `options`: arguments of `shard` on all ranks.
    `others_options`, `others_model`, `others_optimizer`: arguments that rank `one` alone has. `all_say`: rank `one` prints the
    sentence too. `one_says`: only rank `one` prints it. `all_do`: moment -> function that every rank runs. `stays`: rank `one`
    does not end by itself, and is killed when all others have ended. `is_own`: ranks run as under `accordion run`, so that a
    crash is reported.
    """

    name: str
    sentence: str
    also: str = ""
    moment: str = ""
    deed: Deed = nothing
    _: KW_ONLY
    one: int = ONE
    step: int = AT
    num_ranks: int = 2
    num_steps: int = STEPS
    options: dict[str, Any] = field(default_factory=dict)
    others_options: dict[str, Any] = field(default_factory=dict)
    others_model: dict[str, Any] = field(default_factory=dict)
    others_optimizer: Any = None
    wrapped: bool = True
    clips: bool = False
    swallows: bool = False
    all_say: bool = False
    one_says: bool = False
    all_do: dict[str, Deed] = field(default_factory=dict)
    stays: bool = False
    is_own: bool = False

    @property
    def speakers(self) -> list[int]:
        if self.one_says:
            return [self.one]
        return [rank for rank in range(self.num_ranks) if self.all_say or rank != self.one]


# -- running them


@dataclass
class Outcome:
    """The outcome of one `Way`. `said`: rank -> sentence that says why it ended. `seconds`: time from the divergence to the end
    of all ranks. `codes`: rank -> exit code. `late`: ranks that did not end in time."""

    way: Way
    seconds: float
    said: dict[int, str]
    codes: dict[int, int]
    late: list[int]


def sentence_of(text: str) -> str:
    """Return the line of `text`, a rank's output, that says why it ended: the first message of Accordion, else the last error
    line of a traceback; "" if there is none."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in text.splitlines()]  # torch puts it before each
    for line in lines:
        if re.match(r"(accordion: |accordion\.errors\.\w+Error: |child: )", line):
            return line
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Interrupt|Exception)\b", line)]
    return errors[-1] if errors else ""


class Run:
    """The rank processes of one `Way`: `start` forks them, `poll` watches them, and `outcome` returns the result at the end."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.folder = tempfile.mkdtemp(prefix="ways-")  # removed by this process alone, not by the ranks that it forks
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.late: list[int] = []
        self.at_rest = 0.0  # when all but the one that stays had ended
        self.begun = time.monotonic()
        self.ended = self.begun

    def path(self, name: str) -> Path:
        return Path(self.folder, name)

    def since_moment_s(self) -> float | None:
        """Return the seconds since rank `way.one` diverged; None if it has not."""
        moment = self.path("moment")
        return time.time() - moment.stat().st_mtime if moment.exists() else None

    def start(self) -> Callable[[], None] | None:
        """Fork the ranks. Return None in this process; in a forked rank return the function that the rank has to call."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank in range(self.way.num_ranks):
            pid = os.fork()
            if pid == 0:
                os.environ.update(
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(self.way.num_ranks)
                )
                out = os.open(self.path(f"rank{rank}"), os.O_WRONLY | os.O_CREAT)
                os.dup2(out, 1)
                os.dup2(out, 2)
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
                faulthandler.register(signal.SIGUSR1, all_threads=True)
                moment = self.path("moment")
                torch.manual_seed(0)
                return Script(self.way, rank, self.way.num_ranks, self.folder, moment.touch).train
            self.pids[rank] = pid
        return None

    def poll(self) -> bool:
        """Return True if all ranks have ended. Kills ranks that run for too long, and a rank that stays when others ended."""
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
                    self.ended = self.at_rest or time.monotonic()
        if len(self.codes) == len(self.pids):
            return True
        if self.way.stays and set(self.pids) - set(self.codes) == {self.way.one} and not self.at_rest:
            self.at_rest = time.monotonic()
            os.kill(self.pids[self.way.one], signal.SIGKILL)
        since_s = self.since_moment_s() or 0.0
        if since_s > TIMEOUT_S + 2 * MARGIN_S or time.monotonic() - self.begun > 4 * TIMEOUT_S:
            self.late = [rank for rank in self.pids if rank not in self.codes]
            for rank in self.late:
                os.kill(self.pids[rank], signal.SIGUSR1)  # it prints its stacks
            time.sleep(0.5)
            for rank in self.late:
                os.kill(self.pids[rank], signal.SIGKILL)
        return False

    def outcome(self) -> Outcome:
        since_s = self.since_moment_s()
        begun = self.begun if since_s is None else time.monotonic() - since_s
        texts = {rank: self.path(f"rank{rank}").read_text(errors="replace") for rank in self.pids}
        if os.environ.get("WAYS_VERBOSE"):
            for rank, text in texts.items():
                print(f"--- {self.way.name}: rank {rank} ({self.codes[rank]})\n{text}", file=sys.stderr)
        said = {rank: sentence_of(text) for rank, text in texts.items()}
        shutil.rmtree(self.folder, ignore_errors=True)
        seconds = self.ended - begun
        late = self.late or (list(self.pids) if seconds > TIMEOUT_S + MARGIN_S else [])
        return Outcome(self.way, seconds, said, self.codes, late)


def run(ways: Sequence[Way], note: Callable[[Outcome], None]) -> list[Outcome] | Callable[[], None]:
    """Run `ways`, several at a time, call `note` with each outcome, and return the outcomes in the order of `ways`. In a forked
    rank return the function that the rank has to call."""
    waiting, runs, outcomes = list(ways), list[Run](), dict[str, Outcome]()
    while waiting or runs:
        while waiting and len(runs) < NUM_AT_A_TIME:
            runs.append(Run(waiting.pop(0)))
            if (job := runs[-1].start()) is not None:
                return job
        time.sleep(0.05)
        for each in [each for each in runs if each.poll()]:
            runs.remove(each)
            outcome = outcomes[each.way.name] = each.outcome()
            note(outcome)
    return [outcomes[way.name] for way in ways]
