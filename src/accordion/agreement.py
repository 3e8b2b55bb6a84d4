"""Whether all ranks hold the same model: its structure and settings, then its values by checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from accordion.config import Offload, Precision, Strategy
from accordion.engine.collectives import Link, broadcast, extremes, reduced
from accordion.engine.group import Wiring
from accordion.errors import AccordionError, DivergenceError, OffloadError, UsageError
from accordion.units import Owned

Made = TypeVar("Made")


def same_structure(
    owned: list[Owned], chosen: list[tuple[str, nn.Module]], strategy: Strategy, wiring: Wiring, settings: Any = None
) -> None:
    """Raise on every rank where ranks hold other names, shapes, dtypes, units or settings (JSON)."""
    links = _links(wiring)
    if not links:
        return
    facts = [[o.names, list(o.original.shape), str(o.original.dtype), o.original.is_meta, o.owner] for o in owned]
    text = json.dumps([strategy.name, settings, [name for name, _ in chosen], facts])
    digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.int64).to(wiring.device)
    low, high = extremes(digest, links)
    if not torch.equal(low, high):
        raise DivergenceError(
            f"ranks hold different models or settings: this rank has {len(owned)} parameters in {len(chosen)} units under "
            f"{strategy.name}; build the same model with the same arguments on every rank."
        )


def settings_of(precisions: Sequence[Precision], offloads: Sequence[Offload]) -> list[list[str]]:
    """What ranks must agree on of each unit's settings. Folders of a tier and bytes of budgets may be each rank's own."""

    def facts(precision: Precision, offload: Offload) -> list[str]:
        dtypes = [str(d) for d in (precision.params, precision.reduce, precision.master)]
        has_budget = (offload.device_bytes, offload.host_bytes) != (None, None)
        places = [offload.params, offload.rest_of_grads, offload.optimizer, offload.activations, offload.stepped_on]
        return [*dtypes, *(place.partition(":")[0] for place in places), str(has_budget), str(offload.step_in_backward)]

    return [facts(*pair) for pair in zip(precisions, offloads, strict=True)]


def on_every_rank(make: Callable[[], Made], wiring: Wiring) -> Made:
    """What `make` gives. Where it raises one of our errors on some rank it is raised on all: none goes on and waits for it."""
    made: Made | None = None
    error: AccordionError | None = None
    try:
        made = make()
    except (UsageError, OffloadError) as caught:
        error = caught
    failed, links = torch.tensor([float(error is not None)], device=wiring.device), _links(wiring)
    if links:
        reduced(failed, links)
    if error is not None:
        raise error
    if links and failed.item():
        raise UsageError(
            f"{int(failed.item())} other ranks could not get the memory or files that offloading asks for; they say why."
        )
    assert made is not None, "what is made is an object"
    return made


def same_values(owned: list[Owned], wiring: Wiring, sync: bool) -> None:
    """Raise on every rank where ranks hold other values; with `sync` every rank takes the first one's."""
    links = _links(wiring)
    if not links:
        return
    real = [o for o in owned if not o.original.is_meta]
    if sync:
        for o in real:
            data = o.original.data.to(wiring.device)
            broadcast([data], links)
            o.original.data.copy_(data)
        return
    if not real:
        return
    low, high = extremes(torch.stack([checksum(o.original) for o in real]).to(wiring.device), links)
    different = [o.names[0] for o, a, b in zip(real, low.tolist(), high.tolist(), strict=True) if a != b]
    if different:
        raise DivergenceError(
            f"{len(different)} of {len(real)} parameters differ between ranks, the first is {different[0]!r}; seed every rank "
            "alike before building the model, load the same weights, or pass sync=True to take the first rank's."
        )


def _links(wiring: Wiring) -> list[Link]:
    """Those on which somebody answers."""
    links = [axis.gather for axis in (wiring.shard, wiring.replicate)]
    return [link for link in links if link.num_ranks > 1 and not link.is_fake]


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """0-d int64: the sum of the tensor's bits taken as integers, the same for every order of summation."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(kind).sum(dtype=torch.int64)
