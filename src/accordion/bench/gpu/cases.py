"""What the parts train: a Llama of a shape, under each contender."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import accordion as acc
from accordion import _torch
from accordion.bench.contenders import OURS, WRAPPERS, Loop, mesh_of
from accordion.bench.model import Llama
from accordion.bench.trainer import Trainer
from accordion.models.llama import LlamaShape
from accordion.state import sharded_engine
from accordion.workers.ranks import Seat

BF16 = torch.bfloat16
NODE = 8  # devices that a machine has in a job of several


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A Llama in training. `masters`: parameters in float32, computed with in bf16; else parameters are bf16.

    `wide`: the optimizer keeps 8 bytes a parameter whatever its dtype. `meta`: weights are made after sharding.
    `compiled`: backend with which each block is compiled.
    """

    preset: LlamaShape
    batch: int
    seq: int
    masters: bool = False
    recompute: bool = False
    wide: bool = False
    meta: bool = False
    compiled: str = ""


class WideAdam(torch.optim.Optimizer):
    """Adam with both states in float32, 8 bytes a parameter, beside parameters of any dtype."""

    def __init__(self, params: Any, lr: float = 1e-5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever given
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p, dtype=torch.float32)
                    state["square"] = torch.zeros_like(p, dtype=torch.float32)
                grad = p.grad.float()
                state["mean"].lerp_(grad, 0.1)
                state["square"].lerp_(grad.square_(), 0.05)
                change = torch.sqrt(state["square"]).add_(1e-8).reciprocal_().mul_(state["mean"])
                p.add_(change.to(p.dtype), alpha=-group["lr"])


class MasterLoop(Loop):
    """Plain training of a bf16 model with masters in float32, by hand: the least that masters cost anyone.

    Autocast would keep activations in float32, which none of the others does.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        self._params: list[Tensor] = list(model.parameters())
        self._masters: list[Tensor] = [nn.Parameter(p.detach().float()) for p in self._params]
        super().__init__(model, torch.optim.AdamW(self._masters, lr=1e-5, fused=True), False, device)

    def step(self) -> None:
        grads = [torch.empty_like(p) for p in self._masters]
        _torch.foreach_copy_(grads, [p.grad for p in self._params if p.grad is not None])
        for master, p, grad in zip(self._masters, self._params, grads, strict=True):
            master.grad, p.grad = grad, None
        super().step()
        with torch.no_grad():
            _torch.foreach_copy_(self._params, self._masters)


def shape_trainer(seat: Seat, contender: str, case: Case) -> Trainer:
    """A trainer of `case` under plain, fsdp2 or accordion."""

    def build() -> Loop:
        torch.manual_seed(0)
        by_hand = case.masters and contender == "plain"
        dtype = torch.float32 if case.masters and not by_hand else BF16
        with torch.device("meta" if case.meta else seat.device):
            model = Llama(case.preset, recompute=case.recompute).to(dtype)
        wrapped = _wrapped(contender, model, seat, case)
        if case.compiled:
            for block in model.blocks:
                block.compile(backend=case.compiled)
        if by_hand:
            return MasterLoop(wrapped, seat.device.type)
        params = list(wrapped.parameters())
        optimizer = WideAdam(params) if case.wide else torch.optim.AdamW(params, lr=1e-5, fused=True)
        if contender == OURS:
            optimizer = acc.wrap_optimizer(optimizer, elementwise=True)
        return Loop(wrapped, optimizer, False, seat.device.type)

    return Trainer(seat, build, (case.batch, case.seq), case.preset.vocab, bf16=True)


def _wrapped(contender: str, model: nn.Module, seat: Seat, case: Case) -> nn.Module:
    if contender == OURS:
        precision = acc.Precision(params=BF16, master=torch.float32 if case.masters else BF16)
        model = acc.shard(model, mesh_of(seat), precision=precision)
        if seat.group == "fake":  # says that all of its ranks are here
            axis = sharded_engine(model, "bench").context.shard
            axis.one_node = seat.num_ranks <= NODE
            # As a group of the device's own library: its copies run on the current stream. It is that of the reduces too.
            axis.gather._async = axis.gather._waits = seat.device.type == "cpu"
    else:
        sums_in_float32 = case.masters or seat.num_ranks > 1  # as ours; one rank sums nothing
        model = WRAPPERS[contender](model, seat, sums_in_float32)
        if case.meta:
            model.to_empty(device=seat.device)
    if case.meta:
        with torch.no_grad():
            for p in model.parameters():
                (p.to_local() if isinstance(p, DTensor) else p).normal_(std=0.02)
    return model


def params_of(p: LlamaShape) -> int:
    """Parameters of a Llama of that shape."""
    head = p.hidden // p.heads
    attention = 2 * p.hidden**2 + 2 * p.hidden * p.kv_heads * head
    return p.layers * (attention + 3 * p.hidden * p.mlp + 2 * p.hidden) + 2 * p.vocab * p.hidden + p.hidden


def step_flops(case: Case) -> float:
    """Of one step of one rank, as MFU counts: 6 a parameter and token (head included, embedding not), causal attention halved."""
    p, tokens = case.preset, case.batch * case.seq
    return 6 * tokens * (params_of(p) - p.vocab * p.hidden) + 6 * p.layers * tokens * case.seq * p.hidden
