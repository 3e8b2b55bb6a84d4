"""Low-rank adapters for frozen weights (LoRA), which may be stored in four bits (QLoRA), as in peft and bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion.errors import UsageError, nearest
from accordion.weights.four_bits import FourBitLinear, check_layers, linear_layers

ALL = "all"


class AdaptedLinear(nn.Module):
    """The linear layer `inner` with a LoRA adapter: `inner(x) + up(down(x))`. The constructor creates the linear layers `down`,
    from `width` to `rank` features, and `up`, from `rank` to `out` features, without biases, on the meta device."""

    def __init__(self, inner: nn.Module, width: int, out: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(width, rank, bias=False, device="meta", dtype=dtype)
        self.up = nn.Linear(rank, out, bias=False, device="meta", dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.up(self.down(x))
        return out


class PlannedFourBitLinear(FourBitLinear):
    """Stand-in for a `FourBitLinear` that dequantises by torch's operators, which a trace sees. Its values are wrong."""

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _FourBit.apply(input, self.weight.view(self.out_features, -1))  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class _FourBit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, _widened(weight, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grads[0] @ _widened(weight, grads[0].dtype), None


def _widened(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in place of the dequantised weight, (out, width), in `dtype`. As in the real layer, one kernel reads
    `weight` and writes the result, but the values are wrong. `weight`: (out, width / 2), two elements in each byte."""
    both = weight.unsqueeze(-1).expand(*weight.shape, 2)
    return (both + torch.zeros((), dtype=dtype, device=weight.device)).flatten(1)


def with_adapters(model: nn.Module, label: str, rank: int, targets: str, quantize: str | None) -> nn.Module:
    """Freeze all parameters of `model`, add trainable LoRA adapters to its linear layers in place, and return `model`.

    Args:
        label: name of the model in errors.
        rank: features between the two layers of an adapter.
        targets: layers with adapters: last names separated by commas, such as "q_proj,v_proj"; "all": all but the head.
        quantize: data type of four bits, such as "nf4", for the weights of all linear layers but the head, with or without
            adapters; None: weights stay as they are.

    Raises `UsageError` if `model` has no linear layers besides its head, if a name in `targets` is none of them, or if a layer
    to quantise has a weight that is tied, sharded, or of an unsuitable size.
    """
    linear = linear_layers(model)
    known = sorted({name.rpartition(".")[2] for name in linear})
    wanted = known if targets == ALL else [name.strip() for name in targets.split(",")]
    for name in wanted:
        if name not in known:
            raise UsageError(
                f"lora_targets names {name!r}, which is no linear layer of {label}; {nearest(name, known)}"
            )
    if not linear:
        raise UsageError(f"{label} has no linear layers (nn.Linear) besides its head, so it cannot have adapters.")
    if quantize is not None:
        check_layers(model, linear)
    model.requires_grad_(False)
    for name, plain in linear.items():
        inner: nn.Module = plain if quantize is None else PlannedFourBitLinear(plain, quantize)
        if name.rpartition(".")[2] in wanted:
            inner = AdaptedLinear(inner, plain.in_features, plain.out_features, rank, plain.weight.dtype)
        model.set_submodule(name, inner)
    return model
