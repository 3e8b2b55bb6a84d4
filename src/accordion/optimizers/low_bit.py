"""Low-bit optimizer states of torchao and bitsandbytes for sharded parameters, and their form in state dicts.

A low-bit state has codes and one scale for each block of consecutive elements. Rows that hold whole blocks have codes and scales
of their own, so a state dict holds both as tensors that are sharded like the parameter; nothing is dequantised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from accordion import _torch
from accordion.config import HOST, Offload
from accordion.engine.layout import rows_per_block, splits_blocks
from accordion.errors import UsageError
from accordion.offload.step.deferred_step import owned_by, tiers_of
from accordion.row_marks import params_of, sharded_axes

OURS = "_accordion_sharded"  # attribute of a sharded parameter: its name
QMAP = "qmap"  # begins the names of tables from codes to values, which all blocks share
BITSANDBYTES_BLOCK = 256  # elements of a block in all its 8-bit optimizers


@dataclass(frozen=True, slots=True)
class FullShape:
    """Shape of a full parameter, whose rows an optimizer steps. `id`: `id()` of its DTensor, a key in bitsandbytes' options."""

    id: int
    shape: torch.Size
    is_sharded: bool


class LowBitStates(Optimizer):
    """Base of the mixins for low-bit optimizers: the size of the full parameter decides if its states are quantised. The
    libraries alone would go by the number of local elements, so states would depend on the number of ranks. State dicts can be
    loaded on another number of ranks. In the list of base classes a mixin comes after `LocalStep`."""

    REMEDY: str  # for blocks that no rank can hold whole, as the end of a sentence
    _whole: dict[Tensor, FullShape]  # in a step its keys are local tensors, as in all attributes of the optimizer

    @staticmethod
    def block_of(optimizer: Any, group: int, index: int) -> int:
        """Return the number of elements per block in the states of parameter `index` of the param group with index `group`; 1 if
        the states will not be quantised. `optimizer` need not have this mixin yet."""
        raise NotImplementedError

    @staticmethod
    def unsupported(optimizer: Any, offload: Offload) -> str | None:
        """Return the reason why `optimizer` cannot step parameters with `offload`, for the end of an error; None if it can."""
        raise NotImplementedError

    def _split(self, p: DTensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of `entry`, the states of `p`, with codes, scales and tables as DTensors, for a state dict."""
        raise NotImplementedError

    def _join(self, p: DTensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of `p` from `entry`, a result of `_split`, perhaps saved on another number of ranks."""
        raise NotImplementedError

    def keep_whole_shapes(self) -> None:
        """Record in `_whole` the shape of each sharded parameter, since a step sees local tensors in place of the parameters.
        Call this outside of a step, once the mixin is added, and after a change of the parameters."""
        self._whole = {
            p: FullShape(id(p), p.shape, bool(_splits(p))) for p in params_of(self) if isinstance(p, DTensor)
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            check_blocks(self, type(self))
        except UsageError:
            self.param_groups.pop()
            raise
        self.keep_whole_shapes()

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        return {**saved, "state": _changed(saved["state"], dict(enumerate(params_of(self))), self._split)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = dict(zip(indices, params_of(self), strict=False))  # the library's own method compares their number
        super().load_state_dict({**state_dict, "state": _changed(state_dict["state"], params, self._join)})


class TorchaoStates(LowBitStates):
    """Mixin for optimizers of torchao (written for 0.18), whose low-bit states are tensor subclasses."""

    REMEDY = "take a smaller block_size"
    block_size: int
    bf16_stochastic_round: bool
    _subclass_zeros: Callable[[Tensor, bool, int], Any]

    @staticmethod
    def block_of(optimizer: Any, group: int, index: int) -> int:
        p = optimizer.param_groups[group]["params"][index]
        return optimizer.block_size if _is_quantised(optimizer._new_buffer, p.shape) else 1

    @staticmethod
    def unsupported(optimizer: Any, offload: Offload) -> str | None:
        if offload.streams:
            return "blocks are not stepped chunk by chunk; keep the states on the host, and leave out step and disk"
        if optimizer.bf16_stochastic_round and offload.stepped_on == HOST:
            return "random rounding on a thread would change the random numbers of the forward; leave out one of them"
        return None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self.bf16_stochastic_round:
            return super().step(closure)
        # Ranks that hold the same rows must round alike. Tensors that all ranks have whole come first, as the others take
        # as many random numbers as this rank has rows.
        orders = [(group["params"], list(group["params"])) for group in self.param_groups]
        num_steps = max((int(s["step"]) for s in self.state.values() if "step" in s), default=0)
        device = orders[0][1][0].device
        is_cpu, module = device.type == "cpu", torch.get_device_module(device)
        try:
            for params, _ in orders:
                params.sort(key=lambda p: p in self._whole and self._whole[p].is_sharded)
            with torch.random.fork_rng([] if is_cpu else [module.current_device()], device_type=device.type):
                (torch.default_generator if is_cpu else module).manual_seed(num_steps)
                return super().step(closure)
        finally:
            for params, order in orders:
                params[:] = order

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        """Return a state of zeros for the local tensor `p`: low-bit if torchao would quantise that of the full parameter, and `p`
        has `block_size` elements or more. Overrides torchao's private method, which decides by the size of `p`."""
        whole = self._whole.get(p)
        if whole is None:
            return super()._new_buffer(p, signed)  # type: ignore[misc, no-any-return]
        # Without rows there is no block; the few elements by which `OptimizerCopy` observes a step make none either.
        if p.numel() < self.block_size or not _is_quantised(super()._new_buffer, whole.shape):  # type: ignore[misc]
            return torch.zeros_like(p)
        return self._subclass_zeros(p, signed, self.block_size)  # type: ignore[no-any-return]

    def _split(self, p: DTensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        if not _is_quantised(super()._new_buffer, p.shape):  # type: ignore[misc]
            return dict(entry)
        return {key: self._parts(p, v, key) if isinstance(v, DTensor) else v for key, v in entry.items()}

    def _parts(self, p: DTensor, state: DTensor, key: str) -> Any:
        """Return a low-bit `state` named `key` as {name: DTensor of codes, scales or table, "signed": bool}, others as is."""
        local: Any = _torch.local_of(state)
        if local.numel() and not hasattr(local, "__tensor_flatten__"):
            return state
        signed, one = key == "exp_avg", local
        if not local.numel():  # a rank without rows has the same kinds of tensors, without elements: those of one block
            one = self._subclass_zeros(local.new_empty(self.block_size), signed, self.block_size)
        parts: dict[str, Any] = {"signed": signed}
        for name in one.__tensor_flatten__()[0]:
            inner, block = getattr(one, name), one.numel() // getattr(one, name).numel()
            parts[name] = _replicated(inner, p) if name == QMAP else _packed(inner[: local.numel()], p, block)
        return parts

    def _join(self, p: DTensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self._joined(p, v) if isinstance(v, dict) and "scale" in v else v for key, v in entry.items()}

    def _joined(self, p: DTensor, parts: Mapping[str, Any]) -> DTensor:
        """Return the low-bit state of `p` from `parts`, a result of `_parts`. It shares the memory of parts that are on the
        device of `p`. Raises `UsageError` if `parts` have another block size than this optimizer."""
        block, local = p.numel() // parts["scale"].numel(), _torch.local_of(p)
        if block != self.block_size:
            raise UsageError(
                f"the saved states of this {type(self).__name__} have blocks of {block} elements, and it has block_size="
                f"{self.block_size}; make it with block_size={block}."
            )
        if not local.numel():
            return _torch.as_dtensor(torch.zeros_like(local), p)
        state = self._subclass_zeros(local, parts["signed"], block)
        for name in state.__tensor_flatten__()[0]:
            zeros = getattr(state, name)
            setattr(state, name, _torch.local_of(parts[name]).to(zeros.device).view(zeros.shape))
        return _torch.as_dtensor(state, p)


class BitsandbytesStates(LowBitStates):
    """Mixin for 8-bit optimizers of bitsandbytes (written for 0.50), which keep codes and scales as separate states."""

    REMEDY = "let GlobalOptimManager keep its states in 32 bits"

    @staticmethod
    def block_of(optimizer: Any, group: int, index: int) -> int:
        options = optimizer.get_config(group, index, optimizer.param_groups[group])
        p = optimizer.param_groups[group]["params"][index]
        is_quantised = options["optim_bits"] == 8 and p.numel() >= options["min_8bit_size"]
        return BITSANDBYTES_BLOCK if is_quantised else 1

    @staticmethod
    def unsupported(optimizer: Any, offload: Offload) -> str | None:
        return "bitsandbytes steps on the device; leave out that Offload, and take a paged optimizer"

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Return the options of parameter `pindex` of param group `gindex`. Overrides bitsandbytes' method, so that the size of
        the full parameter decides if states are quantised."""
        options: dict[str, Any] = super().get_config(gindex, pindex, group)  # type: ignore[misc]
        whole = self._whole.get(self.param_groups[gindex]["params"][pindex])
        if whole is not None:
            options |= self.mng.pid2config.get(whole.id, {})  # type: ignore[attr-defined]
            options["min_8bit_size"] = 0 if whole.shape.numel() >= options["min_8bit_size"] else sys.maxsize
        return options

    def _split(self, p: DTensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        def split(key: str, value: Any) -> Any:
            if key.startswith(QMAP):
                return _replicated(value, p)
            is_vector = key.startswith("absmax") and value.dim() == 1  # AdEMAMix has two rows of them
            return _packed(_torch.local_or_same(value), p, BITSANDBYTES_BLOCK) if is_vector else value

        return _each(entry, split)

    def _join(self, p: DTensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        def join(key: str, value: Any) -> Any:
            if not key.startswith((QMAP, "absmax")) or not isinstance(value, DTensor):
                return value
            return _torch.local_of(value) if key.startswith(QMAP) else _torch.local_of(value).view(-1)

        return _each(entry, join)


MIXINS: Mapping[str, type[LowBitStates]] = {
    "torchao.optim.adam._AdamBase": TorchaoStates,
    "bitsandbytes.optim.optimizer.Optimizer8bit": BitsandbytesStates,
}
"""Full name of a class of optimizers -> the mixin that `wrap_optimizer` adds to it and its subclasses."""


def low_bit_kind(optimizer: Optimizer) -> type[LowBitStates] | None:
    """Return the mixin for an optimizer with low-bit states; None for others, and for LAMB and LARS, which need full tensors."""
    if getattr(getattr(optimizer, "args", None), "max_unorm", 0.0):
        return None
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(optimizer).__mro__]
    return next((MIXINS[name] for name in names if name in MIXINS), None)


def check_blocks(optimizer: Optimizer, mixin: type[LowBitStates]) -> None:
    """Raise `UsageError` if `optimizer`, with low-bit states, cannot step its sharded parameters: a parameter is sharded on
    another dim than the first, some rank's rows end inside a block, or `mixin.unsupported` returns a reason against
    the `Offload` of one of their units."""
    kind = type(optimizer).__name__
    places = [(i, j, p) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])]
    for i, j, p in places:
        if not isinstance(p, DTensor):
            continue
        splits, block = _splits(p), mixin.block_of(optimizer, i, j)
        what = f"{kind} cannot step parameter {vars(p).get(OURS)!r} of shape {tuple(p.shape)}, which is"
        if splits is None:
            raise UsageError(f"{what} cut along another dim than the first; give it a mesh of fewer ranks (meshes=).")
        if p.numel() % block or splits_blocks(p.shape, splits, block):
            raise UsageError(
                f"{what} cut over {prod(splits)} ranks, so that some hold parts of a block of {block} elements, which share a "
                f"scale in its states; pass state_block={block} to shard, which keeps parameters of up to 256 KiB whole, or "
                f"{mixin.REMEDY}."
            )
    for _, _, engine, unit in owned_by(optimizer):
        reason = mixin.unsupported(optimizer, tiers_of(engine).offloads[unit.index])
        if reason is not None:
            raise UsageError(f"{kind} has low-bit states, and unit {unit.name or 'root'!r} is offloaded: {reason}.")


def packed_shape(shape: Sequence[int], block: int) -> tuple[int, ...]:
    """Return the shape of a 2-D tensor with one element per `block` elements of a tensor of `shape`; `shape` if `block` is 1.
    Each of its rows belongs to `rows_per_block` rows, so that both tensors can be sharded on dim 0 over the same ranks: (2, 1)
    for the shape (8, 64) and blocks of 256 elements, each of which fills 4 rows."""
    if block == 1:
        return tuple(shape)
    rows = rows_per_block(shape, block)
    return shape[0] // rows, prod(shape[1:]) * rows // block


def _packed(local: Tensor, p: DTensor, block: int) -> DTensor:
    """Return `local`, which has one element per `block` elements of this rank's rows of `p`, as a DTensor sharded like `p`."""
    shape = packed_shape(p.shape, block)
    return _torch.rows_dtensor(local.view(-1, *shape[1:]), p, shape)


def _replicated(tensor: Tensor, p: DTensor) -> DTensor:
    """Return `tensor`, equal on all ranks, as a replicated DTensor on the mesh of `p`; a checkpoint saves one copy of it."""
    return DTensor.from_local(
        _torch.local_or_same(tensor), p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False
    )


def _is_quantised(new_buffer: Callable[[Tensor, bool], Tensor], shape: torch.Size) -> bool:
    """Return True if torchao's function `new_buffer` quantises the states of an unsharded parameter of `shape`."""
    return hasattr(new_buffer(torch.empty(shape, device="meta"), True), "__tensor_flatten__")


def _splits(p: DTensor) -> list[int] | None:
    """Return numbers of ranks that divide dim 0 of `p`: [2, 4] if halves are divided by 4, [] if none; None for another dim."""
    sharded: list[tuple[Any, int]] = [(p.placements[axis], p.device_mesh.size(axis)) for axis in sharded_axes(p)]
    if any(how.dim for how, _ in sharded):
        return None
    strided = [num for how, num in sharded if isinstance(how, _torch.StridedShard)]
    return [num for how, num in sharded if not isinstance(how, _torch.StridedShard)] + strided[::-1]


def _changed(
    states: Mapping[Any, Any], params: Mapping[Any, Tensor], change: Callable[[DTensor, Mapping[str, Any]], Any]
) -> dict[Any, Any]:
    """Return a copy of `states` with `change(p, entry)` for the entry of each DTensor p; other entries are shared. `params`:
    key in `states` -> p."""
    pairs = {key: (params.get(key), entry) for key, entry in states.items()}
    return {key: change(p, entry) if isinstance(p, DTensor) else entry for key, (p, entry) in pairs.items()}


def _each(entry: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a copy of `entry` with `change(key, value)` in place of each value, also in nested dicts (of bitsandbytes)."""
    return {key: _each(v, change) if isinstance(v, dict) else change(key, v) for key, v in entry.items()}
