"""The optimizers that can be planned: torch's own, and AdamW with an average of the weights or moments of 16, 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """An optimizer that can be planned: how it is created, and bytes of its states."""

    make: Callable[[Any], torch.optim.Optimizer]  # creates the optimizer from its parameters
    state_bytes: float  # least bytes of its states for each element of a float32 parameter
    elementwise: bool = False  # the argument of `wrap_optimizer`: an element's update depends on that element alone


class NarrowAdamW(torch.optim.Optimizer):
    """Stand-in for AdamW of bitsandbytes and torchao, with two moments of `bits` bits (16, 8 or 4). Below 16 bits, each `block`
    elements share a float32 scale. Allocates, reads and writes as many bytes as the real optimizer; its values are wrong."""

    def __init__(self, params: Any, bits: int, block: int) -> None:
        super().__init__(params, {})
        self._bits, self._block = bits, block

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            state = self.state[p]
            for moment in () if state else ("first", "second"):
                if self._bits >= 16:
                    state[f"{moment}_values"] = torch.zeros_like(p, dtype=torch.bfloat16)
                else:
                    num_bytes, num_scales = p.numel() * self._bits // 8, -(-p.numel() // self._block)
                    state[f"{moment}_values"] = torch.zeros(num_bytes, dtype=torch.uint8, device=p.device)
                    state[f"{moment}_scales"] = torch.zeros(num_scales, dtype=torch.float32, device=p.device)
            for tensor in state.values():
                tensor.add_(1)
            p.addcmul_(p.grad, p.grad)


class AveragedAdamW(torch.optim.AdamW):
    """AdamW that also keeps an exponential moving average of each parameter on the device, with the bytes and kernels of
    `accordion.EMA`. The average is the state "average"; its values are wrong."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "average" not in state:
                        state["average"] = torch.zeros_like(p)
                    state["average"].lerp_(p, 1e-3)


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(make=partial(torch.optim.AdamW, lr=1e-3, fused=True), state_bytes=8),
    "adamw_ema": OptimizerKind(make=partial(AveragedAdamW, lr=1e-3, fused=True), state_bytes=12, elementwise=True),
    "adamw_foreach": OptimizerKind(make=partial(torch.optim.AdamW, lr=1e-3, foreach=True), state_bytes=8),
    "adamw_bf16": OptimizerKind(make=partial(NarrowAdamW, bits=16, block=0), state_bytes=4, elementwise=True),
    "adamw_8bit": OptimizerKind(make=partial(NarrowAdamW, bits=8, block=256), state_bytes=2, elementwise=True),
    "adamw_4bit": OptimizerKind(make=partial(NarrowAdamW, bits=4, block=128), state_bytes=1, elementwise=True),
    "sgd": OptimizerKind(make=partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True), state_bytes=4),
}
