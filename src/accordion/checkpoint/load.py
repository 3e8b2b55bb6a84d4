"""Reading a checkpoint: every rank the rows it needs, into the tensors that are there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from accordion.checkpoint.boxes import overlap
from accordion.checkpoint.format import MANIFEST, Chunk, Entry, Json, Manifest, decode, entry_name, parse
from accordion.checkpoint.restore import differences, restored
from accordion.checkpoint.state import Contents, contents, local_data, model_tensors, own_box
from accordion.checkpoint.team import Team
from accordion.errors import CheckpointError


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Json:
    """Fill `model` and `optimizer` from a checkpoint of any number of ranks; called by all ranks together.

    `model`: its shapes, dtypes and placements decide what each rank reads, into the tensors that are there.
    `optimizer`: its state is made where it has none. Returns the `extra` that was saved.
    Raises `CheckpointError` on every rank, before anything changes, naming every missing, extra or misshapen tensor.
    """
    folder = Path(os.path.abspath(path))
    team = Team.of(model_tensors(model)[0].values())
    plan = team.agree(lambda: _plan(folder, model, optimizer))
    with ExitStack() as stack, torch.no_grad():
        files = team.agree(lambda: _opened(folder, plan.reads, stack))
        team.agree(lambda: _read(files, plan.reads))
    if optimizer is not None:
        team.agree(lambda: optimizer.load_state_dict(plan.optimizer))
    return plan.extra


def latest(folder: str | os.PathLike[str]) -> str | None:
    """Path of the newest checkpoint in `folder`, None if there is none; folders that are not complete do not count.

    Newest by the number at the end of its name, then by time. What decides is the manifests, no file points anywhere.
    """
    try:
        found = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."]
    except FileNotFoundError:
        return None
    begun = [path for path in found if (path / MANIFEST).is_file()]
    return next((str(path) for path in sorted(begun, key=_age, reverse=True) if _complete(path)), None)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises `CheckpointError` where there is none or it is damaged."""
    try:
        return parse((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}.") from None
    except CheckpointError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be used: {error}") from error


def _complete(path: Path) -> bool:
    try:
        return all((path / name).is_file() for name in read_manifest(path).files())
    except (CheckpointError, OSError):
        return False


def _age(path: Path) -> tuple[int, int]:
    number = re.search(r"(\d+)$", path.name)
    return int(number[1]) if number else -1, (path / MANIFEST).stat().st_mtime_ns


@dataclass(frozen=True, slots=True)
class _Read:
    """Copy `source` of a chunk into `into`, a view of a local tensor."""

    name: str
    entry: Entry
    chunk: Chunk
    source: tuple[slice, ...]
    into: Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """All that a load will do on this rank, decided before it does any of it."""

    reads: list[_Read]
    optimizer: dict[str, Any]
    extra: Json


def _plan(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> _Plan:
    """Compare the checkpoint with what is to be filled, and list what this rank reads."""
    manifest = read_manifest(folder)
    found = contents(model, optimizer)
    unlike = differences(manifest, found)
    if unlike:
        raise CheckpointError(f"{folder} does not fit: " + "; ".join(unlike) + ".")
    targets = [(manifest.aliases.get(name, name), tensor) for name, tensor in _of_model(found).items()]
    state: dict[str, Any] = {}
    if optimizer is not None:
        state, made = restored(manifest, found, optimizer)
        targets += made.items()
    reads = [read for name, tensor in targets for read in _reads(name, manifest.tensors[name], tensor)]
    return _Plan(reads, state, decode(manifest.extra, _no_tensor))


def _of_model(found: Contents) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in found.tensors.items() if name.startswith("model/")}


def _no_tensor(name: str) -> Tensor:
    raise CheckpointError(f"extra refers to the tensor {name}; it can hold none.")


def _reads(name: str, entry: Entry, tensor: Tensor) -> Iterable[_Read]:
    """The parts of chunks that make up what this rank holds of `tensor`."""
    local = local_data(tensor)
    if local.is_meta:
        raise CheckpointError(f"{name} is on the meta device; call to_empty before loading.")
    own = own_box(name, tensor)
    for chunk in entry.chunks if own.numel else ():
        part = overlap(own, chunk.box)
        if part is not None:
            yield _Read(name, entry, chunk, part.within(chunk.box), local[part.within(own)])


def _opened(folder: Path, reads: list[_Read], stack: ExitStack) -> Mapping[str, Any]:
    """Open the files that are read and compare their headers with the manifest: a damaged one changes nothing."""
    files: dict[str, Any] = {}
    wrong: list[str] = []
    for file in dict.fromkeys(read.chunk.file for read in reads):
        try:
            files[file] = stack.enter_context(safe_open(folder / file, framework="pt"))
        except (OSError, SafetensorError) as error:
            wrong.append(f"{file}: {error}")
    for read in reads:
        if read.chunk.file in files:
            wrong += _unlike(files[read.chunk.file], read)
    if wrong:
        raise CheckpointError(f"{folder} is damaged: " + "; ".join(dict.fromkeys(wrong)) + ".")
    return files


def _unlike(file: Any, read: _Read) -> Iterable[str]:
    """What the header of a file says of a chunk, where it is not what the manifest says."""
    name, box = entry_name(read.name, read.chunk.box.offset), read.chunk.box
    try:
        held = file.get_slice(name)
    except SafetensorError:
        yield f"{read.chunk.file} lacks {name}"
        return
    dtype, shape = held.get_dtype(), tuple(held.get_shape())
    if (dtype, shape) != (read.entry.dtype, box.shape):
        yield f"{name} is {dtype} {shape} in {read.chunk.file} and {read.entry.dtype} {box.shape} in the manifest"


def _read(files: Mapping[str, Any], reads: list[_Read]) -> None:
    for read in reads:
        name, file = entry_name(read.name, read.chunk.box.offset), files[read.chunk.file]
        read.into.copy_(file.get_slice(name)[read.source] if read.source else file.get_tensor(name))
