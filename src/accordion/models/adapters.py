"""Adapters of PEFT around a causal language model on the meta device, and their weights where a checkpoint of ours holds them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accordion.checkpoint.convert import check_model, sources_of
from accordion.checkpoint.reading import opened
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.errors import UsageError, nearest
from accordion.models.language import brief

AUTO = "auto"  # all linear layers but the head
NAME = "default"  # of the adapter, as PEFT names it
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check_peft() -> None:
    """Raise `UsageError` where PEFT is not installed."""
    if find_spec("peft") is None:
        raise UsageError("adapters need peft, not installed here; pip install 'accordion-fsdp[integrations]'.")


def lora_config(said: Mapping[str, Any], base: str | None) -> Any:
    """PEFT's configuration. `said`: `r`, `alpha`, `dropout`, and `targets`, AUTO or last names of layers with commas between."""
    check_peft()
    from peft import LoraConfig

    targets = said["targets"]
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=int(said["r"]),
        lora_alpha=said["alpha"],
        lora_dropout=float(said["dropout"]),
        target_modules="all-linear" if targets == AUTO else [name.strip() for name in targets.split(",")],
        base_model_name_or_path=base,
    )


def with_lora(model: nn.Module, said: Mapping[str, Any], base: str | None, key: str = "adapter.targets") -> nn.Module:
    """`model`, which is on meta, frozen and with adapters as `said`. Raises `UsageError` naming `key` for layers it has not."""
    config = lora_config(said, base)
    from peft import get_peft_model

    known = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if name and not list(m.children())})
    for name in said["targets"].split(",") if said["targets"] != AUTO else ():
        if name.strip() not in known:
            raise UsageError(
                f"{key} names {name.strip()!r}, which is no layer of the model; {nearest(name.strip(), known)}"
            )
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PEFT's about what it asks of transformers
            made: nn.Module = get_peft_model(model, config)
    except Exception as error:  # of PEFT, for layers that it has no adapter for
        raise UsageError(f"{key} {said['targets']!r} cannot have adapters: {brief(error)}") from None
    made.peft_config[NAME].base_model_name_or_path = base  # type: ignore[index, union-attr]
    return made.train()


def adapter_config(place: str, said: Mapping[str, Any] | None, base: str) -> Any:
    """PEFT's configuration of an adapter in a folder of PEFT; in a checkpoint of ours where `said` is what that says of it."""
    check_peft()
    from peft import PeftConfig

    return PeftConfig.from_pretrained(place) if said is None else lora_config(said, base)


def adapter_weights(place: str, *, ours: bool) -> dict[str, Tensor]:
    """The adapter's tensors by PEFT's names, on the CPU. `ours`: `place` is a checkpoint of ours, else a folder of PEFT."""
    if not ours:
        from peft import load_peft_weights

        found: dict[str, Tensor] = load_peft_weights(place, device="cpu")
        return found
    with closing(opened(checkpoint_at(Path(place)))) as files:
        check_model(files)
        return {source.name.replace(f".{NAME}.", "."): source.read() for source in sources_of(files)}
