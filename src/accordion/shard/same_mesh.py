"""Compare the meshes that ranks pass to `shard`, through the job's store, before any group of a mesh is used."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accordion import _torch
from accordion.errors import DivergenceError
from accordion.safety.liveness.arrivals import Arrivals
from accordion.safety.liveness.polling import once_after, poll

log = logging.getLogger("accordion")
WARNING_DELAY_S = 10.0  # longer waits are logged
MARGIN_S = 1.0  # added to the timeout of the job's process group
POLL_S = 1.0  # until a rank first asks for which ranks it waits; longer with more than ten ranks, to spare the store
PREFIX = "accordion/meshes"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPost:
    """The last mesh that a rank passed to `shard`. `time`: how often it passed this mesh. `waits`: True while it waits."""

    mesh: str
    ranks: list[int]
    time: int
    waits: bool


def same_mesh(mesh: DeviceMesh) -> None:
    """Barrier in the job's store: wait until all ranks of `mesh` have passed it to `shard` as often as this rank has.

    Raises `DivergenceError` on every rank if ranks passed different meshes and wait for each other, because process groups of
    other ranks would wait for ever. After the job's timeout the error names the ranks that are missing.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return
    if _torch.backend_of(mesh.get_group(0), torch.device(mesh.device_type)) == "fake":  # the other ranks are simulated
        return
    store, rank = _torch.default_store(), dist.get_rank()
    if mesh.device_type != "cpu" and torch.accelerator.device_count() > 1:
        _claim_device(store, str(rank), mesh.device_type)
    ranks = _torch.ranks_of(mesh)
    _MeshWait(store, rank, f"{tuple(mesh.shape)} of ranks {ranks}", ranks).wait()


def _claim_device(store: Any, rank: str, device_type: str) -> None:
    """Log a warning if another rank uses this rank's device; NCCL's own error does not say what to do."""
    device = torch.device(device_type, torch.accelerator.current_device_index())
    # The index does not suffice, because ranks that see different devices may number them alike.
    uuid = getattr(torch.get_device_module(device).get_device_properties(device), "uuid", device.index)
    first = store.compare_set(f"{PREFIX}/device/{socket.gethostname()}/{uuid}", "", rank).decode()
    if first != rank:
        log.warning(
            "rank %s computes on %s, as rank %s does, and this machine has %d devices; call "
            "torch.accelerator.set_device_index(local rank) before anything else uses a device.",
            rank, device, first, torch.accelerator.device_count(),
        )  # fmt: skip


class _MeshWait:
    """One wait of this rank for all other ranks of its mesh; polls become rarer with time."""

    def __init__(self, store: Any, rank: int, mesh: str, ranks: list[int]) -> None:
        self._store, self._rank, self._mesh, self._ranks = store, rank, mesh, ranks
        self._arrivals = Arrivals(store, _name(mesh), ranks)
        self._waiting: dict[int, MeshPost] = {}  # ranks that waited at the last poll

    def wait(self) -> None:
        lost_s = _torch.timeout_s_of_job() + MARGIN_S
        self._arrivals.come(self._rank)
        self._post(waits=True)
        poll_s = next_s = POLL_S * max(1.0, len(self._ranks) / 10)
        warn = once_after(WARNING_DELAY_S, lambda: log.warning("%s.", self._absent()))

        def while_waiting(waited_s: float) -> None:
            nonlocal poll_s, next_s
            if self._store.check([self._key("failed", self._own())]):
                raise DivergenceError(self._store.get(self._key("failed", self._own())).decode())
            if waited_s >= next_s:
                poll_s *= 2
                next_s += poll_s
                self._find_deadlock()
            warn(waited_s)

        try:
            if not poll(self._arrivals.all_came, lost_s, while_waiting):
                text = self._absent()
                if self._arrivals.withdraw(self._rank):
                    raise DivergenceError(f"{text}. None of them came in {lost_s:.0f} s.")
        finally:
            self._post(waits=False)
        if self._ranks[0] == self._rank:
            self._arrivals.forget_last()

    def _find_deadlock(self) -> None:
        """Report a deadlock to its ranks if this rank is the first to see a wait cycle that existed at the last poll."""
        before, self._waiting = self._waiting, self._chain()
        stuck = sorted(_stuck({rank: self._missing(p) for rank, p in self._waiting.items() if before.get(rank) == p}))
        if self._rank not in stuck or self._store.add(self._key("found", self._waiting[stuck[0]]), 1) != 1:
            return
        each = ", ".join(f"rank {rank} gave {self._waiting[rank].mesh}" for rank in stuck)
        text = (
            f"ranks gave other meshes and wait for each other: {each}; pass the same mesh on every rank that is in it."
        )
        for post in {self._waiting[rank].mesh: self._waiting[rank] for rank in stuck}.values():
            for rank in set(self._missing(post)).intersection(stuck):  # these ranks will not come
                self._arrivals_of(post).count(rank, 1)
            self._store.set(self._key("failed", post), text)

    def _chain(self) -> dict[int, MeshPost]:
        """Return this rank and the ranks that wait, of those that it waits for directly or through other ranks."""
        waiting: dict[int, MeshPost] = {}
        ask = [self._rank]
        while ask:
            rank = ask.pop()
            post = self._own() if rank == self._rank else self._post_of(rank)
            if rank not in waiting and post is not None and post.waits:
                waiting[rank] = post
                ask += self._missing(post)
        return waiting

    def _absent(self) -> str:
        last = {rank: self._post_of(rank) for rank in self._arrivals.missing()}
        each = ", ".join(f"rank {r} (gave {'none yet' if p is None else f'{p.mesh} last'})" for r, p in last.items())
        return f"this rank gave a mesh of {self._mesh} and waits for {each}; pass the same mesh on every rank that is in it"

    def _own(self, waits: bool = True) -> MeshPost:
        return MeshPost(mesh=self._mesh, ranks=self._ranks, time=self._arrivals.time, waits=waits)

    def _post(self, waits: bool) -> None:
        self._store.set(f"{PREFIX}/at/{self._rank}", json.dumps(asdict(self._own(waits))))

    def _post_of(self, rank: int) -> MeshPost | None:
        key = f"{PREFIX}/at/{rank}"
        return MeshPost(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _arrivals_of(self, post: MeshPost) -> Arrivals:
        return Arrivals(self._store, _name(post.mesh), post.ranks, post.time)

    def _missing(self, post: MeshPost) -> list[int]:
        return self._arrivals_of(post).missing()

    def _key(self, what: str, post: MeshPost) -> str:
        return f"{_name(post.mesh)}/{what}/{post.time}"


def _name(mesh: str) -> str:
    return f"{PREFIX}/{mesh}"


def _stuck(waiting: Mapping[int, Iterable[int]]) -> set[int]:
    """Return the ranks that wait in or for a cycle. A rank needs all ranks of its mesh, so waiting for one suffices."""
    candidates = set(waiting)
    while True:  # remove ranks that wait for none of the others; the ones left wait in cycles
        left = {rank for rank in candidates if any(other in candidates for other in waiting[rank])}
        if left == candidates:
            return left
        candidates = left
