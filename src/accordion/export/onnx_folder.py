"""Writes ONNX files: the graph, traced without weights, and a file of weights, with one weight in memory at a time."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accordion import _torch
from accordion.errors import UsageError
from accordion.export.tensors import NamedTensors
from accordion.models.language import brief

SAMPLE = (2, 5)  # sequences and tokens of the traced input; both dims are dynamic in the graph
INSIDE = "model."  # prefix of tensor names in `LogitsAlone`


class LogitsAlone(nn.Module):
    """Wraps a language model so that it returns its logits as a tensor, and makes no cache of keys and values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits, (b, tokens, vocab), of `input_ids` and `attention_mask`, both (b, tokens), int64."""
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits


def write_onnx(path: Path, tensors: NamedTensors, model: nn.Module) -> list[str]:
    """Write the graph of `model` to `path`, and its weights `tensors` to a file next to it, named PATH.data. Return both file
    names, in this order. The graph takes `input_ids` and `attention_mask`, and returns `logits`. `model`: on meta, in the dtype
    of `tensors`; fake tensors replace its weights. Raises `UsageError` if torch cannot trace it, if a tensor of the graph is
    missing, or a buffer cannot be computed."""
    import onnx_ir

    buffers = computed_buffers(model)
    graph = _traced(model, buffers)
    by_name = {source.name: source for source in tensors.sources}
    for name, value in list(graph.graph.initializers.items()):
        plain = name.removeprefix(INSIDE)
        source = by_name.get(tensors.ties.get(plain, plain))
        if source is not None:
            value.const_value = onnx_ir.LazyTensor(
                lambda source=source, name=name: onnx_ir.tensor(
                    source.read().to(source.dtype).contiguous().numpy(), name=name
                ),
                dtype=value.dtype,
                shape=value.shape,
                name=name,
            )
        elif plain in buffers:
            value.const_value = onnx_ir.tensor(buffers[plain].numpy(), name=name)
        elif isinstance(getattr(value.const_value, "raw", None), torch.Tensor):
            raise UsageError(f"--format onnx: nothing in SOURCE is the tensor {plain} of the graph; take hf.")
    data = f"{path.name}.data"
    onnx_ir.save(graph, path, external_data=data, max_workers=1, max_in_flight_bytes=1)
    return [path.name, data]


def _traced(model: nn.Module, buffers: dict[str, Tensor]) -> Any:
    """Trace `model` and return its graph, an onnx_ir model. Replaces all parameters of `model`, and the buffers named in
    `buffers`, by fake tensors. Raises `UsageError` if torch cannot trace the model."""
    with _torch.fake_tensors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet = logging.getLogger("torch.onnx")
        level = quiet.level
        quiet.setLevel(logging.ERROR)
        for name, param in list(model.named_parameters()):
            _put(model, name, nn.Parameter(_fake(param), requires_grad=False))
        for name, buffer in buffers.items():
            _put(model, name, _fake(buffer))
        model.tie_weights()  # type: ignore[operator]
        tokens = torch.ones(SAMPLE, dtype=torch.int64, device="cpu")
        free = {0: "batch", 1: "tokens"}
        try:
            program = torch.onnx.export(
                LogitsAlone(model),
                (tokens, torch.ones_like(tokens)),
                input_names=["input_ids", "attention_mask"],
                output_names=["logits"],
                dynamic_shapes={"input_ids": free, "attention_mask": free},
                dynamo=True,
                optimize=False,  # would fold weights, which are fake
                verbose=False,
            )
        except Exception as error:  # torch.onnx raises errors of many kinds for code that it cannot trace
            raise UsageError(f"--format onnx: torch makes no graph of this model: {brief(error)}") from None
        finally:
            quiet.setLevel(level)
    assert program is not None
    return program.model


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    (module._parameters if isinstance(value, nn.Parameter) else module._buffers)[key] = value  # type: ignore[assignment]


def computed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Compute the non-persistent buffers of `model` by transformers' own code; return {name: buffer on the host}. Replaces
    those in `model` by equal ones on the host. Raises `UsageError` if that code leaves an element of a buffer as it was."""
    saved = {id(value) for value in model.state_dict(keep_vars=True).values()}
    owners = {
        f"{prefix}.{key}".lstrip("."): module
        for prefix, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and id(buffer) not in saved
    }
    # Elements that are computed do not depend on the value from which the buffer starts.
    buffers, again = _computed(model, owners, 0), _computed(model, owners, 1)
    left = [name for name, value in buffers.items() if not torch.equal(value, again[name])]
    if left:
        raise UsageError(
            f"--format onnx: no code of transformers computes the buffers {', '.join(left)} of SOURCE; take hf."
        )
    return buffers


def _computed(model: nn.Module, owners: Mapping[str, nn.Module], start: int) -> dict[str, Tensor]:
    """Replace each buffer in `owners` (name of a buffer -> its module) by a CPU tensor filled with `start`, then call
    `model._init_weights` on each of these modules that has no parameters of its own. Return {name: resulting buffer}."""
    for name, module in owners.items():
        key = name.rpartition(".")[2]
        buffer = module._buffers[key]
        assert buffer is not None, "initialisation does not remove buffers"
        module._buffers[key] = torch.full(buffer.shape, start, dtype=buffer.dtype, device="cpu")
    for module in dict.fromkeys(owners.values()):
        if not any(True for _ in module.parameters(recurse=False)):
            model._init_weights(module)  # type: ignore[operator]
    buffers = {name: module._buffers[name.rpartition(".")[2]] for name, module in owners.items()}
    return {name: value for name, value in buffers.items() if value is not None}
