"""Parameters that come into a model after `shard`, or get another shape: refused, each rank would train its own in silence."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook as on_module
from torch.nn.modules.module import register_module_parameter_registration_hook as on_parameter

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.errors import UsageError

RESIZES = "resize_token_embeddings"  # of transformers' models


def refuse_additions(model: nn.Module, engine: Engine) -> None:
    """From the next forward on, for as long as the model lives. Raises `UsageError` in that forward."""
    additions = Additions(engine)
    for handle in (on_module(additions.saw), on_parameter(additions.saw)):
        weakref.finalize(model, handle.remove)
    model.register_forward_pre_hook(_torch.unseen_by_dynamo(additions.look), prepend=True)
    for module in model.modules():
        if callable(getattr(type(module), RESIZES, None)):
            module.__dict__[RESIZES] = _refuse_to_resize


def _refuse_to_resize(*_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        f"{RESIZES} was called after shard(), and an embedding's rows lie on all ranks then; resize the model before shard()."
    )


class Additions:
    """Looks through a model where something was registered anywhere since the last look; else a forward pays for one flag."""

    def __init__(self, engine: Engine) -> None:
        self._came, self._engine = False, engine

    def saw(self, *_: Any) -> None:
        self._came = True

    def look(self, model: nn.Module, _: Any) -> None:
        if not self._came or self._engine.suspended or self._engine.depth:  # there full parameters may be registered
            return
        for name, param in model.named_parameters():
            if param.requires_grad and not isinstance(param, DTensor):
                raise UsageError(
                    f"parameter {name!r} came into the model after shard(), so each rank would train one of its own; "
                    "put it in before shard(), or freeze it with requires_grad_(False)."
                )
        self._came = False
