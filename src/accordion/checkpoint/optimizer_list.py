"""Several optimizers of one model, saved and loaded as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accordion.errors import UsageError
from accordion.optimizers.wrap import inner_of


class OptimizerList(torch.optim.Optimizer):
    """Several optimizers as one, for `state_dict` alone: their parameters are numbered through from the first optimizer to the
    last. `step` does not work."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        # Without torch's constructor, which would copy the param groups.
        self.parts = list(parts)
        self.param_groups = [group for part in parts for group in part.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of all parts. Indices of parameters go on from part to part. Keys of states that are strings
        begin with the part's number and "/"."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for i, (part, first) in enumerate(self._firsts()):
            of_part = part.state_dict()
            state |= {f"{i}/{k}" if isinstance(k, str) else first + k: v for k, v in of_part["state"].items()}
            groups += [{**group, "params": [first + k for k in group["params"]]} for group in of_part["param_groups"]]
        return {"state": state, "param_groups": groups}

    def divided(self, state_dict: dict[str, Any]) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """Iterate over (part, its state dict) of a state dict as `state_dict` returns it."""
        groups = iter(state_dict["param_groups"])
        for i, (part, first) in enumerate(self._firsts()):
            prefix, indices = f"{i}/", range(first, first + _num_params(part))
            state: dict[Any, Any] = {k - first: v for k, v in state_dict["state"].items() if k in indices}
            shared = {k: v for k, v in state_dict["state"].items() if isinstance(k, str)}
            state |= {k.removeprefix(prefix): v for k, v in shared.items() if k.startswith(prefix)}
            of_part = [next(groups) for _ in part.param_groups]
            yield (
                part,
                {
                    "state": state,
                    "param_groups": [{**group, "params": [k - first for k in group["params"]]} for group in of_part],
                },
            )

    def _firsts(self) -> Iterator[tuple[torch.optim.Optimizer, int]]:
        """Iterate over (part, index of its first parameter)."""
        first = 0
        for part in self.parts:
            yield part, first
            first += _num_params(part)


def _num_params(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def parts_of(optimizer: torch.optim.Optimizer | None) -> list[torch.optim.Optimizer]:
    """Return the optimizers that `optimizer` stands for: those of an `OptimizerList`, itself, or none."""
    if isinstance(optimizer, OptimizerList):
        return optimizer.parts
    return [] if optimizer is None else [optimizer]


def as_one(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> torch.optim.Optimizer | None:
    """Return the optimizer that steps, which is the inner one if `optimizer` wraps one. Return an `OptimizerList` for several.

    Returns None for None. Raises `UsageError` if something else was passed, the list is empty, or a parameter is in two of them.
    """
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
