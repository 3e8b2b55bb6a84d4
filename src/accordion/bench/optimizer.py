"""The optimizer on shards, beside the same optimizer on plain tensors of the same sizes."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.bench.contenders import Setting, optimizer_of, ours
from accordion.bench.model import batch_of, loss_of, shape_of
from accordion.optim import clip_grad_norm_, wrap_optimizer
from accordion.workers.ranks import Seat

KINDS = ("accordion", "local", "dtensor")
MAX_NORM = 1.0


class OptimizerLoop:
    """One rank with gradients on its shards. `kind`: through accordion, on local clones, or through DTensor's own dispatch."""

    def __init__(self, seat: Seat, kind: str, setting: Setting) -> None:
        torch.manual_seed(setting.seed)
        shape = shape_of(setting.model)
        self._kind, self._model = kind, ours(shape.make(), seat, setting.bf16)
        tokens, targets = batch_of(0, seat.rank, (setting.batch, setting.seq), shape.vocab)
        loss_of(self._model(tokens), targets).backward()
        self._params: list[nn.Parameter] = list(self._model.parameters())
        if kind == "local":
            self._params = [_clone(p) for p in self._params]
        self._norm = 0.0
        self._optimizer = optimizer_of(self._params, setting)
        if kind == "accordion":
            self._optimizer = wrap_optimizer(self._optimizer)

    def turn(self, warm: int, count: int) -> list[tuple[float, float]]:
        """Seconds of the wall and of the processor of each clip and step, after `warm` that are not counted."""
        found = []
        for _ in range(warm + count):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            norm = self._clip()
            self._optimizer.step()
            found.append((time.perf_counter() - start, time.process_time() - cpu))
            self._norm = self._norm or float(norm)
        return found[warm:]

    def norm(self) -> float:
        """The norm that the first clip found; later ones find what it left."""
        return self._norm

    def _clip(self) -> Tensor:
        if self._kind == "accordion":
            return clip_grad_norm_(self._model, MAX_NORM)
        if self._kind == "dtensor":
            norm = nn.utils.clip_grad_norm_(self._params, MAX_NORM, foreach=True)
            assert isinstance(norm, DTensor)
            full: Tensor = norm.full_tensor()
            return full
        grads = [p.grad for p in self._params if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(list(_torch.foreach_norm(grads))))
        power = norm.square()
        dist.all_reduce(power)
        norm = power.sqrt()
        _torch.foreach_mul_(grads, torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0))
        return norm  # type: ignore[no-any-return]


def _clone(p: nn.Parameter) -> nn.Parameter:
    local = nn.Parameter(_torch.local_of(p).detach().clone())
    assert p.grad is not None
    local.grad = _torch.local_of(p.grad).clone()
    return local
