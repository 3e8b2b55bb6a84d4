"""Compare the meshes that ranks pass to `shard`, through the job's store, before any group of a mesh is used."""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accordion import _torch
from accordion.errors import DivergenceError
from accordion.safety.liveness.polling import Arrivals, once_after, poll

log = logging.getLogger("accordion")
WARNING_DELAY_S = 10.0  # longer waits are logged
MARGIN_S = 1.0  # added to the timeout of the job's process group
POLL_S = 1.0  # until a rank first asks for which ranks it waits; longer with more than ten ranks, to spare the store
PREFIX = "accordion/meshes"


def same_mesh(mesh: DeviceMesh) -> None:
    """Barrier in the job's store: wait until all ranks of `mesh` have passed it to `shard` as often as this rank has.

    If two ranks wait for each other in different meshes, the ranks of both meshes raise `DivergenceError`. If ranks are missing
    after the job's timeout, this rank raises one that names them. Does nothing in a job of one rank or of simulated ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return
    if _torch.backend_of(mesh.get_group(0), torch.device(mesh.device_type)) == "fake":  # the other ranks are simulated
        return
    ranks = _torch.ranks_of(mesh)
    _MeshWait(_torch.default_store(), dist.get_rank(), f"{tuple(mesh.shape)} of ranks {ranks}", ranks).wait()


class _MeshWait:
    """One wait of `rank` until all `ranks` of a mesh have arrived in the store. `mesh`: shape and ranks of the mesh, as text.
    `time`: number of times that `rank` has arrived so far; `wait` sets the number that includes this wait."""

    def __init__(self, store: Any, rank: int, mesh: str, ranks: list[int], time: int = 0) -> None:
        self._store, self._rank, self.mesh, self.ranks = store, rank, mesh, ranks
        self.arrivals = Arrivals(store, f"{PREFIX}/{mesh}", ranks, time)

    def wait(self) -> None:
        lost_s = _torch.timeout_s_of_job() + MARGIN_S
        self.arrivals.come(self._rank)
        post = {"mesh": self.mesh, "ranks": self.ranks, "time": self.arrivals.time}
        self._store.set(f"{PREFIX}/at/{self._rank}", json.dumps(post))
        poll_s = next_s = POLL_S * max(1.0, len(self.ranks) / 10)
        warn = once_after(WARNING_DELAY_S, lambda: log.warning("%s.", self._absent()))

        def while_waiting(waited_s: float) -> None:
            nonlocal poll_s, next_s
            if self._store.check([self._failed]):
                raise DivergenceError(self._store.get(self._failed).decode())
            if waited_s >= next_s:
                poll_s *= 2
                next_s += poll_s
                self._find_deadlock()
            warn(waited_s)

        if not poll(self.arrivals.all_came, lost_s, while_waiting):
            text = self._absent()
            if self.arrivals.withdraw(self._rank):
                raise DivergenceError(f"{text}. None of them came in {lost_s:.0f} s.")

    def _find_deadlock(self) -> None:
        """If a missing rank waits for this rank in another mesh, make the waits for these two meshes fail on all ranks."""
        for rank in self.arrivals.missing():
            theirs = self._last_of(rank)
            if theirs is None or self._rank not in theirs.ranks or self._rank not in theirs.arrivals.missing():
                continue
            if rank in self.arrivals.missing():  # it has not come since
                meshes = {self._rank: self.mesh, rank: theirs.mesh}
                each = ", ".join(f"rank {each} gave {mesh}" for each, mesh in sorted(meshes.items()))
                for wait in (self, theirs):
                    self._store.set(
                        wait._failed,
                        f"ranks gave other meshes and wait for each other: {each}; pass the same mesh on every rank that is in "
                        "it.",
                    )
                return

    def _last_of(self, rank: int) -> _MeshWait | None:
        """Return the last wait of another rank; None if it has passed no mesh yet."""
        key = f"{PREFIX}/at/{rank}"
        return _MeshWait(self._store, rank, **json.loads(self._store.get(key))) if self._store.check([key]) else None

    @property
    def _failed(self) -> str:
        """Key in the store of an error text. If it is set, the ranks in this wait raise `DivergenceError` with the text."""
        return f"{PREFIX}/{self.mesh}/failed/{self.arrivals.time}"

    def _absent(self) -> str:
        last = {rank: self._last_of(rank) for rank in self.arrivals.missing()}
        each = ", ".join(f"rank {r} (gave {'none yet' if w is None else f'{w.mesh} last'})" for r, w in last.items())
        return (
            f"this rank gave a mesh of {self.mesh} and waits for {each}; pass the same mesh on every rank that is in it"
        )
