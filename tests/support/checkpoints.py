"""Small models with optimizers to save, comparisons of checkpoints, and checkpoints with a changed manifest."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import accordion as acc
from accordion.checkpoint import load
from accordion.checkpoint.format import MANIFEST
from accordion.checkpoint.reading import opened
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.config import strategy_named
from tests.devices import device
from tests.support.models import Tiny


def small(seed: int = 0, width: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))


def stepped(model: nn.Sequential, optimizer: torch.optim.Optimizer | None = None, steps: int = 1) -> Any:
    """Train `model`, one of `small`, for `steps` steps, and return the optimizer: `optimizer`, or a new AdamW if that is None."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def sharded(mesh: Any, strategy: str = "full_shard", seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return (seeded model with tied and 0-d parameters, sharded with `strategy`; its wrapped AdamW)."""
    torch.manual_seed(seed)
    model = acc.shard(Tiny(tied=True, scalar=True, vocab=37), mesh, strategy=strategy_named(strategy), sync=True)
    return model, acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def equal_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Take a step of a `sharded` model with the same batch on all ranks; return the loss before it."""
    tokens = torch.arange(40, device=device()).view(4, 10) % 37
    loss = model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def filled(value: float, width: int = 3) -> nn.Linear:
    """Return a model all of whose elements are `value`. In a mixture of two such models, elements would differ."""
    model = nn.Linear(width, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def holds(path: str | os.PathLike[str], value: float) -> bool:
    """Return True if the checkpoint at `path` has the elements of `filled(value)`."""
    model = filled(-1)
    load(path, model)
    return all(bool((param == value).all()) for param in model.parameters())


@contextmanager
def saving_meanwhile(save: Callable[[int], object]) -> Iterator[None]:
    """Context manager in which a thread calls `save(1)`, `save(2)`, ... all the time. At the end it waits for the last call."""
    stop = threading.Event()

    def saves() -> None:
        for number in takewhile(lambda _: not stop.is_set(), count(1)):
            save(number)

    writer = threading.Thread(target=saves)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


def names(folder: str | os.PathLike[str]) -> list[str]:
    return sorted(os.listdir(folder))


def differing(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> set[str]:
    """Return the names of full tensors that differ, or that one checkpoint lacks. Leaves out `state=` and checksums."""

    def content(path: str | os.PathLike[str]) -> set[tuple[str, torch.dtype, torch.Size, bytes]]:
        with closing(opened(checkpoint_at(path))) as files:
            held = [name for name in files.manifest.tensors if name.split("/")[2:3] not in (["state"], ["sums"])]
            tensors = {name: files.whole(name).contiguous() for name in held}
        bits = {name: t.view(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}
        return {(name, t.dtype, t.shape, bits[name]) for name, t in tensors.items()}

    return {name for name, *_ in content(one) ^ content(other)}


def assert_same_tensors(model: nn.Module, other: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def sealed(words: Any) -> bytes:
    """Return the bytes of a manifest with a correct checksum. `words`: its content, or that as JSON text."""
    text = words if isinstance(words, str) else json.dumps(words, separators=(",", ":"))
    body = text.removesuffix("}").encode()
    return body + f',"crc32":"{zlib.crc32(body):08x}"}}\n'.encode()


def forged(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Call `change` with the content of the manifest in `folder`, to change it in place; write that with a correct checksum."""
    words = json.loads((folder / MANIFEST).read_bytes())
    del words["crc32"]
    change(words)
    (folder / MANIFEST).write_bytes(sealed(words))
