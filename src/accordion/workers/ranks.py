"""Rank processes that stay alive between measurements, and run a method whenever their parent process asks them to."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from accordion import _torch
from accordion.devices import Devices, backend_of
from accordion.errors import AccordionError

STILL = "still"  # name of the backend of a `StillGroup`


class BenchError(AccordionError):
    """A contender (a program that a benchmark compares with others) failed or did not answer, or its losses differ too much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Settings of the ranks of a `WorkerTeam`.

    Args:
        group: "real": `num_ranks` processes that communicate. Otherwise one process, rank 0 of `num_ranks`, which sends nothing:
            "fake" is torch's fake process group, "still" is `StillGroup`.
        backend: torch.distributed's backend of a real group; "" is the default of the device type.
        threads: number of torch's threads in each process.
        timeout_s: if a rank does not answer a call within this time, all ranks are killed; the default is the timeout of gloo.
    """

    num_ranks: int
    device_type: str = "cpu"
    group: Literal["real", "fake", "still"] = "real"
    backend: str = ""
    threads: int = 1
    timeout_s: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """Rank, device and `World` of one rank process. A `WorkerTeam` creates one for each process, and passes it to `make`.
    `port`: port on 127.0.0.1 of the parent process's `TCPStore`, by which the ranks of a real group find each other."""

    rank: int
    device: torch.device
    world: World
    port: int

    @property
    def num_ranks(self) -> int:
        return self.world.num_ranks


class WorkerTeam(contextlib.AbstractContextManager["WorkerTeam"]):
    """Context manager for the rank processes of one contender, a program to compare with others. The constructor starts the
    processes, as `world` describes, and waits until each has called `make`; it raises `BenchError` if one fails or takes longer
    than `World.timeout_s`. Leaving the context, or `close`, kills the processes.

    `make(setup, *args)` is called in each process with its `RankSetup`, once the process group exists, and returns the object
    whose methods `ask` calls. `make` must be a function or class of a module, since it is pickled by name. `name`: name of the
    contender in errors. `environ`: environment variables, set when a process starts; None: none.
    """

    def __init__(
        self,
        name: str,
        world: World,
        make: Callable[..., Any],
        args: Sequence[Any] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._timeout_s = name, world.timeout_s
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = mp.get_context("forkserver")  # forks no process that has CUDA, and imports torch once
        context.set_forkserver_preload(_torch.PRELOADED)
        self._ends: list[Connection] = []
        self._processes = []
        num_processes = world.num_ranks if world.group == "real" else 1
        num_devices = 0 if world.device_type == "cpu" else torch.accelerator.device_count()
        devices = Devices(world.device_type, num_devices)
        for rank in range(num_processes):
            setup = RankSetup(rank=rank, device=devices.at(rank), world=world, port=self._store.port)
            end, child = context.Pipe()
            process = context.Process(target=_serve, args=(child, setup, make, args, dict(environ or {})), daemon=True)
            process.start()
            child.close()
            self._ends.append(end)
            self._processes.append(process)
        try:
            self._answers()
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Call `method(*args)` of each process's object at once; return one result of each process, in rank order. If one
        raises an exception, ends, or does not answer within `World.timeout_s`, kill all processes and raise `BenchError`."""
        for end in self._ends:
            with contextlib.suppress(OSError):  # `_answers` reports a rank that has died
                end.send((method, args))
        return self._answers()

    def _answers(self) -> list[Any]:
        results: dict[int, Any] = {}
        waiting = {id(end): rank for rank, end in enumerate(self._ends)}
        deadline = time.monotonic() + self._timeout_s
        while waiting:
            ready = wait([self._ends[rank] for rank in waiting.values()], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                ranks = ", ".join(map(str, sorted(waiting.values())))
                raise BenchError(
                    f"contender {self.name!r} did not answer within {self._timeout_s:g} s on rank {ranks}."
                )
            for end in ready:
                rank = waiting.pop(id(end))
                try:
                    succeeded, answer = self._ends[rank].recv()
                except (EOFError, ConnectionError):
                    succeeded, answer = False, "its process ended"
                if not succeeded:
                    self.close()
                    raise BenchError(f"contender {self.name!r} failed on rank {rank}: {answer}")
                results[rank] = answer
        return [results[rank] for rank in range(len(self._ends))]

    def close(self) -> None:
        """Kill all rank processes, and wait until they have ended. May be called again."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for end in self._ends:
            end.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def interleaved(teams: Sequence[WorkerTeam], rounds: int, method: str, *args: Any) -> dict[str, list[list[Any]]]:
    """Call `ask(method, *args)` of each team in turn, `rounds` times (A B C A B C). Return team name -> result[round][rank]."""
    answers: dict[str, list[list[Any]]] = {team.name: [] for team in teams}
    for _ in range(rounds):
        for team in teams:
            answers[team.name].append(team.ask(method, *args))
    return answers


def _serve(
    conn: Connection, setup: RankSetup, make: Callable[..., Any], args: Sequence[Any], environ: dict[str, str]
) -> None:
    """Run a rank process: join the group, call `make(setup, *args)`, then call a method of the object that `make` returned for
    each (name, arguments) from `conn`. Answer each call by (True, result) or (False, error as text); the first answer, for
    `make`, has the result None. Never returns: ends the process when the parent closes its end of `conn`. `environ`: added to
    `os.environ` first, as are RANK, LOCAL_RANK and WORLD_SIZE."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then kills the ranks
    as_torchrun = {"RANK": setup.rank, "LOCAL_RANK": setup.rank, "WORLD_SIZE": setup.num_ranks}
    os.environ.update({key: str(value) for key, value in as_torchrun.items()} | environ)  # DeepSpeed needs them
    warnings.simplefilter("ignore")
    torch.set_num_threads(setup.world.threads)
    program: Any = None

    def do(task: Callable[[], Any]) -> None:
        try:
            answer = (True, task())
        except Exception as error:
            traceback.print_exc()
            lines = str(error).splitlines() or [""]
            answer = (False, f"{type(error).__name__}: {lines[0]}")
        conn.send(answer)

    def begin() -> None:
        nonlocal program
        join(setup)
        program = make(setup, *args)

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        do(begin)
        while True:
            method, params = conn.recv()
            do(lambda method=method, params=params: getattr(program, method)(*params))  # type: ignore[misc]
    os._exit(0)  # without destructors of groups whose other ranks may be gone


def join(setup: RankSetup) -> None:
    """Set the device of this process unless it is a CPU, and initialize its default process group as `setup.world` describes. A
    real group is collective; for any other, registers the backend `STILL` in this process."""
    if setup.device.type != "cpu":
        torch.accelerator.set_device_index(setup.device.index)
    store: Any
    kind, group = setup.device.type, setup.world.group
    if group == "real":
        store = TCPStore("127.0.0.1", setup.port, is_master=False)
        backend = setup.world.backend or backend_of(kind)
    else:
        store = _torch.fake_store()
        register_still()
        backend = group if kind == "cpu" else f"cpu:{group},{kind}:{group}"  # also for devices unknown to it
    dist.init_process_group(backend, store=store, rank=setup.rank, world_size=setup.num_ranks)


# -- a group for host time


class Done(dist.Work):
    """A `Work` that is complete, for collectives that send nothing, such as those of `StillGroup`."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_Group: Any = dist.ProcessGroup  # its signatures differ between versions


class StillGroup(_Group):  # type: ignore[misc]
    """A process group that reports `num_ranks` ranks, of which only this one exists. Collectives return finished work and leave
    outputs as they are, with one exception: all-gathers copy their input into each chunk of the output until `moves` is set to
    False, because the setup of a model needs values. torch's fake group always copies, so host time measured with it grows
    with ranks and bytes, and differs between collectives."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._rank, self._num_ranks = rank, num_ranks
        self._done = Done()
        self.moves = True

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._num_ranks

    @property
    def group_name(self) -> str:
        return _torch.name_of_group(self)

    def name(self) -> str:
        return "fake"  # callers must not expect other ranks, as in torch's fake group

    getBackendName = name  # noqa: N815

    def _get_backend(self, device: Any) -> StillGroup:
        return self

    def all_gather_single(self, out: Tensor, shard: Tensor, *_: Any) -> Any:
        if self.moves:
            out.view(self._num_ranks, -1).copy_(shard.reshape(1, -1).clone())
        return self._done

    def allgather(self, outs: Sequence[Sequence[Tensor]], shards: Sequence[Tensor], *_: Any) -> Any:
        if self.moves:
            for out, shard in zip(outs, shards, strict=True):
                for chunk in out:
                    chunk.copy_(shard)
        return self._done

    def all_gather_single_coalesced(self, outs: Sequence[Tensor], shards: Sequence[Tensor], *_: Any) -> Any:
        for out, shard in zip(outs, shards, strict=True):
            self.all_gather_single(out, shard)
        return self._done

    def _nothing(self, *_: Any) -> Any:
        return self._done

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    allreduce = allreduce_coalesced = broadcast = _nothing
    reduce_scatter = reduce_scatter_single = _reduce_scatter_base = _nothing
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _nothing
    alltoall = all_to_all_single = alltoall_base = send = recv = barrier = _nothing


def register_still() -> None:
    """Register the backend `STILL`, which makes a `StillGroup`, with torch in this process, unless it is registered."""
    if STILL not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            STILL, lambda store, rank, num_ranks, timeout: StillGroup(rank, num_ranks), devices=["cpu", "cuda"]
        )
