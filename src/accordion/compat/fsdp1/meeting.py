"""The first use of a model that was wrapped by hand, which makes its engine: on all ranks, or an error names the others."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch.distributed as dist

from accordion import _torch
from accordion.compat.fsdp1.arguments import Arguments
from accordion.errors import UsageError

log = logging.getLogger("accordion")
PATIENCE_S = 10.0  # a wait beyond it is logged
LIMIT_S = 300.0  # the longest that one rank may be ahead of the others
POLL_S = 0.02
ADVICE = (
    "the first use of a model that was wrapped by hand (its parameters, state, summon_full_params or forward) makes the engine, "
    "for which all ranks are needed; do that first on every rank, list(model.parameters()) for example, or give auto_wrap_policy"
)


def ranks_of(arguments: Arguments) -> list[int]:
    """The ranks over which a model will lie, by their number in the job."""
    if arguments.device_mesh is not None:
        return [int(rank) for rank in arguments.device_mesh.mesh.flatten()]
    group = arguments.process_group
    return sorted(dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else None))


def meet(ranks: list[int]) -> None:
    """Wait until all of `ranks` are here as often as this one. Raises `UsageError` naming those that do not come."""
    if len(ranks) < 2 or not dist.is_initialized() or dist.get_backend() == "fake":
        return
    store, here, mine = _torch.default_store(), f"accordion/first_use/{','.join(map(str, ranks))}", dist.get_rank()
    time_of = store.add(f"{here}/of/{mine}", 1)
    met, began, told = f"{here}/met/{time_of}", time.monotonic(), False
    arrived = store.add(met, 1)
    while arrived < len(ranks):
        waited = time.monotonic() - began
        if waited > PATIENCE_S and not told:
            told = True
            log.warning("waiting for %s: %s.", _missing(store, here, ranks, time_of), ADVICE)
        if waited > LIMIT_S:
            missing = _missing(store, here, ranks, time_of)
            if store.add(met, -1) + 1 == len(ranks):  # the last one has just come
                store.add(met, 1)
                return
            store.add(f"{here}/of/{mine}", -1)
            raise UsageError(f"rank {mine} has waited {waited:.0f} s for {missing}: {ADVICE}.")
        time.sleep(POLL_S)
        arrived = store.add(met, 0)


def _missing(store: Any, here: str, ranks: list[int], time_of: int) -> str:
    found = [rank for rank in ranks if store.add(f"{here}/of/{rank}", 0) < time_of]
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
