"""Saves and loads folders in the formats of transformers and PEFT for a sharded model."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accordion.checkpoint.collective import Team
from accordion.engine.engine import Engine
from accordion.errors import CheckpointError, UsageError
from accordion.state import full_params, full_values, is_first_rank, settle, sharded_engine
from accordion.weights.four_bits import as_bitsandbytes, quantisation_in_config
from accordion.weights.pretrained import load_pretrained


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], **kwargs: Any) -> None:
    """Save a sharded model of transformers, PEFT or diffusers with its own `save_pretrained(folder, **kwargs)`. Collective.

    The first rank calls that method, and writes the same files as for an unsharded model. Full tensors are gathered one at a
    time into temporary files next to `folder`, so host memory is needed for one full tensor and for the method. Of a PEFT model
    only adapters and other trained parameters are gathered; with prompt adapters, all ranks gather the full model. Layers that
    `quantize` made are written in the format of bitsandbytes, and config.json says so, so that `from_pretrained` loads them.
    Raises `UsageError` for a model without `save_pretrained`, and `CheckpointError` on every rank if the first one failed.
    """
    method = getattr(type(model), "save_pretrained", None)
    if method is None:
        raise UsageError(
            f"{type(model).__name__} has no save_pretrained; use full_state_dict(model), or accordion.save and "
            "`accordion export`."
        )
    engine = sharded_engine(model, "save_pretrained")
    takes = inspect.signature(method).parameters
    by_argument = "state_dict" in takes or is_peft(model)
    team = Team.of(model.parameters())  # before `full_params`, whose tensors do not name their ranks
    with state_on_disk(model, folder) as state, quantisation_in_config(model):

        def write() -> None:
            if not is_first_rank(engine):
                return
            if by_argument:
                method(model, folder, state_dict=state, **kwargs)
                return
            vars(model)["state_dict"] = lambda *a, **k: state
            try:
                method(model, folder, **kwargs)
            finally:
                del vars(model)["state_dict"]

        team.agree(write)


@contextmanager
def state_on_disk(model: nn.Module, folder: str | os.PathLike[str]) -> Iterator[dict[str, Tensor] | None]:
    """Context manager that yields the full state dict on the first rank, and an empty dict on others. Collective.

    The tensors are in files next to `folder`, which are removed at the end. Four-bit layers have the format of bitsandbytes. Of
    a PEFT model only adapters and other trained parameters are in the dict. With prompt adapters, whose values PEFT computes,
    None is yielded on all ranks, and the model has full parameters inside. The body must raise on all ranks or on none.
    """
    engine = sharded_engine(model, "state_on_disk")
    if is_peft(model) and any(config.is_prompt_learning for config in model.peft_config.values()):  # type: ignore[operator]
        with full_params(model):
            yield None
        return
    settle(engine, "exports the model")
    team = Team.of(model.parameters())
    values = dict(model.state_dict(keep_vars=True))
    if is_peft(model):
        values = team.agree(lambda: _of_adapters(model, values))
    parent = Path(folder).absolute().parent

    def begin() -> Path | None:
        if not is_first_rank(engine):
            return None
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".full-", dir=parent))

    scratch = team.agree(begin)
    try:
        yield as_bitsandbytes(model, _gathered(engine, values, scratch, team))
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    team.agree(lambda: None)  # so that no rank continues before the files are removed


def _gathered(engine: Engine, values: Mapping[str, Any], scratch: Path | None, team: Team) -> dict[str, Tensor]:
    """Gather `values`, one by one, into files in `scratch`: a folder on the first rank, None on others. Return name -> tensor,
    mapped from the file, so that it can be evicted; {} on others. Collective. If a write fails, all raise `CheckpointError`."""

    def in_file(value: Any, index: int) -> Any:
        if scratch is None or not isinstance(value, Tensor) or not value.numel():
            return value
        storage = torch.UntypedStorage.from_file(str(scratch / str(index)), True, value.nbytes)
        tensor = torch.empty(0, dtype=value.dtype, device="cpu").set_(storage, 0, value.shape)  # type: ignore[call-overload]
        return tensor.copy_(value)

    result: dict[str, Any] = {}
    done: dict[int, Any] = {}
    for i, (name, value) in enumerate(values.items()):
        if id(value) not in done:
            full = full_values(engine, {name: value}, rank0_only=True, cpu=True).get(name)
            done[id(value)] = team.agree(partial(in_file, full, i))
        if scratch is not None:
            result[name] = done[id(value)]
    return result


# -- PEFT


def is_peft(model: nn.Module) -> bool:
    """Return True if `model` is a `peft.PeftModel`, without importing PEFT."""
    library: Any = sys.modules.get("peft.peft_model")
    return library is not None and isinstance(model, library.PeftModel)


def _of_adapters(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `values` (name -> tensor of a PEFT model) that PEFT saves or that are trained."""
    from peft import get_peft_model_state_dict

    wanted = {id(value) for value in values.values() if isinstance(value, nn.Parameter) and value.requires_grad}
    for adapter in model.peft_config:  # type: ignore[union-attr]
        saved = get_peft_model_state_dict(model, state_dict=dict(values), adapter_name=adapter)
        wanted |= {id(value) for value in saved.values()}
    return {name: value for name, value in values.items() if id(value) in wanted}


def load_exported(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Fill a sharded model, or only the adapters of a PEFT model, from a folder that `save_pretrained` wrote. Collective.
    Raises `CheckpointError` if weights are missing or do not fit; for adapters, if a file is unreadable, empty or has weights
    that the model lacks."""
    if not is_peft(model):
        load_pretrained(model, folder)
        return
    from peft import load_peft_weights, set_peft_model_state_dict

    for adapter, config in model.peft_config.items():  # type: ignore[operator, union-attr]
        path = Path(folder) if adapter == "default" else Path(folder, adapter)
        weights = Team.of(model.parameters()).agree(lambda path=path: load_peft_weights(str(path), device="cpu"))  # type: ignore[misc]
        if not weights:
            raise CheckpointError(f"{path} has no weights of the adapter {adapter!r}.")
        # PEFT loads the tensors of a prompt into a module inside, which takes no full tensors for shards, and not by their names.
        with full_params(model, write=True) if config.is_prompt_learning else nullcontext():
            surplus = set_peft_model_state_dict(model, weights, adapter_name=adapter).unexpected_keys
        if surplus and not config.is_prompt_learning:
            raise CheckpointError(f"{path} has weights that {type(model).__name__} lacks: {', '.join(surplus)}.")
