"""Linear layers whose frozen weights have four bits, in the layout of bitsandbytes, whose kernels compute with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion.errors import UsageError, nearest, some_of
from accordion.weights.adapters import added_by_adapters

BLOCK = 64  # weights that share a scale
SCALES = 256  # scales that share a scale of their own, with double quantisation
FourBits = Literal["nf4", "fp4", "nf4-double", "fp4-double"]
"""Data type of bitsandbytes for weights; "-double": the scales of blocks are quantised too, to 8 bits."""


class FourBitLinear(nn.Linear):
    """A linear layer with a frozen weight of four bits. `quantize` puts it in place of `plain`, whose bias parameter it keeps.

    All parameters but the bias are uint8, so that a unit gathers them in one message and no precision casts a scale. Each row
    of `weight` and `absmax` is one block of 64 weights, so that a block and its scale are on one rank:

        weight  (blocks, 32)      two weights in a byte
        absmax  (blocks, 4)       the float32 scale of a block; with double quantisation (blocks, 1), its 8 bits
        nested  (groups + 1, 4)   with double quantisation: a float32 for every 256 scales, and last the mean of all scales
    """

    absmax: Tensor
    nested: Tensor | None

    # `nn.Linear.__init__` would allocate the weight of the plain layer.
    def __init__(self, plain: nn.Linear, kind: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.quant_type, _, double = kind.partition("-")
        self.is_double, self.dtype = bool(double), plain.weight.dtype
        blocks = plain.weight.numel() // BLOCK
        shapes = {"weight": (blocks, BLOCK // 2), "absmax": (blocks, 1 if double else 4)}
        if double:
            shapes["nested"] = (-(-blocks // SCALES) + 1, 4)
        self.register_parameter("nested", None)
        for name, shape in shapes.items():
            rows = torch.empty(shape, dtype=torch.uint8, device=plain.weight.device)
            self.register_parameter(name, nn.Parameter(rows, requires_grad=False))
        self.register_parameter("bias", plain.bias)
        if not plain.weight.is_meta:
            packed, absmax = self.packed(plain.weight.detach().reshape(-1, BLOCK))
            with torch.no_grad():
                for name, rows in {"weight": packed, **self.scales(absmax)}.items():
                    self.get_parameter(name).copy_(rows)

    def forward(self, input: Tensor) -> Tensor:
        from bitsandbytes import matmul_4bit

        bias = None if self.bias is None else self.bias.to(input.dtype)
        out: Tensor = matmul_4bit(input, self.weight, self.quant_state(self.absmax, self.nested), bias=bias)
        return out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.quant_type}{'-double' * self.is_double}"

    # -- the layout. Each function takes full tensors, or the rows of some blocks

    def packed(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise float `blocks`, (n, 64). Return (their rows of `weight`, (n, 32) uint8; their float32 scales, (n, 1))."""
        from bitsandbytes.functional import quantize_4bit

        rows, state = quantize_4bit(blocks, blocksize=BLOCK, quant_type=self.quant_type)
        return rows.view(-1, BLOCK // 2), state.absmax.view(-1, 1)

    def scales(self, absmax: Tensor) -> dict[str, Tensor]:
        """Return the parameters (name -> uint8 value) that store the float32 scales `absmax`, (blocks, 1), of all blocks."""
        from bitsandbytes.functional import quantize_blockwise

        if not self.is_double:
            return {"absmax": absmax.view(torch.uint8)}
        mean = absmax.mean()
        rows, state = quantize_blockwise(absmax - mean, blocksize=SCALES)
        return {"absmax": rows, "nested": torch.cat([state.absmax, mean[None]])[:, None].view(torch.uint8)}

    def quant_state(self, absmax: Tensor, nested: Tensor | None) -> Any:
        """Return bitsandbytes' `QuantState` for the weight, from full parameters `absmax` and `nested` (None if not double)."""
        from bitsandbytes.functional import QuantState

        shape = torch.Size((self.out_features, self.in_features))
        about = {"shape": shape, "dtype": self.dtype, "blocksize": BLOCK, "quant_type": self.quant_type}
        about["code"] = code_of(self.quant_type, absmax.device)
        if nested is None:
            return QuantState(absmax.view(torch.float32).view(-1), **about)
        values = nested.view(torch.float32).view(-1)
        code = code_of("dynamic", absmax.device)
        state2 = QuantState(values[:-1], code=code, blocksize=SCALES, dtype=torch.float32)
        return QuantState(absmax.view(-1), offset=values[-1], state2=state2, **about)

    def rounded(self, weight: Tensor) -> Tensor:
        """Return a full plain `weight`, (out, in), as the layer computes with it: quantised, then dequantised to its dtype."""
        from bitsandbytes.functional import dequantize_4bit

        packed, absmax = self.packed(weight.reshape(-1, BLOCK))
        scales = self.scales(absmax)
        out: Tensor = dequantize_4bit(packed.view(-1, 1), self.quant_state(scales["absmax"], scales.get("nested")))
        return out.to(weight.dtype)


@cache
def code_of(kind: str, device: torch.device) -> Tensor:
    """Return the cached values of the codes of a `kind`: (16,) for "nf4" and "fp4", (256,) for "dynamic" (bytes of scales)."""
    from bitsandbytes.functional import create_dynamic_map, get_4bit_type

    with torch.inference_mode(False):
        code: Tensor = create_dynamic_map().to(device) if kind == "dynamic" else get_4bit_type(kind, device=device)
    return code


def quantize(model: nn.Module, kind: FourBits = "nf4", *, skip: Iterable[str] = ()) -> nn.Module:
    """Replace `nn.Linear` layers of `model`, except a transformers head, by frozen four-bit ones, in place. Return `model`.

    Call it before adapters are added and before `shard`. A model on the meta device gets its values from `load_pretrained`,
    which quantises each rank's rows while it reads them; other weights are quantised now. Subclasses of `nn.Linear` are not
    replaced. Needs bitsandbytes.

    Args:
        kind: "nf4" or "fp4", as in bitsandbytes; "nf4-double" or "fp4-double" quantise the scales of blocks too.
        skip: shell patterns of the names of layers that keep their weights.

    Raises:
        UsageError: before anything is changed, if `kind` is unknown, bitsandbytes is not installed, `model` is sharded or has
            adapters, no layer is left, or the weight of a layer is tied or its number of elements is no multiple of 64.
    """
    if kind not in get_args(FourBits):
        raise UsageError(f"quantize(kind={kind!r}) is unknown; {nearest(str(kind), list(get_args(FourBits)))}")
    if find_spec("bitsandbytes") is None:
        raise UsageError("weights of four bits need bitsandbytes, not installed here; pip install bitsandbytes.")
    if added_by_adapters(model):
        raise UsageError("quantize() was given a model with adapters; quantize the model first, and then add adapters.")
    patterns = list(skip)
    layers = {name: m for name, m in linear_layers(model).items() if not any(fnmatch(name, p) for p in patterns)}
    if not layers:
        raise UsageError(f"{type(model).__name__} has no linear layers (nn.Linear) to quantize besides its head.")
    check_layers(model, layers)
    for name, plain in layers.items():
        model.set_submodule(name, FourBitLinear(plain, kind))
    return model


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return name -> layer of the `nn.Linear` layers inside `model`, without subclasses and the head of a transformers model."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {name: m for name, m in model.named_modules() if name and type(m) is nn.Linear and m is not head}


def num_weights(model: nn.Module) -> int:
    """Return the number of elements of all parameters; a four-bit layer counts those of the layer that it replaced."""
    layers = [m for m in model.modules() if isinstance(m, FourBitLinear)]
    bytes_of = sum(p.numel() for m in layers for p in (m.weight, m.absmax, m.nested) if p is not None)
    return sum(p.numel() for p in model.parameters()) - bytes_of + sum(m.in_features * m.out_features for m in layers)


def check_layers(model: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    """Raise `UsageError` if a weight of `layers` (name -> layer of `model`) is sharded or tied, or if its number of elements is
    no multiple of 64."""
    if any(isinstance(m.weight, DTensor) for m in layers.values()):
        raise UsageError("quantize() was given a sharded model; quantize it before shard().")
    uneven = [f"{n} {tuple(m.weight.shape)}" for n, m in layers.items() if m.weight.numel() % BLOCK]
    if uneven:
        raise UsageError(
            f"{len(uneven)} linear layers have weights that are no multiple of {BLOCK}, {some_of(uneven, 3)}; name them in skip."
        )
    ids = [id(param) for _, param in model.named_parameters(remove_duplicate=False)]
    tied = [name for name, m in layers.items() if ids.count(id(m.weight)) > 1]
    if tied:
        raise UsageError(f"the weights of {some_of(tied, 3)} are tied, and cannot be quantized; name them in skip.")


# -- files of bitsandbytes


def as_bitsandbytes(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of the full state dict `state` of `model`, in which four-bit layers have the format of bitsandbytes.

    These are the names and layouts that transformers saves: `weight`, (bytes, 1), `weight.absmax`, `weight.quant_map`,
    `weight.quant_state.bitsandbytes__nf4` (or `fp4`), and with double quantisation `weight.nested_absmax` and its `quant_map`.
    """
    state = dict(state)
    for name, layer in model.named_modules():
        if isinstance(layer, FourBitLinear) and f"{name}.absmax" in state:
            absmax, nested = state.pop(f"{name}.absmax"), state.pop(f"{name}.nested", None)
            state[f"{name}.weight"] = state[f"{name}.weight"].view(-1, 1)
            for key, value in layer.quant_state(absmax, nested).as_dict(packed=True).items():
                # A file of safetensors takes no tensors that share memory, as the codes of all layers do.
                state[f"{name}.weight.{key}"] = value if key == "absmax" else value.clone()
    return state


@contextmanager
def quantisation_in_config(model: Any) -> Iterator[None]:
    """Context manager that sets `model.config.quantization_config`, which tells transformers how four-bit layers are quantised,
    and removes it at the end. Does nothing for a model without such layers or with adapters."""
    layer = next((m for m in model.modules() if isinstance(m, FourBitLinear)), None)
    if layer is None or added_by_adapters(model):
        yield
        return
    model.config.quantization_config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": layer.quant_type,
        "bnb_4bit_use_double_quant": layer.is_double,
        "bnb_4bit_compute_dtype": str(layer.dtype).removeprefix("torch."),
        "llm_int8_skip_modules": [name for name, m in model.named_modules() if type(m) is nn.Linear],
    }
    try:
        yield
    finally:
        del model.config.quantization_config
