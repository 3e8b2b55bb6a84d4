"""Rank processes for tests: a pool that runs functions on real ranks, and one fake rank in place of a large world."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import math
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accordion import _torch
from tests import devices

RANKS = 4
TIMEOUT_S = 60.0
GRACE_S = 5.0  # how long the others may still run once one rank has failed: they mostly wait for it in a collective
MESH_S = 20.0  # for a mesh's groups; 0.02 s on a quiet machine
START_S = 60.0
GROUPS = 32  # each that a rank has costs a thread or two which wake a hundred times a second, for its whole life
PRELOADED = ["torch.testing._internal.distributed.fake_pg", "pytest"]  # nothing that is preloaded starts a thread
OF_COMMANDS = [  # imported for ranks of `accordion train`, which tests.support.forked starts; 6 s
    "accordion.bench.trainer",
    "accordion.train.loop",
    "transformers.models.llama.modeling_llama",
    "peft",
    "torch.utils.tensorboard",
]
MeshKey = tuple[tuple[int, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request to a rank process: create the mesh `mesh`, unless it exists, and run `call` on it if that is not None.

    `mesh`: (shape, names of the axes). `call`: a pickled (function, args, kwargs). `fake_rank`: the rank in a fake process group;
    None: use the real one. `path`, `filters`: import path and warning filters of the parent, set before `call` is unpickled.
    """

    mesh: MeshKey
    call: bytes | None = None
    fake_rank: int | None = None
    path: list[str] = field(default_factory=lambda: list(sys.path))
    filters: list[Any] = field(default_factory=lambda: list(warnings.filters))


class Pool:
    """`num_ranks` rank processes of one process group, on which `run` and `run_mesh` call functions of tests.

    The first run starts the processes, and later runs use them again. A run that fails ends them, and the next one starts new
    ones. A run also starts new ones if a rank has more than `GROUPS` process groups.
    """

    def __init__(self, num_ranks: int = RANKS, device_type: str = "cpu", backend: str = "gloo") -> None:
        self.num_ranks, self.device_type, self.backend = num_ranks, device_type, backend
        self._ranks: list[_Rank] = []
        self._meshes: set[MeshKey] = set()
        self._store: dist.TCPStore | None = None

    def run(
        self, num_ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S, **kwargs: Any
    ) -> Any:
        """Call `fn(mesh, *args, **kwargs)` on the first `num_ranks` ranks, and return the list of their results in rank order.

        `fn`: a function of a module, since it is pickled by name. The mesh is 1-D over these ranks, its axis named "shard".
        Raises `AssertionError` with the traceback of every rank that failed, died or did not answer in `timeout_s`.
        """
        __tracebackhide__ = True
        return self.run_mesh((num_ranks,), ("shard",), fn, *args, timeout_s=timeout_s, **kwargs)

    def run_mesh(
        self,
        shape: tuple[int, ...],
        names: tuple[str, ...],
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = TIMEOUT_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Do as `run`, with a mesh of any `shape` and axes `names`, over the first `prod(shape)` ranks."""
        __tracebackhide__ = True
        count, key = math.prod(shape), (tuple(shape), tuple(names))
        if count > self.num_ranks:
            raise ValueError(f"a mesh of shape {shape} needs {count} ranks and the pool has {self.num_ranks}")
        try:
            if any(rank.num_groups > GROUPS for rank in self._ranks):
                self.close()
            if not self._ranks:
                self._start()
            if key not in self._meshes:  # groups are made by all ranks together, members or not
                _ask(self._ranks, Job(mesh=key), MESH_S)
                self._meshes.add(key)
            results = _ask(self._ranks[:count], Job(mesh=key, call=pickle.dumps((fn, args, kwargs))), timeout_s)
            if len({rank.last_group for rank in self._ranks}) > 1:
                raise AssertionError(
                    f"{count} of {self.num_ranks} ranks made a process group. torch names it by a number that the others "
                    "do not count: the next one of all ranks would wait for good. Take a mesh of the pool, or all ranks."
                )
            return results
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the rank processes; a later run starts new ones."""
        for rank in self._ranks:
            rank.kill()
        self._ranks, self._store = [], None
        self._meshes.clear()

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group = (self.device_type, self.backend, self._store.port, self.num_ranks)
        self._ranks = [_Rank(rank, _serve, group) for rank in range(self.num_ranks)]
        _answers(self._ranks, START_S)


def run_fake(
    world: int | tuple[int, ...],
    rank: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    **kwargs: Any,
) -> Any:
    """Call `fn(mesh, *args, **kwargs)` as rank `rank` of a simulated world, in a new process, and return the result.

    `world`: number of ranks, or shape of a mesh with the axes ("replicate", "shard"). Collectives of torch's fake process group
    return at once and move nothing. The process is new because DTensor caches meshes for the life of a process.
    """
    __tracebackhide__ = True
    shape = (world,) if isinstance(world, int) else tuple(world)
    one = _Rank(rank, _serve_fake, ())
    try:
        key = (shape, ("replicate", "shard")[-len(shape) :])
        return _ask([one], Job(mesh=key, call=pickle.dumps((fn, args, kwargs)), fake_rank=rank), timeout_s)[0]
    finally:
        one.kill()


@contextlib.contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    """Context manager in which the default process group of this process is a fake one: that of rank `rank` of `size`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fork_context() -> Any:
    """Return a multiprocessing context whose processes are forked from a server, so that they need no imports. Start the server
    if none runs.

    The server is a fork of this process, which has imported the tests. On a machine with an accelerator it is a new process.
    """
    context = mp.get_context("forkserver")
    for_commands = OF_COMMANDS if "tests.support.forked" in sys.modules else []
    context.set_forkserver_preload([*_torch.PRELOADED, *PRELOADED, *for_commands, "tests.support.frozen"])
    resource_tracker.ensure_running()  # a program of its own: it would run the tests' atexit functions
    start_program = util.spawnv_passfds
    if not torch.accelerator.is_available():
        util.spawnv_passfds = _fork_server  # type: ignore[assignment]
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = start_program
    return context


def _fork_server(python: bytes, args: list[str], fds: list[int]) -> int:
    """Replacement for `multiprocessing.util.spawnv_passfds` that starts a fork server: fork this process, and run the Python code
    `args[-1]` in the child. Return the child's process id. `fds`: file descriptors that the child keeps."""
    process_id = os.fork()
    if process_id:
        return process_id
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        # Not closed: a number could be used again, and pytest's faulthandler writes into it.
        for fd in map(int, os.listdir("/dev/fd")):
            if fd > 2 and fd not in (*fds, nothing):
                os.dup2(nothing, fd, inheritable=False)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # pytest's would write into its own file
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        exec(args[-1], {})
    finally:
        os._exit(0)


class _Rank:
    """One rank process as the parent sees it: the process, the pipe to it, and the file for its stack dumps.

    `num_groups`: number of process groups that the rank had at its last answer. `last_group`: torch's count of the groups that
    the rank has created, from which torch derives the name of its next group.
    """

    def __init__(self, rank: int, serve: Callable[..., None], group: tuple[Any, ...]) -> None:
        context = fork_context()
        self.rank, self.num_groups, self.last_group = rank, 0, 0
        self.dump = tempfile.NamedTemporaryFile("r", prefix=f"rank{rank}-", suffix=".stack")  # noqa: SIM115
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(rank, theirs, self.dump.name, *group), daemon=True)
        self.process.start()
        theirs.close()

    def stack(self) -> str:
        """Return the stacks of all threads of the process, as text; if the process has ended, those that it dumped before."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self.dump.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.conn.close()
        self.dump.close()


def _ask(ranks: list[_Rank], job: Job, timeout_s: float) -> list[Any]:
    """Send `job` to all `ranks`, and return their results as `_answers` does."""
    __tracebackhide__ = True
    message = pickle.dumps(job)  # not Connection.send, which would share tensors' memory between processes
    for rank in ranks:
        rank.conn.send_bytes(message)
    return _answers(ranks, timeout_s)


def _answers(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    """Wait for one answer of each rank, and return the list of results. Raises `AssertionError` with a report on each rank that
    failed, ended or did not answer within `timeout_s`; after the first failure, the others get `GRACE_S` seconds at most."""
    __tracebackhide__ = True
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    start = time.monotonic()
    deadline = start + timeout_s
    open_ranks = {rank.conn: rank for rank in ranks}
    while open_ranks and (left := deadline - time.monotonic()) > 0:
        for conn in wait(list(open_ranks), timeout=left):
            rank = open_ranks.pop(conn)  # type: ignore[index]
            try:
                good, answer, rank.num_groups, rank.last_group = pickle.loads(conn.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, ConnectionError):
                rank.process.join(GRACE_S)
                good, answer = False, f"the process ended with exit code {rank.process.exitcode}\n{rank.stack()}"
            if good:
                results[rank.rank] = answer
            else:
                failures[rank.rank] = answer
                deadline = min(deadline, time.monotonic() + GRACE_S)
    waited = time.monotonic() - start
    for rank in open_ranks.values():
        failures[rank.rank] = f"no answer after {waited:.1f} s; it was here, most recent call first:\n{rank.stack()}"
    if failures:
        raise AssertionError(_report(failures))
    return [results[rank.rank] for rank in ranks]


def _report(failures: dict[int, str]) -> str:
    """Return one text of all failures (rank -> text), in which ranks with equal texts share a paragraph."""
    same: dict[str, list[int]] = {}
    for rank, text in failures.items():
        same.setdefault(text, []).append(rank)
    return "\n\n".join(f"rank {', '.join(map(str, sorted(ranks)))}: {text.rstrip()}" for text, ranks in same.items())


def _begin(dump: str) -> None:
    """Set up a rank process: ignore Ctrl-C, dump stacks into the file `dump` at SIGUSR1, and use one thread for torch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then ends the ranks
    faulthandler.register(signal.SIGUSR1, open(dump, "w"), all_threads=True)  # noqa: SIM115
    torch.set_num_threads(1)


def _serve(rank: int, conn: Connection, dump: str, device_type: str, backend: str, port: int, num_ranks: int) -> None:
    """Run a rank process: join the process group, then answer jobs until the parent closes `conn`. `port`: of the store."""
    _begin(dump)
    devices.compute_on(device_type)
    if device_type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=num_ranks, timeout=datetime.timedelta(seconds=300)
    )
    conn.send_bytes(pickle.dumps((True, None, *_groups())))
    meshes: dict[MeshKey, DeviceMesh] = {}
    num_modules = 0
    with contextlib.suppress(EOFError):
        while True:
            gc.collect()
            if num_modules != len(sys.modules):
                gc.freeze()  # collections between tests look only at what tests made, and not at what they imported
                num_modules = len(sys.modules)
            conn.send_bytes(_answer(conn.recv_bytes(), meshes, device_type))


def _serve_fake(rank: int, conn: Connection, dump: str) -> None:
    """Run a process that answers one job as rank `job.fake_rank` of a fake process group."""
    _begin(dump)
    conn.send_bytes(_answer(conn.recv_bytes(), {}, "cpu"))


def _answer(message: bytes, meshes: dict[MeshKey, DeviceMesh], device_type: str) -> bytes:
    """Do the pickled job `message`. Return the pickled (True, result, *_groups()), or (False, traceback, 0, 0) if it raised. Adds
    a new mesh to `meshes`."""
    try:
        job: Job = pickle.loads(message)
        shape, names = job.mesh
        size = math.prod(shape)
        with fake_world(size, job.fake_rank) if job.fake_rank is not None else contextlib.nullcontext():
            if job.mesh not in meshes:
                meshes[job.mesh] = DeviceMesh(device_type, torch.arange(size).view(shape), mesh_dim_names=names)
            result = None if job.call is None else _call(job, meshes[job.mesh])
            return pickle.dumps((True, result, *_groups()))
    except BaseException as error:  # pytest.fail raises outside of Exception
        return pickle.dumps((False, "".join(traceback.format_exception(error)), 0, 0))


def _groups() -> tuple[int, int]:
    """Return (number of process groups that this rank has, number of those that it has created)."""
    world = dist.distributed_c10d._world
    return len(world.pg_map), world.group_count


def _call(job: Job, mesh: DeviceMesh) -> Any:
    """Return the result of the function in `job.call`, called with the parent's import path and warning filters, and seed 0."""
    assert job.call is not None
    sys.path[:] = job.path
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # also makes Python notice that the filters changed
        warnings.filters[:] = job.filters
        fn, args, kwargs = pickle.loads(job.call)
        return fn(mesh, *args, **kwargs)
