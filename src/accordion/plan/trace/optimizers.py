"""The optimizers that a plan knows: torch's own, and those whose two moments are kept in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """`make`: of parameters. `state_bytes`: of a float32 parameter's element, at least. `elementwise`: what `wrap_optimizer` is
    told of one that it does not know.
    """

    make: Callable[[Any], torch.optim.Optimizer]
    state_bytes: float
    elementwise: bool = False


class NarrowAdamW(torch.optim.Optimizer):
    """AdamW as bitsandbytes and torchao keep it: two moments of `bits`, below 16 with a float32 scale for each `block` elements.

    It takes the memory of one, and reads and writes what one does; it computes nothing.
    """

    def __init__(self, params: Any, bits: int, block: int) -> None:
        super().__init__(params, {})
        self._bits, self._block = bits, block

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    for moment in ("first", "second"):
                        state |= {f"{moment}_{name}": made for name, made in self._moment(p).items()}
                for kept in state.values():
                    kept.add_(1)
                p.addcmul_(p.grad, p.grad)

    def _moment(self, p: Tensor) -> dict[str, Tensor]:
        if self._bits >= 16:
            return {"values": torch.zeros_like(p, dtype=torch.bfloat16)}
        scales = -(-p.numel() // self._block)
        return {
            "values": torch.zeros(p.numel() * self._bits // 8, dtype=torch.uint8, device=p.device),
            "scales": torch.zeros(scales, dtype=torch.float32, device=p.device),
        }


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(make=partial(torch.optim.AdamW, lr=1e-3, fused=True), state_bytes=8),
    "adamw_foreach": OptimizerKind(make=partial(torch.optim.AdamW, lr=1e-3, foreach=True), state_bytes=8),
    "adamw_bf16": OptimizerKind(make=partial(NarrowAdamW, bits=16, block=0), state_bytes=4, elementwise=True),
    "adamw_8bit": OptimizerKind(make=partial(NarrowAdamW, bits=8, block=256), state_bytes=2, elementwise=True),
    "adamw_4bit": OptimizerKind(make=partial(NarrowAdamW, bits=4, block=128), state_bytes=1, elementwise=True),
    "sgd": OptimizerKind(make=partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True), state_bytes=4),
}
