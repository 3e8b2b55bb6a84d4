"""Whether ranks mean the same mesh: asked through the job's store, before any group of a mesh is used."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accordion import _torch
from accordion.errors import DivergenceError

log = logging.getLogger("accordion")
PATIENCE_S = 10.0  # a wait beyond it is logged
MARGIN_S = 1.0  # beyond the time-out of the job's process group
LOOK_S = 1.0  # after it a rank looks for whom it waits; later for more than ten ranks, whose looks the store must bear
POLL_S = 0.02
PREFIX = "accordion/meshes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """What a rank has told of the mesh that it gave last: the how manieth time it gave this one, and whether it waits now."""

    mesh: str
    ranks: list[int]
    time: int
    waits: bool


def same_mesh(mesh: DeviceMesh) -> None:
    """Wait until all ranks of `mesh` have given it too, as often as this one.

    Raises `DivergenceError` on every rank where ranks that gave other meshes wait for each other: groups that do not fit would
    wait for good, each for ranks that are in another one. A rank that does not come is named after the job's time-out.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return
    if _torch.backend_of(mesh.get_group(0), torch.device(mesh.device_type)) == "fake":  # the other ranks are simulated
        return
    ranks, store, mine = _torch.ranks_of(mesh), _torch.default_store(), dist.get_rank()
    if mesh.device_type != "cpu" and torch.accelerator.device_count() > 1:
        _claim_device(store, str(mine), mesh.device_type)
    text = f"{tuple(mesh.shape)} of ranks {ranks}"
    post = Post(mesh=text, ranks=ranks, time=store.add(_given(text, mine), 1), waits=True)
    _tell(store, mine, post)
    try:
        _wait(store, mine, post)
    finally:
        _tell(store, mine, replace(post, waits=False))


def _claim_device(store: Any, rank: str, device_type: str) -> None:
    """Log a warning if another rank has claimed the current device: NCCL refuses this in words that name no remedy."""
    device = torch.device(device_type, torch.accelerator.current_device_index())
    # Ranks that see different devices may give them the same number.
    uuid = getattr(torch.get_device_module(device).get_device_properties(device), "uuid", device.index)
    first = store.compare_set(f"{PREFIX}/device/{socket.gethostname()}/{uuid}", "", rank).decode()
    if first != rank:
        log.warning(
            "rank %s computes on %s, as rank %s does, and this machine has %d devices; call "
            "torch.accelerator.set_device_index(local rank) before anything else uses a device.",
            rank, device, first, torch.accelerator.device_count(),
        )  # fmt: skip


def _wait(store: Any, mine: int, post: Post) -> None:
    """Until all have come: one key tells so. Now and then, ever more seldom, this rank looks for whom it waits."""
    met, failed, everyone = _key("met", post), _key("failed", post), len(post.ranks)
    look_s, lost_s, pause_s = LOOK_S * max(1.0, everyone / 10), _torch.timeout_s_of_job() + MARGIN_S, 1e-4
    began, next_s, told, before = time.monotonic(), look_s, False, dict[int, Post]()
    store.add(met, 1)
    while store.add(met, 0) < everyone:
        if store.check([failed]):
            raise DivergenceError(store.get(failed).decode())
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)
        waited = time.monotonic() - began
        if waited < min(next_s, lost_s):
            continue
        next_s += (look_s := 2 * look_s)
        before = _look(store, mine, post, before)
        if waited > lost_s:
            text = _absent(store, post)
            store.add(met, -1)
            store.add(_given(post.mesh, mine), -1)  # this time did not count
            raise DivergenceError(f"{text}. None of them came in {waited:.0f} s.")
        if waited > PATIENCE_S and not told:
            told = True
            log.warning("%s.", _absent(store, post))
    if post.ranks[0] == mine and post.time > 1:  # all have left the time before
        store.delete_key(_key("met", replace(post, time=post.time - 1)))


def _look(store: Any, mine: int, post: Post, before: Mapping[int, Post]) -> dict[int, Post]:
    """Who waits now, of those for whom this rank waits. Where it waits in a circle of ranks that were all there at the last
    look too, whoever finds it first tells all who give one of these meshes this time, those that come later too."""
    found = _waiting(store, mine, post)
    stuck = sorted(_stuck({rank: _missing(store, p) for rank, p in found.items() if before.get(rank) == p}))
    if mine not in stuck:
        return found
    if store.add(_key("found", found[stuck[0]]), 1) == 1:
        each = ", ".join(f"rank {rank} gave {found[rank].mesh}" for rank in stuck)
        text = (
            f"ranks gave other meshes and wait for each other: {each}; pass the same mesh on every rank that is in it."
        )
        for given in {p.mesh: p for rank in stuck for p in (found[rank],)}.values():
            for rank in set(_missing(store, given)).intersection(stuck):  # they will not come this time
                store.add(_given(given.mesh, rank), 1)
            store.set(_key("failed", given), text)
    return found


def _absent(store: Any, post: Post) -> str:
    last = {rank: _post(store, rank) for rank in _missing(store, post)}
    each = ", ".join(f"rank {r} (gave {'none yet' if p is None else f'{p.mesh} last'})" for r, p in last.items())
    return f"this rank gave a mesh of {post.mesh} and waits for {each}; pass the same mesh on every rank that is in it"


def _waiting(store: Any, mine: int, post: Post) -> dict[int, Post]:
    """Who waits, of those for whom this rank waits, and for whom they do, and so on; with this one."""
    found: dict[int, Post] = {}
    ask = [mine]
    while ask:
        rank = ask.pop()
        said = post if rank == mine else _post(store, rank)
        if rank not in found and said is not None and said.waits:
            found[rank] = said
            ask += _missing(store, said)
    return found


def _stuck(waiting: Mapping[int, Iterable[int]]) -> set[int]:
    """Who waits for a circle, or in one. All ranks that a mesh has must come, so who waits for one of them is stuck too."""
    free = set(waiting)
    while True:  # take away who waits for nobody of these; what is left waits in circles
        left = {rank for rank in free if any(other in free for other in waiting[rank])}
        if left == free:
            return left
        free = left


def _missing(store: Any, post: Post) -> list[int]:
    """The ranks of a mesh that have not given it as often."""
    return [rank for rank in post.ranks if store.add(_given(post.mesh, rank), 0) < post.time]


def _post(store: Any, rank: int) -> Post | None:
    key = f"{PREFIX}/at/{rank}"
    return Post(**json.loads(store.get(key))) if store.check([key]) else None


def _tell(store: Any, rank: int, post: Post) -> None:
    store.set(f"{PREFIX}/at/{rank}", json.dumps(asdict(post)))


def _given(mesh: str, rank: int) -> str:
    return f"{PREFIX}/given/{mesh}/{rank}"


def _key(what: str, post: Post) -> str:
    return f"{PREFIX}/{what}/{post.mesh}/{post.time}"
