"""Moves a sharded model and the states of its optimizer off the device between two steps, and back bit for bit."""

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
from accordion.config import HOST, folder_of
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
    """The tensors of a model and its optimizer that `park` moves; refuses the use of the model while they are off the device.

    Shards that are offloaded stay where they are, with their gradients and states.
    """

    # A tensor off the device takes the place of each one on it, so that state dicts and saves need to know nothing. The flat
    # buffers of shards stay the same storages, without memory, because gathers have views of them.

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, engine: Engine) -> None:
        self.optimizer, self._engine, self._modules = optimizer, engine, list(model.modules())
        groups = [group for unit in engine.units for group in unit.groups]
        on_device = [group for group in groups if not isinstance(group.shard_buffer, OffDeviceShards)]
        self._params = [param.sharded for group in on_device for param in group.params]
        self._grads = [(param, param.grad) for param in self._params if param.grad is not None]
        flat = [(g.shard_buffer, g.params) for g in on_device if isinstance(g.shard_buffer, FlatShards)]
        self._shards = [(shards, [p.sharded for p in params]) for shards, params in flat]
        self._locals = [[_torch.local_of(param) for param in params] for _, params in self._shards]
        self._hosts: list[list[Tensor]] = []  # copies of the flat buffers
        self._caches = [(cache.untyped_storage(), cache.nbytes) for group in groups for cache in group.caches]
        self._moved: dict[int, Tensor] = {}  # by id: tensors off the device, in the place of others

    def unit_is_called(self) -> None:
        if not self._engine.suspended:
            raise parked_error()

    def backward_begins(self) -> None:
        raise parked_error()

    def gradients_are_clipped(self, max_norm: float, norm_type: float) -> None:
        raise parked_error()

    def sizes(self) -> list[int]:
        """Return the bytes of each tensor on the device that is to be moved."""
        tensors = [flat for shards, _ in self._shards for flat in shards.flats]
        self._exchange(lambda tensor: tensors.append(tensor) or tensor, self._is_here)  # type: ignore[func-returns-value]
        return [tensor.nbytes for tensor in tensors]

    def sizes_away(self) -> list[int]:
        """Return the bytes of each tensor that `come_back` allocates on the device."""
        hosts = [host for hosts in self._hosts for host in hosts]
        return [*(t.nbytes for t in (*hosts, *self._moved.values())), *(num_bytes for _, num_bytes in self._caches)]

    def leave(self, take: Allocate) -> None:
        """Copy everything into memory that `take` allocates, and free it on the device."""
        for shards, params in self._shards:
            hosts = [take(flat.numel(), flat.dtype).copy_(flat, non_blocking=True) for flat in shards.flats]
            self._hosts.append(hosts)
            for param, local in zip(params, shards.locals_in(hosts), strict=True):
                _torch.set_local(param, local)

        def copied(tensor: Tensor) -> Tensor:
            if not _torch.is_plain(tensor):
                return tensor.to("cpu")
            host, span = take(tensor.numel(), tensor.dtype), zip(tensor.shape, tensor.stride(), strict=True)
            is_dense = 1 + sum((size - 1) * stride for size, stride in span) == tensor.numel()
            host = host.as_strided(tensor.shape, tensor.stride()) if is_dense else host.view(tensor.shape)
            return host.copy_(tensor, non_blocking=True)

        self._moved = {id(host): host for host in self._exchange(copied, self._is_here)}
        for param, _ in self._grads:
            param.grad = None
        for param in self._params:
            vars(param)[PARKED] = True
        self._settle()
        for (shards, _), old in zip(self._shards, self._locals, strict=True):
            for local in {id(t): t for t in (*shards.locals, *old)}.values():
                local.set_()  # type: ignore[call-overload]  # no tensor keeps the address of freed memory
        for storage in [
            *(s for s, _ in self._caches),
            *(f.untyped_storage() for s, _ in self._shards for f in s.flats),
        ]:
            storage.resize_(0)

    def come_back(self) -> None:
        """Allocate everything on the device again, and copy it there."""
        for storage, num_bytes in self._caches:
            storage.resize_(num_bytes)
        for (shards, params), hosts, old in zip(self._shards, self._hosts, self._locals, strict=True):
            for flat, host in zip(shards.flats, hosts, strict=True):
                flat.untyped_storage().resize_(host.nbytes)
                flat.copy_(host, non_blocking=True)
            views = shards.locals_in(shards.flats)
            for param, local, ours, view in zip(params, old, shards.locals, views, strict=True):
                for tensor in (local, ours):
                    tensor.set_(view.untyped_storage(), 0, view.shape, view.stride())
                _torch.set_local(param, local)
        back = partial(Tensor.to, device=self._engine.context.device, non_blocking=True, copy=True)
        self._exchange(back, lambda tensor: id(tensor) in self._moved)
        for param in self._params:
            del vars(param)[PARKED]
        for param, grad in self._grads:
            param.grad = grad
        for unit in self._engine.units:
            unit.mark_stale()
            unit.note_memory()
        self._settle()

    def _settle(self) -> None:
        """Let the host wait for the copies, so that either memory may be freed."""
        device = self._engine.context.device
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device == self._engine.context.device and tensor.numel() > 0

    def _exchange(self, move: Callable[[Tensor], Tensor], moves: Callable[[Tensor], bool]) -> list[Tensor]:
        """Replace each gradient, optimizer state and buffer for which `moves` returns True by `move` of it; return these."""
        done: dict[int, tuple[Tensor, Tensor]] = {}  # by id of either: (before, after)
        results: list[Tensor] = []

        def swap(tensor: Tensor) -> Tensor:  # not recursive, since a cycle would keep the memory of `done`
            local = _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor
            if id(local) not in done and moves(local):
                results.append(move(local))
                done[id(local)] = done[id(results[-1])] = local, results[-1]
            after = done[id(local)][1] if id(local) in done else local
            if isinstance(tensor, DTensor):  # stays the same object
                _torch.set_local(tensor, after)
            return tensor if isinstance(tensor, DTensor) else after

        for _, grad in self._grads:
            swap(grad)
        states = {} if self.optimizer is None else self.optimizer.state
        for param in self._params:
            exchange(states.get(param), swap)
        for module in self._modules:
            module._buffers.update({name: swap(b) for name, b in module._buffers.items() if b is not None})
        return results


def park(model: nn.Module, optimizer: Optimizer | None = None, to: str = HOST) -> Move:
    """Move shards, gradients, optimizer states and buffers of a sharded model off the device; return the bytes and seconds.

    Collective, between two steps. `to`: "host", in memory that is pinned for accelerators, or "disk:/folder". The device's memory
    is given back to the driver. Until `unpark` the model can be saved and streamed, and not called, stepped or loaded;
    tensors that share memory with its shards must not be used. Offloaded parameters stay where they are. Raises `UsageError`
    on every rank, before anything is moved, if gradients of `no_sync` are not reduced, or a rank lacks memory.
    """
    start_s, engine, folder = time.monotonic(), sharded_engine(model, "park"), folder_of(to)
    if folder is None and to != HOST:
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
    sizes, device = parked.sizes(), engine.context.device
    num_bytes = sum(map(page_aligned, sizes))

    def memory() -> Allocate:
        if folder is None:
            arena = Arena(num_bytes, device, "park", 'pass to="disk:/folder"')
            return partial(arena.take, zeros=False)
        file = FileAllocator(folder, num_bytes, checksums=False)
        return lambda numel, dtype: file.take(numel, dtype).mapped()

    take = on_every_rank(memory, engine.context)
    with torch.no_grad():
        parked.leave(take)
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    engine.observers.attach(parked, first=True)
    return _reported("parked", sum(sizes), start_s)


def unpark(model: nn.Module, optimizer: Optimizer | None = None) -> Move:
    """Move what `park` has moved back to the device, bit for bit; return the bytes and seconds. Collective.

    `optimizer`: that of `park`. Raises `UsageError` on every rank if one lacks device memory; the model then stays off it.
    """
    start_s, engine = time.monotonic(), sharded_engine(model, "unpark")
    parked = engine.observers.find(ParkedModel)
    if parked is None or parked.optimizer is not (None if optimizer is None else inner_of(optimizer)):
        raise UsageError("unpark takes a model that is parked, and the optimizer that was parked with it.")
    settle(engine, "unparks the model")
    sizes, device = parked.sizes_away(), engine.context.device

    def probe() -> None:
        try:
            memory = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
            del memory
        except RuntimeError as error:
            raise UsageError(
                f"unpark needs {sum(sizes)} bytes of {device}, which are not free; let the inference engine free its memory."
            ) from error

    on_every_rank(probe, engine.context)
    engine.observers.detach(parked)
    with torch.no_grad():
        parked.come_back()
    return _reported("unparked", sum(sizes), start_s)


def _reported(what: str, num_bytes: int, start_s: float) -> Move:
    move = Move(num_bytes, time.monotonic() - start_s)
    log.info("%s: %d bytes in %.2f s", what, *move)
    return move
