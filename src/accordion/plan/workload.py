"""`Workload`: the model, loss and batches that a plan is made for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from accordion import _torch
from accordion.errors import UsageError, nearest
from accordion.plan.hardware import LARGEST, check_rate
from accordion.plan.trace.optimizers import OPTIMIZERS
from accordion.plan.trace.setup import Subject
from accordion.plan.trace.trace import ENGINES
from accordion.plan.trained_models import Kernels, configuration, language_subject, remarks_on, trained_model

COMPILED = (
    "the model is compiled; it is traced as it was written: fused kernels move fewer bytes and keep fewer activations"
)
LARGEST_TOKENS = 1 << 24  # of a micro-batch: torch counts the elements of a tensor in 63 bits


@dataclass(frozen=True, slots=True)
class Workload:
    """The model that is trained, its loss and its batches. Raises `UsageError` for an unknown name, a number out of range, or a
    module without `loss`. A planned step clips gradients by their norm; with offloaded states, clipping is work of the host.

    Args:
        model: any module; or text for a language model: the name of a preset, a folder with a config.json, or that file.
        loss: function of (module, batch) that returns a 0-d tensor. Required for a module, unused for a language model.
        batch: for a module, an example batch of one rank, whose size is the micro-batch; unused for a language model.
        seq: tokens per sample of a language model.
        kernels: loss, attention and adapters of a language model.
        optimizer: adamw, adamw_ema, adamw_foreach, sgd, adamw_bf16, adamw_8bit or adamw_4bit.
        engine: "accordion", or "fsdp2" for PyTorch's own `fully_shard`.
        tokens: tokens of a whole run (for a module: batches), to compute the hours and price of the run.
    """

    model: str | nn.Module
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    batch: Any = None
    _: KW_ONLY
    seq: int = 4096
    kernels: Kernels = field(default_factory=Kernels)
    optimizer: str = "adamw"
    engine: str = "accordion"
    tokens: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) and self.loss is None:
            raise UsageError("a Workload with a module needs loss, a function of the model and the batch.")
        for kind, name, known in (("optimizer", self.optimizer, OPTIMIZERS), ("engine", self.engine, ENGINES)):
            if name not in known:
                raise UsageError(f"{kind} {name!r} is not known to plan; {nearest(name, list(known))}")
        if not 1 <= self.seq <= LARGEST:
            raise UsageError(f"seq is {self.seq}; it takes 1 or more{f', up to {LARGEST:,}' if self.seq > 1 else ''}.")
        if self.engine == "fsdp2" and self.kernels.loss == "head_rows":
            raise UsageError("loss 'head_rows' is planned with engine accordion alone; take --loss chunked.")
        check_rate("tokens", self.tokens, 1e18)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceableModel:
    """A workload's model, ready to be traced.

    Args:
        name: name of the model.
        model: the model on the meta device.
        subject_for: function of a micro-batch size (unused for a module) that returns the training to trace.
        counted: "tokens" or "batches": what the speed in a plan counts per second.
        remarks: texts on how the model is planned, which a plan shows.
        vocab: size of the vocabulary of a language model; 0 for a module.
    """

    name: str
    model: nn.Module
    subject_for: Callable[[int], Subject]
    counted: str = "tokens"
    remarks: Sequence[str] = ()
    vocab: int = 0


def trained(workload: Workload) -> TraceableModel:
    """Return a workload's model on the meta device, with its loss and batches; a module is copied. Raises `UsageError` if the
    model cannot be planned, for example because its configuration cannot be read, or because a parameter is a DTensor."""
    if isinstance(workload.model, str):
        name, seq, kernels = workload.model, workload.seq, workload.kernels
        where = f"model {name!r}"
        config = configuration(name, seq)
        model = trained_model(config, where, kernels)
        return TraceableModel(
            name=name,
            model=model,
            subject_for=partial(language_subject, config, where, seq=seq, kernels=kernels),
            remarks=remarks_on(config, model),
            vocab=int(config.get_text_config().vocab_size),
        )
    assert workload.loss is not None
    plain = _torch.without_compile(workload.model)
    compiled = plain is not workload.model or _torch.is_compiled(plain)
    distributed = next((name for name, p in plain.named_parameters() if isinstance(p, DTensor)), None)
    if distributed is not None:
        raise UsageError(
            f"parameter {distributed!r} is a DTensor already, which cannot be planned; plan the model before it is distributed. "
            "Experts are spread by expert_parallel."
        )
    subject = subject_of(plain, workload.loss, workload.batch)
    return TraceableModel(
        name=type(plain).__name__,
        model=on_meta(plain),
        subject_for=lambda size: subject,
        counted="batches",
        remarks=[COMPILED] if compiled else (),
    )


def subject_of(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any) -> Subject:
    """Return the training to trace: copies of `model` on the meta device, `loss`, and copies of the nested `batch`, in which
    empty CPU tensors of equal shape and dtype replace the tensors."""
    batch_like = partial(tree_map_only, Tensor, partial(torch.empty_like, device="cpu"), batch)
    return Subject(make=partial(on_meta, model), batch=batch_like, loss=loss)


def on_meta(model: nn.Module) -> nn.Module:
    """Return a deep copy of `model` whose parameters and buffers are on the meta device; tied parameters stay tied."""
    memo: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return copy.deepcopy(model, memo)
