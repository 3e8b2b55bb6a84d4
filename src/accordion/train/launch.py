"""The ranks: who started this process, and starting them through torchrun's library where nobody did."""

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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

from accordion.devices import Devices, backend_of, devices_named, num_cores
from accordion.errors import AccordionError, DivergenceError, UsageError
from accordion.garbage import end_with_one_collection
from accordion.output import lasting_output
from accordion.safety.liveness import wording
from accordion.safety.liveness.hub import hubs_of_job
from accordion.safety.liveness.links import give_up
from accordion.safety.liveness.polling import poll
from accordion.safety.liveness.wording import is_echo
from accordion.safety.mixed_tensors import advise
from accordion.safety.own_process import take_process
from accordion.tasks.errors import is_own, own_traceback
from accordion.train.config import LaunchConfig as Choice
from accordion.train.ending import PREEMPTED, SIGNALS
from accordion.train.owner import job_of

CPU_RANKS = 2  # without GPUs and without launch.nproc: the least that shards
# A failed collective is mostly the echo of a rank that died: its launcher has so long to end this one first.
ECHO_S = 1.0
START_S = 600  # in which all ranks of a start must have come to the store
SLOW_S = 10.0  # after which a start says how many have
# Variables of one launcher's ranks alone, without which a process is none of these.
SAYS_RANK = {"torchrun": "RANK", "srun": "SLURM_PROCID"}
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
INTERACTIVE_STEP = str(2**32 - 6)  # SLURM's number for the step of a shell that salloc opens
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")  # variables of torchrun with the address of the store
# Exit codes: ranks did different things; Ctrl-C; what is added to a signal's number.
PARTED, INTERRUPTED, BY_SIGNAL = 3, 130, 128
FAILED = "accordion/failed"  # key in the store: rank and exit code of the first to fail
UNREACHED = {  # words of gloo where a collective came to nothing -> what they mean
    "Timed out waiting": "another rank was not heard of within launch.timeout_s; it is stuck, or its machine or the network is "
    "gone",
    "Connection closed by peer": "another rank has ended",
    "Connection reset by peer": "another rank has ended",
}
Entry = Callable[..., int | None]
"""What a rank runs, called with (place, store, *args), and gives its exit code; a module's own function, so that other processes
can import it."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank this process is, and who said so."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    starter: str
    url: str
    job: str | None = None  # its launcher's name for the job, over all hosts and restarts


def place_of(environ: Mapping[str, str]) -> RankPlace | None:
    """Read torchrun's variables, else srun's; None in a process that no launcher started."""
    try:
        if "RANK" in environ and "WORLD_SIZE" in environ:
            return RankPlace(
                rank=int(environ["RANK"]),
                world=int(environ["WORLD_SIZE"]),
                local_rank=int(environ.get("LOCAL_RANK", environ["RANK"])),
                local_world=int(environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])),
                starter="torchrun",
                url="env://",
                job=job_of(environ),
            )
        return _slurm_place(environ)
    except ValueError as error:
        raise UsageError(f"the launcher's environment is not understood: {error}.") from None


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) <= 65535):
        raise ValueError(f"MASTER_PORT is {text!r}, which is no port")
    return int(text)


def _slurm_place(environ: Mapping[str, str]) -> RankPlace | None:
    """A task of an srun step with several tasks.

    A batch script itself is none: it has a job id but no step id. Nor is what a shell starts that has the terminal of its step
    (`srun --pty`, `salloc`): the step's other tasks are shells without one, which have ended.
    """
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
        url=f"tcp://{host}:{_port(port)}",
        job=job_of(environ),
    )


def first_host(nodes: str) -> str:
    """The first name in SLURM's compressed list: `gpu[03-05,9],login` -> `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    if match is None:
        raise ValueError(f"node list {nodes!r}")
    return "".join(part or "" for part in match.groups())


def choose(choice: Choice, place: RankPlace | None, here: Devices) -> tuple[str, int]:
    """The type of device and the number of ranks in all. Raises `UsageError` for more ranks on this machine than devices."""
    devices = devices_named(choice.device, "launch.device", here)
    world = choice.nproc or devices.count or CPU_RANKS
    needed = world
    if place is not None:
        if choice.nproc not in (0, place.local_world):
            raise UsageError(
                f"launch.nproc is {choice.nproc} but {place.starter} started {place.local_world} ranks; leave it out."
            )
        world, needed = place.world, place.local_rank + 1
    if not devices.is_cpu and needed > devices.count:
        raise UsageError(
            f"{needed} ranks are more than this machine has, {devices}; lower launch.nproc, or take --launch.device cpu."
        )
    return devices.type, world


def few_cores(device: str, local_world: int, cores: int) -> str | None:
    """Return a warning if ranks on CPUs share cores; None if they do not, or if they are as many as the default."""
    if device != "cpu" or local_world <= max(cores, CPU_RANKS):
        return None
    return (
        f"warning: {local_world} ranks share {cores} cores of this machine; they take long to start and to step. Lower "
        "launch.nproc."
    )


def start(entry: Entry, args: tuple[Any, ...], nproc: int, signals: Forwarding | None = None) -> int:
    """Run `entry(place, store, *args)` in `nproc` ranks on this machine and return the exit code.

    The first rank that fails reports why, and ends the others. SIGTERM ends all of them. With `signals`, SIGTERM and SIGUSR1 are
    sent on to the ranks: for an `entry` that ends by these as it likes, with the exit code `PREEMPTED` if not at its end. Raises
    `NothingStartedError` then.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing.spawn")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the failing rank and this function say it shorter
    # Only newer versions of torch have it.
    newer: dict[str, Any] = {f.name: 5 for f in fields(LaunchConfig) if f.name == "shutdown_timeout"}
    with TemporaryDirectory(prefix="accordion-", ignore_cleanup_errors=True) as logs:  # torch would leave one behind
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
            # At SIGTERM torch's agent ends ranks, and some save; a terminal that goes ends none of these.
            signals_to_handle="SIGINT,SIGQUIT" if signals else "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            **newer,
        )
        sign = os.path.join(logs, "begun")
        try:
            with nullcontext() if signals is None else signals.to_ranks(sign):
                elastic_launch(config, _begun)(sign, entry, *args)
        except SignalException as error:
            if error.sigval != signal.SIGTERM:
                raise KeyboardInterrupt from error
            print("accordion: ended by SIGTERM", file=sys.stderr)
            return BY_SIGNAL + signal.SIGTERM
        except ChildFailedError as error:
            return _failed(error, asked=signals is not None and signals.came)
    return 0


def _begun(sign: str, entry: Entry, *args: Any) -> None:
    """Be one rank, and leave a sign that there was one."""
    Path(sign).touch()
    guarded(entry, *args)


class NothingStartedError(BaseException):
    """A signal ended the command before its ranks could take one. No `Exception`, as `KeyboardInterrupt` is none: the code of a
    task, which runs in a preparation, must not take it for its own.
    """


class Forwarding(AbstractContextManager["Forwarding"]):
    """Owns what SIGTERM and SIGUSR1 do in a process that starts ranks: they go on to each of them, and before there are any
    `NothingStartedError` is raised. SIGHUP, which a terminal that goes sends, does nothing here and in the ranks.
    """

    def __init__(self) -> None:
        self.came = False
        self._starts = False
        self._begun: Callable[[], bool] = lambda: False  # whether there was a rank, be it that it has ended
        self._others: set[int | None] = set()  # children from before
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Forwarding:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._pass_on) for number in SIGNALS}
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def to_ranks(self, sign: str) -> Iterator[None]:
        """Inside, new children of this process are ranks, of which each leaves a file `sign`; behind it signals do nothing."""
        self._others = {child.pid for child in multiprocessing.active_children()}
        self._starts, self._begun = True, Path(sign).exists
        try:
            yield
        finally:
            self._begun = lambda: True

    def _pass_on(self, number: int, frame: object) -> None:
        self.came = True
        ranks = {child.pid for child in multiprocessing.active_children()} - self._others if self._starts else set()
        for rank in ranks:
            if rank is not None:
                with suppress(ProcessLookupError):
                    os.kill(rank, number)
        if not ranks and not self._begun():
            raise NothingStartedError


def _failed(error: ChildFailedError, *, asked: bool) -> int:
    """Say what the failing rank could not say itself; the exit code. `asked`: a signal asked the ranks to end."""
    by_signal = {PREEMPTED, *(-number for number in SIGNALS)}
    if error.get_first_failure()[1].exitcode == PREEMPTED:
        return PREEMPTED
    if asked and {failure.exitcode for failure in error.failures.values()} <= by_signal:
        raise NothingStartedError from error
    if sys.stderr.isatty():
        print("\033[?25h", end="", file=sys.stderr)  # the progress bar of a rank that was ended had hidden the cursor
    for rank, failure in error.failures.items():
        how = "interrupted" if failure.exitcode == INTERRUPTED else f"ended by {failure.signal_name()}"
        if failure.exitcode < 0 or failure.exitcode == INTERRUPTED:
            print(f"accordion: rank {rank} was {how}; the others were stopped.", file=sys.stderr)
    first = error.get_first_failure()[1].exitcode
    return first if first > 0 else BY_SIGNAL - first


def guarded(entry: Entry, *args: Any) -> None:
    """Be one rank. The rank that fails first reports why; those that fail because of it end silently."""
    with lasting_output():
        if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:  # torch's agent, of torchrun or of `start`
            # A rank is killed if the agent is. torch has SIGINT sent to those of `start`, which is taken for Ctrl-C, and nothing
            # to those of torchrun, which lose the store and print frames of C++.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        faulthandler.enable()
        take_process()
        end_with_one_collection()
        place = place_of(os.environ)
        assert place is not None, "ranks are started by a launcher"
        if "OMP_NUM_THREADS" not in os.environ:  # else each rank would take all cores; the user's own choice stands
            torch.set_num_threads(max(1, num_cores() // place.local_world))
        store = joined(place, os.environ)
        try:
            code = entry(place, store, *args)
        except KeyboardInterrupt as error:
            _say_ended(error)
            os._exit(INTERRUPTED)
        except Exception as error:
            advise(error)
            _say_ended(error)
            code = _tell(error, place.rank, store)
            get_error_handler().record_exception(error)  # torchrun shows it in its summary
        if code:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # not sys.exit: that waits for collectives in flight


def joined(place: RankPlace, environ: Mapping[str, str]) -> Store:
    """The job's store with keys of this start alone; every rank calls it. Raises as `_reached` says.

    If that takes long, a rank of each host says how many have come as far as it knows, and how to do without the others.
    """
    came: set[str] = set()

    def tell() -> None:
        variable = SAYS_RANK[place.starter]
        print(
            f"accordion: rank {place.rank} has waited {SLOW_S:g} s: {1 + len(came)} of {place.world} ranks have come that the "
            f"variables of {place.starter} announce; to train without the others: env -u {variable} accordion train ...",
            file=sys.stderr,
            flush=True,
        )

    slow = threading.Timer(SLOW_S, tell)
    slow.daemon = True
    if place.local_rank == 0:
        slow.start()
    try:
        return of_this_start(_reached(place, environ), place.rank, place.world, came)
    finally:
        slow.cancel()


def _say_ended(error: BaseException) -> None:
    """Let the ranks that share a model with this one know why it ends: it does so without what Python does at the end."""
    for hub in hubs_of_job():
        hub.say_ended(wording.failure(error, hub.position.phase), echo=is_echo(error))


def _reached(place: RankPlace, environ: Mapping[str, str]) -> Store:
    """The job's store. Raises `UsageError` where its address is none, and `AccordionError` where nothing answers there."""
    address, keeps = place.url.removeprefix("tcp://"), place.rank == 0
    if place.starter == "torchrun":
        for name in ADDRESS:
            if not environ.get(name):
                raise UsageError(
                    f"RANK and WORLD_SIZE are set, as by torchrun, but {name} is not; start with torchrun, or unset the two."
                )
        try:
            _port(environ["MASTER_PORT"])
        except ValueError as error:
            raise UsageError(f"the launcher's environment is not understood: {error}.") from None
        address = ":".join(environ[name] for name in ADDRESS)
        keeps = keeps and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun keeps it
    host, _, port = address.rpartition(":")
    try:
        # Ranks wait for each other in `of_this_start`, which knows how many have come.
        store: Store = TCPStore(
            host, int(port), place.world, keeps, timedelta(minutes=30), wait_for_workers=False, multi_tenant=keeps
        )
        return store
    except torch.distributed.DistError as error:
        why = str(error).partition(" Exception raised from")[0]
        raise AccordionError(
            f"rank {place.rank} cannot {'keep' if keeps else 'reach'} the job's store at {address}: {why}; give the job a "
            "MASTER_PORT that nothing else uses."
        ) from None


def of_this_start(store: Store, rank: int, world: int, came: set[str]) -> Store:
    """The job's store, with keys of this start alone. Every rank calls it. The first one adds to `came` for each other one.

    torchrun's store outlives a restart (2.11 to 2.13), and a new rank that reads the address of one that is gone connects to
    nobody. Counts of restarts do not tell starts apart: machines count their own. So each rank leaves a word that nobody had
    before, and the first rank answers each such word until all have heard.
    """
    token = secrets.token_hex(8)
    if rank != 0:
        store.set(f"accordion/start/{rank}", token)
        token = store.get(f"accordion/start/{token}").decode()
        store.add(f"accordion/start/{token}/heard", 1)
        return PrefixStore(token, store)

    def all_heard() -> bool:
        for key in [f"accordion/start/{r}" for r in range(1, world)]:
            word = store.get(key).decode() if store.check([key]) else ""
            if word and word not in came:
                came.add(word)
                store.set(f"accordion/start/{word}", token)
        return int(store.add(f"accordion/start/{token}/heard", 0)) >= world - 1

    if not poll(all_heard, START_S):
        raise torch.distributed.DistStoreError(f"not all of {world} ranks have started within {START_S} s.")
    return PrefixStore(token, store)


def give_up_store(store: Store, timeout_s: float) -> None:
    """Have a question to the job's store fail if its machine is gone, as collectives do after `timeout_s`.

    torch's client would wait until the system gives the connection up, on Linux after a quarter of an hour. torch shows no
    socket of its client, so its connections are found among the descriptors of this process, which is ours.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    descriptors = Path("/proc/self/fd")
    if not isinstance(store, TCPStore) or not descriptors.is_dir():
        return
    for name in os.listdir(descriptors):
        with suppress(OSError):  # closed since, or no socket
            if S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family != socket.AF_UNIX and connection.getpeername()[1] == store.port:
                        give_up(connection, timeout_s)


def _tell(error: Exception, rank: int, store: Store) -> int:
    """Print why this rank ends, if it is the first one to fail. The exit code of the first, for all of them."""
    code = 2 if isinstance(error, UsageError) else PARTED if isinstance(error, DivergenceError) else 1
    if isinstance(error, RuntimeError) or is_echo(error):
        code = 1 if is_echo(error) else code
        time.sleep(ECHO_S)
    try:
        first = store.compare_set(FAILED, "", f"{rank} {code}").decode()
    except (RuntimeError, torch.distributed.DistError):
        said = f": {' '.join(str(error).split())}" if isinstance(error, AccordionError) else "."
        print(f"accordion: rank {rank} stopped, the rank that keeps the store is gone{said}", file=sys.stderr)
        return code
    if first != f"{rank} {code}":
        return int(first.split()[1])
    if isinstance(error, AccordionError):
        print(getattr(error, "shown", ""), end="", file=sys.stderr)
        print(f"accordion: {' '.join(str(error).split())}", file=sys.stderr)
    elif isinstance(error, RuntimeError) and (why := next((UNREACHED[w] for w in UNREACHED if w in str(error)), None)):
        print(f"accordion: rank {rank} stopped: {why}: {' '.join(str(error).split())}", file=sys.stderr)
    elif is_own(error):
        print(f"accordion: rank {rank} failed in the task's own code:\n{own_traceback(error)}", end="", file=sys.stderr)
    else:
        print(f"accordion: rank {rank} failed:\n{''.join(traceback.format_exception(error))}", end="", file=sys.stderr)
    return code


def first_of_all(place: RankPlace, store: Store, do: Callable[[], T]) -> T | None:
    """Call `do` on the first rank of the job, for which the others wait. Every rank raises a `UsageError` of it."""
    return _first_does(place.rank == 0, store, "accordion/first", do)


def once_per_host(place: RankPlace, store: Store, do: Callable[[], T]) -> T:
    """Call `do`, which returns no None, on the first rank of this host, then on its other ranks. Errors as `first_of_all`."""
    result = _first_does(place.local_rank == 0, store, f"accordion/host/{socket.gethostname()}", do)
    return do() if result is None else result


def _first_does(is_first: bool, store: Store, key: str, do: Callable[[], T]) -> T | None:
    """Call `do` if this rank is the first, and leave the words of its `UsageError` under `key` for the others, which wait."""
    if not is_first:
        store.wait([key], timedelta(days=2))  # reading the data may take long
        if message := store.get(key).decode():
            raise UsageError(message)
        return None
    message = "broken"
    try:
        result = do()
        message = ""
    except UsageError as error:
        message = str(error)
        raise
    finally:
        store.set(key, message)
    return result


def join_group(place: RankPlace, store: Store, kind: str, timeout_s: float) -> torch.device:
    """Take this rank's device and join the group of all ranks, whose collectives fail after `timeout_s`."""
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
