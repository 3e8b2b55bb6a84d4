"""The first use of a model that was wrapped by hand, which makes its engine: on all ranks, or an error names the others."""

from __future__ import annotations

import logging

import torch.distributed as dist

from accordion import _torch
from accordion.compat.fsdp1.arguments import Arguments
from accordion.errors import UsageError
from accordion.safety.liveness.arrivals import Arrivals
from accordion.safety.liveness.polling import once_after, poll

log = logging.getLogger("accordion")
PATIENCE_S = 10.0  # a wait beyond it is logged
LIMIT_S = 300.0  # the longest that one rank may be ahead of the others
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
    name, mine = f"accordion/first_use/{','.join(map(str, ranks))}", dist.get_rank()
    arrivals = Arrivals(_torch.default_store(), name, ranks)
    arrivals.come(mine)

    def missing() -> str:
        absent = arrivals.missing()
        return f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"

    warn = once_after(PATIENCE_S, lambda: log.warning("waiting for %s: %s.", missing(), ADVICE))
    if not poll(arrivals.all_came, LIMIT_S, warn):
        absent = missing()
        if arrivals.withdraw(mine):
            raise UsageError(f"rank {mine} has waited {LIMIT_S:.0f} s for {absent}: {ADVICE}.")
