"""Find out which rank this process is, or start the ranks of this machine through torchrun's library."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import multiprocessing
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from stat import S_ISSOCK
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accordion import _torch
from accordion.devices import Devices, backend_of, devices_named, num_cores
from accordion.errors import AccordionError, DivergenceError, UsageError, advise
from accordion.garbage import end_with_one_collection
from accordion.output import lasting_output, quiet_imports
from accordion.safety.liveness import wording
from accordion.safety.liveness.hub import hubs_of_job
from accordion.safety.liveness.links import give_up
from accordion.safety.liveness.polling import once_after, poll
from accordion.safety.own_process import keep_freed_memory
from accordion.tasks.errors import is_own, own_traceback
from accordion.train.config import LaunchConfig as Choice
from accordion.train.ending import PREEMPTED, SIGNALS

CPU_RANKS = 2  # without GPUs and without launch.nproc: the fewest ranks that shard
# A collective mostly fails because another rank has died. The launcher has this time to end this rank first.
SECONDARY_S = 1.0
START_S = 600  # seconds within which all ranks must connect to the store
SLOW_S = 10.0  # seconds after which rank 0 reports how many have connected
# The variable that makes a process a rank of that launcher.
SAYS_RANK = {"torchrun": "RANK", "srun": "SLURM_PROCID"}
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
INTERACTIVE_STEP = str(2**32 - 6)  # SLURM's number for the step of a shell that salloc opens
# Exit codes: ranks diverged; Ctrl-C; added to a signal's number.
DIVERGED, INTERRUPTED, BY_SIGNAL = 3, 130, 128
FAILED = "accordion/failed"  # key in the store: rank and exit code of the first rank that failed
UNREACHED = {  # text in gloo's error for a failed collective -> meaning
    "Timed out waiting": "another rank did not answer within launch.timeout_s; it hangs, or its machine or the network is "
    "down",
    "Connection closed by peer": "another rank has ended",
    "Connection reset by peer": "another rank has ended",
}
Entry = Callable[..., int | None]
"""Function that a rank runs: `entry(place, store, *args)` returns the exit code. Defined in a module, so that other processes
can import it."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Place of this process in the job: rank `rank` of `world`, and on its host, rank `local_rank` of `local_world`."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    starter: str  # name of the launcher
    address: str = ""  # host:port of the job's store
    job: str | None = None  # the launcher's name for the job, equal on all hosts and after restarts


def place_of(environ: Mapping[str, str]) -> RankPlace | None:
    """Return the rank that torchrun or srun gave this process in the variables `environ`; None if neither did. Raises
    `UsageError` if some of the variables are missing or invalid."""
    try:
        if "RANK" in environ and "WORLD_SIZE" in environ:
            return RankPlace(
                rank=int(environ["RANK"]),
                world=int(environ["WORLD_SIZE"]),
                local_rank=int(environ.get("LOCAL_RANK", environ["RANK"])),
                local_world=int(environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])),
                starter="torchrun",
                address=f"{environ['MASTER_ADDR']}:{int(environ['MASTER_PORT'])}",
                job=job_of(environ),
            )
        return _slurm_place(environ)
    except (KeyError, ValueError) as error:
        what = f"{error} is not set" if isinstance(error, KeyError) else f"they are invalid: {error}"
        raise UsageError(f"a launcher has set environment variables (such as RANK), but {what}.") from None


def _slurm_place(environ: Mapping[str, str]) -> RankPlace | None:
    """Return the rank of this process in an srun step with several tasks; None in any other process."""
    # A batch script is no rank: it has a job id but no step id. Nor is a program that was started in an interactive shell (`srun
    # --pty`, `salloc`), since the other tasks of that step are shells without a terminal, which have ended.
    world = int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1")))
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    in_batch_script = "SLURM_JOB_ID" in environ and step is None
    has_terminal = {"SLURM_PTY_PORT", "SLURM_PTY_WIN_COL"} & set(environ)
    in_shell = has_terminal and environ.get("SLURM_TASK_PID") != str(os.getpid())
    if "SLURM_PROCID" not in environ or world == 1 or in_batch_script or in_shell or step == INTERACTIVE_STEP:
        return None
    hosts = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "127.0.0.1"))
    host = environ.get("MASTER_ADDR", first_host(hosts))
    port = environ.get("MASTER_PORT", str(20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000))
    nodes = int(environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1")))
    return RankPlace(
        rank=int(environ["SLURM_PROCID"]),
        world=world,
        local_rank=int(environ.get("SLURM_LOCALID", "0")),
        local_world=-(-world // nodes),
        starter="srun",
        address=f"{host}:{int(port)}",
        job=job_of(environ),
    )


def job_of(environ: Mapping[str, str]) -> str | None:
    """Return the launcher's name for this job, which restarts keep, from torchrun's or srun's variables; None without one."""
    torchrun = environ.get("TORCHELASTIC_RUN_ID", "none")
    if torchrun != "none":
        return f"torchrun {torchrun}"
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    return None if job is None or step is None else f"srun {job}.{step}"


def place_in_group() -> tuple[RankPlace, Store]:
    """Return (this rank's place in the program's process group, the group's store with a new prefix of keys). Collective."""
    rank, word = dist.get_rank(), secrets.token_hex(8)
    of_ranks = [("", "")] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (socket.gethostname(), word))
    here = [other for other, (host, _) in enumerate(of_ranks) if host == of_ranks[rank][0]]
    place = RankPlace(
        rank=rank,
        world=len(of_ranks),
        local_rank=here.index(rank),
        local_world=len(here),
        starter="the program",
        job=job_of(os.environ),
    )
    return place, PrefixStore(of_ranks[0][1], _torch.default_store())


def first_host(nodes: str) -> str:
    """Return the first host in a list as SLURM writes it: `gpu[03-05,9],login` -> `gpu03`. Raises `ValueError` without one."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    if match is None:
        raise ValueError(f"node list {nodes!r}")
    return "".join(part or "" for part in match.groups())


def choose(choice: Choice, place: RankPlace | None, present: Devices) -> tuple[str, int]:
    """Return (device type, number of ranks in the job). `place`: this rank, or None if this process starts the ranks. `present`:
    devices of this machine. Raises `UsageError` if there are too few devices, or if `launch.nproc` contradicts the launcher."""
    devices = devices_named(choice.device, "launch.device", present)
    world = choice.nproc or devices.count or CPU_RANKS
    needed = world
    if place is not None:
        if choice.nproc not in (0, place.local_world):
            raise UsageError(
                f"launch.nproc is {choice.nproc} but {place.starter} started {place.local_world} ranks; leave out the key."
            )
        world, needed = place.world, place.local_rank + 1
    if not devices.is_cpu and needed > devices.count:
        raise UsageError(
            f"{needed} ranks are more than this machine has, {devices}; lower launch.nproc, or take --launch.device cpu."
        )
    return devices.type, world


def start(entry: Entry, args: tuple[Any, ...], nproc: int, signals: Forwarding | None = None) -> int:
    """Run `entry(place, store, *args)` in `nproc` ranks on this machine, wait for them, and return the exit code. The first
    rank that fails reports the reason, and all other ranks are ended. Without `signals`, SIGTERM ends all ranks. With
    `signals`, SIGTERM and SIGUSR1 are forwarded to the ranks, so that `entry` can save and return `PREEMPTED`;
    `NothingStartedError` is raised if a signal arrives while no rank can handle it. Raises `KeyboardInterrupt` after Ctrl-C or
    SIGQUIT, and without `signals` after SIGHUP. Silences torch's loggers of its launcher."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing.spawn")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are reported in one line instead
    # Only newer versions of torch have this field.
    newer: dict[str, Any] = {f.name: 5 for f in fields(LaunchConfig) if f.name == "shutdown_timeout"}
    with TemporaryDirectory(prefix="accordion-", ignore_cleanup_errors=True) as logs:  # torch would not remove its own
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            # At SIGTERM and SIGHUP torch's agent would end ranks that still have to save.
            signals_to_handle="SIGINT,SIGQUIT" if signals else "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            **newer,
        )
        if signals is not None:
            signals.ranks_start()
        try:
            elastic_launch(config, guarded)(entry, *args)
        except SignalException as error:
            if error.sigval != signal.SIGTERM:
                raise KeyboardInterrupt from error
            print("accordion: ended by SIGTERM", file=sys.stderr)
            return BY_SIGNAL + signal.SIGTERM
        except ChildFailedError as error:
            return _failed(error, asked=signals is not None and signals.came)
    return 0


class NothingStartedError(BaseException):
    """Raised if a signal arrives while no rank can handle it. A `BaseException`, so that a task's code does not catch it."""


class Forwarding(AbstractContextManager["Forwarding"]):
    """Context manager, passed to `start`, that forwards SIGTERM and SIGUSR1 to the ranks that this process starts, and ignores
    SIGHUP of a closed terminal. The constructor sets the signal handlers, in the main thread only; leaving the context restores
    the previous ones. While no rank runs, a signal raises `NothingStartedError`. `came`: True after a signal."""

    def __init__(self) -> None:
        self.came = False
        # Children of this process that are no ranks; None before ranks start.
        self._others: set[int] | None = None
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._forward) for number in SIGNALS}
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ranks_start(self) -> None:
        """Forward later signals to the ranks: the child processes that start from now on."""
        self._others = {child.pid for child in multiprocessing.active_children() if child.pid is not None}

    def _forward(self, number: int, frame: object) -> None:
        self.came = True
        children = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
        ranks = set() if self._others is None else children - self._others
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)
        if not ranks:
            raise NothingStartedError


def _failed(error: ChildFailedError, *, asked: bool) -> int:
    """Return the exit code of the job; unless that is `PREEMPTED`, print which ranks a signal ended. `asked`: this process sent
    them one. Raises `NothingStartedError` if `asked` is True and signals ended all ranks in `error` before they could save."""
    by_signal, first = {PREEMPTED, *(-number for number in SIGNALS)}, error.get_first_failure()[1].exitcode
    if first == PREEMPTED:
        return PREEMPTED
    if asked and {failure.exitcode for failure in error.failures.values()} <= by_signal:
        raise NothingStartedError from error
    if sys.stderr.isatty():
        print("\033[?25h", end="", file=sys.stderr)  # show the cursor, which a progress bar had hidden
    for rank, failure in error.failures.items():
        how = "interrupted" if failure.exitcode == INTERRUPTED else f"ended by {failure.signal_name()}"
        if failure.exitcode < 0 or failure.exitcode == INTERRUPTED:
            print(f"accordion: rank {rank} was {how}; the others were stopped.", file=sys.stderr)
    return first if first > 0 else BY_SIGNAL - first


def guarded(entry: Entry, *args: Any) -> None:
    """Run `entry(place, store, *args)` as one rank of a launcher. Returns if `entry` returns 0 or None; otherwise ends the
    process at once, with the code that `entry` returned, or that of its error. The rank that fails first prints its error.
    Ranks that fail because of it print nothing and have its exit code. Also sets up the process: faulthandler, memory, garbage
    collection, levels of loggers, number of torch's threads, and its end if the launcher's agent is killed."""
    with lasting_output():
        if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:  # torch's agent, of torchrun or of `start`
            # Kill a rank if its agent is killed. Otherwise ranks of `start` get SIGINT, as for Ctrl-C, and ranks of torchrun
            # get nothing, lose the store and print C++ frames.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        faulthandler.enable()
        keep_freed_memory()
        end_with_one_collection()
        quiet_imports()
        place = place_of(os.environ)
        assert place is not None, "ranks are started by a launcher"
        if "OMP_NUM_THREADS" not in os.environ:  # each rank would use all cores
            torch.set_num_threads(max(1, num_cores() // place.local_world))
        store = joined(place)
        try:
            code = entry(place, store, *args)
        except (KeyboardInterrupt, Exception) as error:
            interrupted = wording.was_interrupted(error)
            # Python's exit handlers, which report the end of a rank to the others, are skipped by `os._exit`.
            for hub in hubs_of_job():
                is_echo = wording.is_echo(error) and not interrupted
                hub.say_ended(wording.failure(error, hub.position.phase), echo=is_echo)
            if interrupted:
                os._exit(INTERRUPTED)
            advise(error)
            code = _report(error, place.rank, store)
            get_error_handler().record_exception(error)  # for torchrun's summary
        if code:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # sys.exit would wait for collectives in flight


def joined(place: RankPlace) -> Store:
    """Connect to the job's store at `place.address`, which rank 0 opens unless torchrun has, and return it with a prefix of
    keys that no earlier start used. Collective. Raises `AccordionError` if the store cannot be opened or reached, and on rank 0
    `DistStoreError` if not all ranks start within `START_S`."""
    keeps = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # "True": torchrun serves it
    host, _, port = place.address.rpartition(":")
    try:
        # Ranks wait for each other in `of_this_start`, which counts them.
        store = TCPStore(
            host, int(port), place.world, keeps, timedelta(minutes=30), wait_for_workers=False, multi_tenant=keeps
        )
    except torch.distributed.DistError as error:
        why = str(error).partition(" Exception raised from")[0]
        raise AccordionError(
            f"rank {place.rank} cannot {'open' if keeps else 'reach'} the job's store at {place.address}: {why}; set "
            "MASTER_PORT to a port that nothing else uses."
        ) from None
    return of_this_start(store, place)


def of_this_start(store: Store, place: RankPlace) -> Store:
    """Return the job's store with a prefix of keys that is equal on all ranks, and that no earlier start used. Collective. Rank
    0 prints how many ranks have started if that takes long, and raises `DistStoreError` if one is missing after `START_S`."""
    # torchrun's store outlives a restart (2.11 to 2.13), and a new rank that reads the address of an ended rank cannot connect.
    # Machines count restarts separately, so a count does not identify a start. Instead each rank writes a random word, and rank 0
    # answers each word with the prefix until all ranks have read it.
    token, words = secrets.token_hex(8), dict[int, str]()
    if place.rank != 0:
        is_new = False
        while not is_new:
            word = secrets.token_hex(8)
            store.set(f"accordion/start/{place.rank}", word)
            token = store.get(f"accordion/start/{word}").decode()
            # A program may start twice (`init` after `fit`): rank 0 can still be answering in the start before.
            is_new = store.add(f"accordion/start/{token}/{place.rank}", 1) == 1
        store.add(f"accordion/start/{token}/heard", 1)
        return PrefixStore(token, store)

    def all_heard() -> bool:
        for rank in range(1, place.world):
            key = f"accordion/start/{rank}"
            word = store.get(key).decode() if store.check([key]) else ""
            if word and word != words.get(rank):
                words[rank] = word
                store.set(f"accordion/start/{word}", token)
        return int(store.add(f"accordion/start/{token}/heard", 0)) >= place.world - 1

    def report() -> None:
        print(
            f"accordion: rank 0 has waited {SLOW_S:g} s: {1 + len(words)} of {place.world} ranks have started that the variables "
            f"of {place.starter} announce; to run without the others, start this command with env -u {SAYS_RANK[place.starter]}",
            file=sys.stderr,
            flush=True,
        )

    if not poll(all_heard, START_S, once_after(SLOW_S, report)):
        raise torch.distributed.DistStoreError(f"not all of {place.world} ranks have started within {START_S} s.")
    return PrefixStore(token, store)


def give_up_store(store: Store, timeout_s: float) -> None:
    """Make requests to the job's store fail after `timeout_s` without an answer from the store's machine. Linux only;
    elsewhere, and for stores other than a `TCPStore`, does nothing."""
    # torch's client would wait until the system drops the connection, on Linux after 15 minutes. torch does not expose the
    # client's sockets, so they are selected from the descriptors of this process by the store's port.
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    descriptors = Path("/proc/self/fd")
    if not isinstance(store, TCPStore) or not descriptors.is_dir():
        return
    for name in os.listdir(descriptors):
        with suppress(OSError):  # closed meanwhile, or no socket
            if S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family != socket.AF_UNIX and connection.getpeername()[1] == store.port:
                        give_up(connection, timeout_s)


def _report(error: BaseException, rank: int, store: Store) -> int:
    """Print `error` if this rank failed first, and return the exit code of the rank that failed first. If another rank may have
    caused `error`, waits `SECONDARY_S` before. If the job's store is gone, prints that, and returns the code of `error`."""
    code = 2 if isinstance(error, UsageError) else DIVERGED if isinstance(error, DivergenceError) else 1
    if isinstance(error, RuntimeError) or wording.is_echo(error):
        code = 1 if wording.is_echo(error) else code
        time.sleep(SECONDARY_S)
    try:
        first = store.compare_set(FAILED, "", f"{rank} {code}").decode()
    except (RuntimeError, torch.distributed.DistError):
        reason = f": {' '.join(str(error).split())}" if isinstance(error, AccordionError) else "."
        print(f"accordion: rank {rank} stopped, because the job's store is gone{reason}", file=sys.stderr)
        return code
    if first != f"{rank} {code}":
        return int(first.split()[1])
    if isinstance(error, AccordionError):
        print(getattr(error, "shown", ""), end="", file=sys.stderr)
        print(f"accordion: {' '.join(str(error).split())}", file=sys.stderr)
    elif isinstance(error, RuntimeError) and (why := next((UNREACHED[w] for w in UNREACHED if w in str(error)), None)):
        print(f"accordion: rank {rank} stopped: {why}: {' '.join(str(error).split())}", file=sys.stderr)
    elif is_own(error):
        print(f"accordion: rank {rank} failed in the task's code:\n{own_traceback(error)}", end="", file=sys.stderr)
    else:
        print(f"accordion: rank {rank} failed:\n{''.join(traceback.format_exception(error))}", end="", file=sys.stderr)
    return code


def once_per_host(place: RankPlace, store: Store, do: Callable[[], T]) -> T:
    """Call `do` on the first rank of each host, then on the host's other ranks, and return the result of this rank's own call.
    `do` must not return None. If it fails on the first rank, the host's other ranks raise `UsageError` with its text."""
    result = first_does(place.local_rank == 0, store, f"accordion/host/{socket.gethostname()}", do)
    return do() if result is None else result


def first_does(is_first: bool, store: Store, key: str, do: Callable[[], T]) -> T | None:
    """Call `do` if `is_first` and return its result; otherwise wait until the first rank has, and return None. If `do` raises
    an error there, other ranks raise `UsageError` with its text. `key`: unused key in `store`, where the first rank reports."""
    if not is_first:
        store.wait([key], timedelta(days=2))  # reading the data may take long
        if message := store.get(key).decode():
            raise UsageError(message)
        return None
    try:
        result = do()
    except BaseException as error:
        store.set(key, str(error) or type(error).__name__)
        raise
    store.set(key, "")
    return result


def join_group(place: RankPlace, store: Store, kind: str, timeout_s: float) -> torch.device:
    """Create the default process group of all ranks of the job, make this rank's device of type `kind` the current one, and
    return that device. `timeout_s`: seconds that a collective waits for another rank. Collective."""
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, place.local_rank)
    if kind != "cpu":
        torch.accelerator.set_device_index(place.local_rank)
    dist.init_process_group(
        backend_of(kind),
        store=PrefixStore("accordion/group", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=timeout_s),
        device_id=None if kind == "cpu" else device,
    )
    return device
