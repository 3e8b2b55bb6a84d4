"""Exponential moving averages of the weights of a sharded model, in shards."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from accordion import _torch
from accordion.checkpoint.collective import Team
from accordion.checkpoint.contents import local_data, model_tensors
from accordion.config import DEVICE, check_place, folder_of
from accordion.engine.engine import Engine
from accordion.engine.hooks import engine_of
from accordion.engine.shards import own_storage
from accordion.errors import OffloadError, UsageError
from accordion.offload.arena import Arena, page_aligned
from accordion.offload.swap_file import FileAllocator, FileRange, Values
from accordion.state import settle, sharded_engine

WARMUP = 10  # with `warmup`, the decay after n updates is at most (1 + n) / (WARMUP + n)


class EMA:
    """Exponential moving averages of the trained weights of a sharded model. Each rank keeps those of its own rows.

    Call `update` after each optimizer step. The first call copies the weights; later ones compute decay x average +
    (1 - decay) x weights, bit for bit as torch's `AveragedModel` with `get_ema_multi_avg_fn(decay)`. Evaluate and export the
    average inside `applied`. Pass the object to `save` and `load` in `state=`; any number of ranks may load it. Parameters that
    are frozen when the object is made, and buffers, are not averaged. Each method raises `UsageError` inside `applied` or
    `full_params`, and after the model was deleted or sharded anew.

    Args:
        decay: one number from 0 to 1, or several different ones for one average each.
        place: "device", "host" (pinned memory if there is an accelerator), or "disk:/path" for an unnamed file in that folder.
        warmup: lower the decay to (1 + n) / (10 + n) while that is less, n being the number of updates before.

    The constructor is collective. Raises `UsageError` on every rank if an argument is wrong, the model is not sharded, nothing in
    it is trained, a trained parameter is a tensor subclass, or memory for the averages is lacking.
    """

    def __init__(
        self, model: nn.Module, decay: float | Sequence[float] = 0.999, place: str = DEVICE, *, warmup: bool = False
    ) -> None:
        engine = sharded_engine(model, "EMA")
        check_place("EMA(place", place)
        decays = [float(each) for each in (decay if isinstance(decay, Sequence) else [decay])]
        if not decays or len(set(decays)) < len(decays) or not all(0 <= each <= 1 for each in decays):
            raise UsageError(f"EMA(decay={decay!r}) takes a number from 0 to 1, or several different ones.")
        if engine.suspended:
            raise UsageError(
                "EMA does not work inside full_params, because the parameters are not sharded there; leave it first."
            )
        settle(engine, f"makes an EMA with decay {decays}, warmup={warmup} of {place.partition(':')[0]!r}")
        self.updates = 0  # number of updates so far
        self._warmup, self._is_applied = warmup, False
        self._model, self._device = weakref.ref(model), engine.context.device
        tensors, _ = model_tensors(model)
        averaged = {
            name.removeprefix("model/"): param
            for name, param in tensors.items()
            if isinstance(param, nn.Parameter) and param.requires_grad
        }
        self._params = {name: weakref.ref(param) for name, param in averaged.items()}
        team = Team.of(tensors.values())
        with torch.inference_mode(False):
            # The arena in `_memory` keeps host memory pinned.
            self._memory, self._averages = team.agree(lambda: _allocated(averaged, decays, place, self._device))

    @property
    def num_bytes(self) -> int:
        """Bytes of all averages on this rank."""
        return sum(average.nbytes for averages in self._averages.values() for average in averages)

    def update(self) -> None:
        """Move the averages towards the weights; the first call copies the weights. Ranks do not communicate. The host waits for
        the device if averages are on disk, and for the optimizer step of offloaded parameters."""
        engine, params = self._current("update")
        engine.synchronize()
        shards = [local_data(param) for param in params]
        for decay, averages in self._averages.items():
            rate = min(decay, (1 + self.updates) / (WARMUP + self.updates)) if self._warmup else decay
            _average(get_ema_multi_avg_fn(rate) if self.updates else _copy, averages, shards, self._device)
        self.updates += 1

    @contextmanager
    def applied(self, decay: float | None = None) -> Iterator[None]:
        """Context manager in which the model has the average of `decay` as its weights, in place of its own.

        Evaluation, `full_state_dict`, `save_pretrained` and `save` work inside as outside. The shards and the averages exchange
        their elements, which needs memory for one shard, and get them back at the end, also after an exception, bit for bit.
        Finish any backward before. Before the first `update` the averages are the weights. `decay`: may be None if there is one
        average. Raises `UsageError` if no average has this decay. Collective.
        """
        engine, params = self._current("applied")
        if (decay is None and len(self._averages) > 1) or decay not in (None, *self._averages):
            raise UsageError(
                f"applied(decay={decay}) names no average; pass one of {', '.join(map(str, self._averages))}."
            )
        settle(engine, f"applies the average of decay {decay}")
        self._begin(params)
        averages = next(iter(self._averages.values())) if decay is None else self._averages[decay]
        with ExitStack() as stack:
            self._is_applied = True
            stack.callback(setattr, self, "_is_applied", False)
            for param, average in zip(params, averages, strict=True):
                _swap_elements(_torch.local_of(param), average)
                stack.callback(_swap_elements, _torch.local_of(param), average)
            stack.callback(engine.synchronize)  # called first: copies of offloaded shards may be under way
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return {"updates": number of updates, decay as text: {name of a parameter: its average as a DTensor}}. The DTensors
        share memory with the averages. If there was no update yet, the averages are first set to the weights."""
        engine, params = self._current("state_dict")
        self._begin(params)
        engine.context.gather_stream.settle()  # averages on the host may still be written
        shown = {
            str(decay): {
                name: _torch.as_dtensor(average, param)
                for name, param, average in zip(self._params, params, averages, strict=True)
            }
            for decay, averages in self._averages.items()
        }
        return {"updates": self.updates, **shown}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Copy the averages and the number of updates from `state`, a result of `state_dict` with this rank's rows."""
        self._current("load_state_dict")
        with torch.no_grad():
            for decay, averages in self._averages.items():
                for name, average in zip(self._params, averages, strict=True):
                    average.copy_(local_data(state[str(decay)][name]))
        self.updates = state["updates"]

    def _current(self, what: str) -> tuple[Engine, list[nn.Parameter]]:
        """Return the engine of the model and the averaged parameters. Raises `UsageError` if the model was deleted or sharded
        anew, and inside `applied` or `full_params`. `what`: the calling method, for the message."""
        model = self._model()
        engine = None if model is None else engine_of(model)
        present = set() if engine is None else {id(param.sharded) for param in engine.params}
        params = [param for ref in self._params.values() if (param := ref()) is not None and id(param) in present]
        if engine is None or len(params) < len(self._params):
            raise UsageError(
                f"{what} of an EMA whose model was deleted or sharded anew, so that its averages are of other shards; make an "
                "EMA of the model that is trained now, and load the averages from a checkpoint."
            )
        if self._is_applied or engine.suspended:
            where = "applied" if self._is_applied else "full_params"
            raise UsageError(
                f"{what} of an EMA does not work inside {where}, where the model has no weights of its own."
            )
        return engine, params

    def _begin(self, params: Sequence[nn.Parameter]) -> None:
        """Copy the weights into the averages if there was no update yet."""
        if not self.updates:
            for averages in self._averages.values():
                _average(_copy, averages, [local_data(param) for param in params], self._device)


def _allocated(
    params: Mapping[str, nn.Parameter], decays: Sequence[float], place: str, device: torch.device
) -> tuple[object, dict[float, list[Tensor]]]:
    """Allocate the averages in `place`, and return (object that keeps their memory alive, decay -> list of averages). The list
    has for each of `params` an uninitialised tensor with shape, strides and dtype of this rank's shard. Raises `UsageError` if
    `params` is empty, a shard is a tensor subclass, or there is too little memory."""
    if not params:
        raise UsageError("EMA averages the parameters that require a gradient, and this model has none.")
    for name, param in params.items():
        if not _torch.is_plain(local_data(param)):
            raise UsageError(
                f"EMA averages plain tensors, and {name} is a {type(local_data(param)).__name__}; freeze it."
            )
    shards = [local_data(param) for param in params.values()]
    num_bytes, folder = len(decays) * sum(page_aligned(shard.nbytes) for shard in shards), folder_of(place)
    take: Callable[..., Values] = partial(torch.empty, device=device)
    try:
        if folder is not None:
            take = FileAllocator(folder, num_bytes).take
        elif place != DEVICE:
            take = Arena(num_bytes, device, "EMA", "use more ranks, or place='disk:/path'").take
    except OffloadError as error:
        raise UsageError(str(error)) from error

    def like(shard: Tensor) -> Tensor:
        flat = take(shard.numel(), dtype=shard.dtype)
        flat = flat.mapped() if isinstance(flat, FileRange) else own_storage(flat)
        return flat.as_strided(shard.shape, shard.stride())

    return take, {decay: [like(shard) for shard in shards] for decay in decays}


def _copy(averages: list[Tensor], shards: list[Tensor], num_averaged: int) -> None:
    _torch.foreach_copy_(averages, shards)


def _average(
    update: Callable[[Any, Any, Any], None], averages: Sequence[Tensor], shards: Sequence[Tensor], device: torch.device
) -> None:
    """Update each of `averages` in place from its entry of `shards`, by `update(list of averages, list of shards, 0)`, which
    ignores the 0. One call takes all pairs of one dtype that are on one device. A pair on two devices is copied to `device`,
    updated there by a call of its own, and its average is copied back."""
    together: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    with torch.no_grad():
        for average, shard in zip(averages, shards, strict=True):
            if average.device == shard.device:
                for tensors, tensor in zip(together[shard.device, shard.dtype], (average, shard), strict=True):
                    tensors.append(tensor)
                continue
            # All copies run on the compute stream, in order, so that pinned memory needs no wait of the host.
            staged = average.to(device, non_blocking=True)
            update([staged], [shard.to(device, non_blocking=True)], 0)
            if staged is not average:
                average.copy_(staged, non_blocking=True)
        for lists in together.values():
            update(*lists, 0)


def _swap_elements(shard: Tensor, average: Tensor) -> None:
    with torch.no_grad():
        elements = shard.clone()
        shard.copy_(average)
        average.copy_(elements)
