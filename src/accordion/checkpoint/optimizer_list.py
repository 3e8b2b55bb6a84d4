"""Several optimizers of one model, saved and loaded as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any

import torch

from accordion.errors import UsageError
from accordion.optimizers.wrap import inner_of


class OptimizerList(torch.optim.Optimizer):
    """A stand-in for several optimizers, which checkpoints save and load as one; made by `as_one`. It has `param_groups`,
    `state_dict` to save, and `divided` to load; `step`, `load_state_dict` and torch's other methods do not work. State dicts
    number parameters through all optimizers: those of the second follow those of the first."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        # Without torch's constructor, which would copy the param groups.
        self.parts = list(parts)
        self.param_groups = [group for part in parts for group in part.param_groups]
        counts = [sum(len(group["params"]) for group in part.param_groups) for part in parts]
        # (first, end) of the indices of each part's parameters.
        self._spans = list(pairwise(accumulate(counts, initial=0)))

    def state_dict(self) -> dict[str, Any]:
        """Return one state dict of all optimizers. A state that belongs to no parameter has a string as key; the optimizer's
        position is put before it: "count" of the second optimizer becomes "1/count"."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for i, (part, (first, _)) in enumerate(zip(self.parts, self._spans, strict=True)):
            of_part = part.state_dict()
            state |= {f"{i}/{k}" if isinstance(k, str) else first + k: v for k, v in of_part["state"].items()}
            groups += [{**group, "params": [first + k for k in group["params"]]} for group in of_part["param_groups"]]
        return {"state": state, "param_groups": groups}

    def divided(self, state_dict: dict[str, Any]) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """Divide `state_dict`, one of all optimizers as `OptimizerList.state_dict` returns it; iterate over (optimizer, its own
        state dict)."""
        groups = iter(state_dict["param_groups"])
        for i, (part, span) in enumerate(zip(self.parts, self._spans, strict=True)):
            prefix, first, indices = f"{i}/", span[0], range(*span)
            state: dict[Any, Any] = {k - first: v for k, v in state_dict["state"].items() if k in indices}
            shared = {k: v for k, v in state_dict["state"].items() if isinstance(k, str)}
            state |= {k.removeprefix(prefix): v for k, v in shared.items() if k.startswith(prefix)}
            of_part = islice(groups, len(part.param_groups))
            renumbered = [{**group, "params": [k - first for k in group["params"]]} for group in of_part]
            yield part, {"state": state, "param_groups": renumbered}


def parts_of(optimizer: torch.optim.Optimizer | None) -> list[torch.optim.Optimizer]:
    """Return the optimizers of an `OptimizerList`, [optimizer] for another optimizer, and [] for None."""
    if isinstance(optimizer, OptimizerList):
        return optimizer.parts
    return [] if optimizer is None else [optimizer]


def as_one(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> torch.optim.Optimizer | None:
    """Return the optimizer that steps: `optimizer`, or the inner one if it wraps another; an `OptimizerList` for a list of
    several; None for None. Raises `UsageError` if an entry is no optimizer, the list is empty, or two optimizers have a
    parameter in common."""
    if optimizer is None:
        return None
    listed: Sequence[Any] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    parts = [inner_of(each) for each in listed]
    for part in parts:
        if not all(hasattr(part, name) for name in ("param_groups", "state_dict", "load_state_dict")):
            raise UsageError(
                f"a checkpoint holds the states of torch.optim.Optimizers, and optimizer has a {type(part).__name__}; pass one "
                "optimizer or a list of them."
            )
    params = [id(p) for part in parts for group in part.param_groups for p in group["params"]]
    if len(parts) == 1:
        return parts[0]
    if len(set(params)) < len(params) or not parts:
        raise UsageError(
            f"the list of {len(parts)} optimizers {'has a parameter twice' if parts else 'is empty'}; pass optimizers that have "
            "no parameter in common."
        )
    return OptimizerList(parts)
