"""Optimizers whose states differ in shape from their parameters: stand-ins for low-bit optimizers of other libraries."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor

BLOCK = 16  # elements that share a scale
SMALLEST = 32  # elements of a shard whose moment is quantised


def placed(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in state.items()}


class InBlocks(torch.optim.Optimizer):
    """SGD with a moment in 8 bits. States: `codes` (uint8, shape of the parameter), `absmax` of each block, `table`, and `step`.

    `load_state_dict` keeps dtypes of states, as that of bitsandbytes does; torch's casts them to the dtype of the parameter.
    """

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.table = (torch.arange(256) - 128) / 127

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    self.begin(p, state)
                state["step"] += 1
                moment = self.moment(p, state).mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(moment, alpha=group["lr"])
                self.keep(moment, state)

    def begin(self, p: Tensor, state: dict[str, Any]) -> None:
        if p.numel() < SMALLEST:
            state["wide"] = torch.zeros_like(p)
            return
        state["codes"] = torch.full_like(p, 128, dtype=torch.uint8)
        state["absmax"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
        self.table = state["table"] = self.table.to(p.device)  # one for all

    def moment(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        if "wide" in state:
            return state["wide"]
        values = state["table"][state["codes"].flatten().long()]
        return (values * state["absmax"].repeat_interleave(BLOCK)[: values.numel()]).view(p.shape)

    def keep(self, moment: Tensor, state: dict[str, Any]) -> None:
        if "wide" in state:
            return
        flat = moment.flatten()
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        state["absmax"].copy_(blocks.abs().amax(1))
        scaled = blocks / state["absmax"].clamp(min=1e-12)[:, None]
        state["codes"].copy_((scaled * 127 + 128).round().flatten()[: flat.numel()].view(moment.shape))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = deepcopy(state_dict)
        groups = [
            {**saved, "params": own["params"]}
            for saved, own in zip(state_dict["param_groups"], self.param_groups, strict=True)
        ]
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        state = {params[i]: placed(value, params[i].device) for i, value in state_dict["state"].items()}
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})


class Packed(InBlocks):
    """SGD with a moment in 4 bits: two elements in a byte, so that no state has the shape of its parameter."""

    def begin(self, p: Tensor, state: dict[str, Any]) -> None:
        state["packed"] = torch.full(((p.numel() + 1) // 2,), 0x88, dtype=torch.uint8, device=p.device)
        state["largest"] = 0.0

    def moment(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        pairs = torch.stack([state["packed"] // 16, state["packed"] % 16], 1).flatten()[: p.numel()]
        return ((pairs.float() - 8) / 7 * state["largest"]).view(p.shape)

    def keep(self, moment: Tensor, state: dict[str, Any]) -> None:
        state["largest"] = float(moment.abs().max()) if moment.numel() else 0.0
        codes = (moment.flatten() / max(state["largest"], 1e-12) * 7 + 8).round().to(torch.uint8)
        pairs = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
        state["packed"].copy_(pairs[:, 0] * 16 + pairs[:, 1])
