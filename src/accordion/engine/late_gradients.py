"""Gradients of zeros, for parameters without a gradient on this rank. If no rank had one, the end of the backward drops it."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor


class UndecidedGradients:
    """Records of parameters without a gradient on this rank, which has zeros as their `.grad`: how many ranks had a gradient.
    The end of a backward then sets `.grad` to None if no rank had one."""

    # The numbers are read once, at the end of the backward, because each read makes the host wait for the device.

    def __init__(self) -> None:
        # By id of the parameter: the parameter, its `grad`, and (sums, position) of each count of ranks.
        self._entries: dict[int, tuple[Tensor, Tensor, list[tuple[Tensor, int]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def note(self, param: Tensor, previous: Tensor | None, grad: Tensor, counted: tuple[Tensor, int] | None) -> None:
        """Record that `grad` becomes `param.grad`, or is added in place to `previous`, the gradient so far.

        `counted`: (counts, k): `counts[k]`, on the device, is the number of ranks with a gradient in this reduce. None deletes
        the record of `param`, whose gradient then stays. No record is made if `previous` is not recorded.
        """
        entry = self._entries.get(id(param))
        if counted is None:
            self._entries.pop(id(param), None)
        elif previous is None:
            self._entries[id(param)] = param, grad, [counted]
        elif entry is not None and previous is entry[1]:
            entry[2].append(counted)

    def forget(self) -> None:
        self._entries.clear()

    def settle(self) -> None:
        """Set `.grad` to None for recorded parameters for which no rank had a gradient, and forget all records.

        The host waits for the device if there is a record.
        """
        if not self._entries:
            return
        entries, self._entries = self._entries, {}
        tensors = {id(sums): sums for _, _, counted in entries.values() for sums, _ in counted}
        numbers = iter(torch.cat(list(tensors.values())).tolist())
        counts = {key: list(islice(numbers, sums.numel())) for key, sums in tensors.items()}
        for param, grad, counted in entries.values():
            if param.grad is grad and not any(counts[id(sums)][k] for sums, k in counted):
                param.grad = None
