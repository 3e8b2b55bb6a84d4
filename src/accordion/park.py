"""Move a sharded model and the states of its optimizer off the device between two steps, and back bit for bit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accordion import _torch
from accordion.config import DISK, HOST, folder_of
from accordion.engine.engine import Engine
from accordion.engine.observer import Observer
from accordion.engine.shards import Allocate, FlatShards
from accordion.errors import UsageError
from accordion.offload.arena import Arena, page_aligned
from accordion.offload.host_shards import OffDeviceShards
from accordion.offload.step.optimizer_copy import exchange
from accordion.offload.swap_file import FileAllocator
from accordion.optimizers.wrap import PARKED, inner_of, parked_error
from accordion.safety.same_on_ranks import on_every_rank
from accordion.state import settle, sharded_engine

log = logging.getLogger("accordion")


class Move(NamedTuple):
    """The bytes that `park` or `unpark` has moved on this rank, and the time that it took."""

    num_bytes: int
    seconds: float


class ParkedModel(Observer):
    """The tensors of a model and its optimizer, without those of offloaded parameters, that `leave` moves off the device and
    `come_back` moves back. The caller attaches this `Observer` in between; it raises `UsageError` in forwards, backwards and
    gradient clipping. `tensors`: those on the device; empty after `leave`. `sizes`: bytes of each allocation `leave` frees."""

    # A tensor off the device takes the place of each one on it, so that state dicts and saves need to know nothing. The flat
    # buffers of shards stay the same storages, without memory, because gathers have views of them.

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, engine: Engine) -> None:
        self.optimizer, self._engine, self._modules = optimizer, engine, list(model.modules())
        groups = [group for unit in engine.units for group in unit.groups]
        on_device = [group for group in groups if not isinstance(group.shard_buffer, OffDeviceShards)]
        self._params = [param.sharded for group in on_device for param in group.params]
        self._grads = [(param, param.grad) for param in self._params if param.grad is not None]
        self._shards = [(g.shard_buffer, g.sharded) for g in on_device if isinstance(g.shard_buffer, FlatShards)]
        self._flats = [flat for shards, _ in self._shards for flat in shards.flats]
        caches = [cache for group in groups for cache in group.caches]
        self._storages = [(t.untyped_storage(), t.nbytes) for t in (*self._flats, *caches)]  # resized, and not replaced
        self._hosts: list[Tensor] = []  # copies of `tensors` off the device, those of the flat buffers first
        tensors = dict[int, Tensor]()
        self._replace(lambda tensor: tensors.setdefault(id(tensor), tensor))
        device = engine.context.device
        self.tensors = [*self._flats, *(t for t in tensors.values() if t.device == device and t.numel())]
        self.sizes = [tensor.nbytes for tensor in (*self.tensors, *caches)]

    def unit_is_called(self) -> None:
        if not self._engine.suspended:
            raise parked_error()

    def backward_begins(self) -> None:
        raise parked_error()

    def gradients_are_clipped(self, max_norm: float, norm_type: float) -> None:
        raise parked_error()

    def leave(self, take: Allocate) -> None:
        """Copy all tensors into memory that `take(numel, dtype)` returns, subclasses into other host memory; free them on the
        device. The model and the optimizer then refer to the copies, and `.grad` of each moved parameter is None."""
        for tensor in self.tensors:
            if not _torch.is_plain(tensor):
                self._hosts.append(tensor.to("cpu"))
                continue
            strides = torch.empty_like(tensor, device="meta").stride()
            memory = take(tensor.numel(), tensor.dtype).as_strided(tensor.shape, strides)
            self._hosts.append(memory.copy_(tensor, non_blocking=True))
        hosts = {id(tensor): host for tensor, host in zip(self.tensors, self._hosts, strict=True)}
        self._replace(lambda tensor: hosts.get(id(tensor), tensor))
        for shards, params in self._shards:
            locals_off_device = shards.locals_in([hosts[id(flat)] for flat in shards.flats])
            for param, local in zip(params, locals_off_device, strict=True):
                _torch.set_local(param, local)
        for param, _ in self._grads:
            param.grad = None
        for param in self._params:
            vars(param)[PARKED] = True
        self._engine.context.gather_stream.settle()
        for local in [local for shards, _ in self._shards for local in shards.locals]:
            local.set_()  # type: ignore[call-overload]  # no tensor keeps the address of freed memory
        for storage, _ in self._storages:
            storage.resize_(0)
        self.tensors.clear()

    def come_back(self) -> None:
        """Allocate all tensors on the device again, copy their elements back, and set `.grad` of the parameters again."""
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)
        for flat, host in zip(self._flats, self._hosts, strict=False):
            flat.copy_(host, non_blocking=True)
        for shards, params in self._shards:
            for param, local, view in zip(params, shards.locals, shards.locals_in(shards.flats), strict=True):
                local.set_(view.untyped_storage(), 0, view.shape, view.stride())
                _torch.set_local(param, view)
        to_device = partial(Tensor.to, device=self._engine.context.device, non_blocking=True, copy=True)
        back = {id(host): to_device(host) for host in self._hosts[len(self._flats) :]}
        self._replace(lambda tensor: back.get(id(tensor), tensor))
        for param in self._params:
            del vars(param)[PARKED]
        for param, grad in self._grads:
            param.grad = grad
        for unit in self._engine.units:
            unit.mark_stale()
            unit.note_memory()
        self._engine.context.gather_stream.settle()

    def _replace(self, by: Callable[[Tensor], Tensor]) -> None:
        """Replace each gradient, optimizer state and buffer by what `by` returns for it; of a DTensor, its local tensor."""

        def swap(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return by(tensor)
            _torch.set_local(tensor, by(_torch.local_of(tensor)))  # the DTensor stays the same object
            return tensor

        for _, grad in self._grads:
            swap(grad)
        states = {} if self.optimizer is None else self.optimizer.state
        for param in self._params:
            exchange(states.get(param), swap)
        for module in self._modules:
            module._buffers.update({name: swap(b) for name, b in module._buffers.items() if b is not None})


def park(model: nn.Module, optimizer: Optimizer | None = None, to: str = HOST) -> Move:
    """Move shards, gradients, optimizer states and buffers of a sharded model off the device; return the bytes and seconds.

    Collective, between two steps. `optimizer`: None leaves its states on the device. `to`: "host", in memory that is pinned for
    accelerators, or "disk:/folder". The device's memory is given back to the driver. Until `unpark` the model can be saved and
    streamed, but not called, stepped or loaded; tensors that share memory with its shards must not be used. Offloaded
    parameters stay, with gradients and states. Raises `UsageError` on every rank, before anything is moved, if the model is
    parked already, inside `full_params`, if sums of `no_sync` are not reduced yet, or if a rank lacks memory or disk space.
    """
    start_s, engine, folder = time.monotonic(), sharded_engine(model, "park"), folder_of(to)
    if to != HOST and (folder is None or to == DISK):
        raise UsageError(f'park takes to="host" or to="disk:/folder", not {to!r}.')
    if engine.observers.find(ParkedModel) is not None:
        raise parked_error()
    if engine.suspended or any(unit.local_sums.any_held() for unit in engine.units):
        raise UsageError(
            "park works outside of full_params, and after gradients of no_sync were reduced; end these first."
        )
    settle(engine, f"parks the model on {'the disk' if folder else 'the host'}")
    engine.drop_kept()
    for unit in engine.units:
        unit.free()
    parked = ParkedModel(model, None if optimizer is None else inner_of(optimizer), engine)
    device = engine.context.device
    num_bytes = sum(page_aligned(tensor.nbytes) for tensor in parked.tensors)

    def memory() -> Allocate:
        if folder is None:
            return partial(Arena(num_bytes, device, "park", 'pass to="disk:/folder"').take, zeros=False)
        file = FileAllocator(folder, num_bytes)
        return lambda numel, dtype: file.take(numel, dtype).mapped()

    take = on_every_rank(memory, engine.context)
    with torch.no_grad():
        parked.leave(take)
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    engine.observers.attach(parked, first=True)
    return _reported("parked", parked, start_s)


def unpark(model: nn.Module, optimizer: Optimizer | None = None) -> Move:
    """Move what `park` has moved back to the device, bit for bit; return the bytes and seconds. `optimizer`: the one that was
    passed to `park`. Collective. Raises `UsageError` on every rank if the model is not parked, another optimizer is passed, or
    a rank lacks device memory; the model then stays as it was."""
    start_s, engine = time.monotonic(), sharded_engine(model, "unpark")
    parked = engine.observers.find(ParkedModel)
    if parked is None or parked.optimizer is not (None if optimizer is None else inner_of(optimizer)):
        raise UsageError("unpark takes a model that is parked, and the optimizer that was parked with it.")
    settle(engine, "unparks the model")
    device = engine.context.device

    def probe() -> None:
        try:
            memory = [torch.empty(size, dtype=torch.uint8, device=device) for size in parked.sizes]
            del memory
        except RuntimeError as error:
            raise UsageError(
                f"unpark needs {sum(parked.sizes)} bytes of {device}, which are not free; let the inference engine free its "
                "memory."
            ) from error

    on_every_rank(probe, engine.context)
    engine.observers.detach(parked)
    with torch.no_grad():
        parked.come_back()
    return _reported("unparked", parked, start_s)


def _reported(what: str, parked: ParkedModel, start_s: float) -> Move:
    move = Move(sum(parked.sizes), time.monotonic() - start_s)
    log.info("%s: %d bytes in %.2f s", what, *move)
    return move
