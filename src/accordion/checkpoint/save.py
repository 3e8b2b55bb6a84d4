"""Writing a checkpoint: every rank its own rows into its own file, and rank 0 the manifest that makes it one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion.checkpoint.format import (
    MANIFEST,
    Chunk,
    Entry,
    Json,
    Manifest,
    code_of,
    dump,
    encode,
    entry_name,
    file_name,
    header,
)
from accordion.checkpoint.state import (
    Contents,
    contents,
    holders,
    local_data,
    model_tensors,
    own_box,
    own_coordinate,
    placement_words,
    writes,
)
from accordion.checkpoint.team import Team
from accordion.errors import CheckpointError


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Json = None,
) -> None:
    """Write a checkpoint of `model` and `optimizer` that any number of ranks can load; called by all ranks together.

    `path`: folder that is made, on storage that all ranks see; an older checkpoint of that name is replaced. `extra`:
    numbers, strings, lists, tuples and dicts to keep beside the tensors; rank 0's are taken. The folder appears
    complete or not at all. Raises `CheckpointError` on every rank where one of them failed, and leaves nothing then.
    """
    target = Path(os.path.abspath(path))
    temporary = target.with_name(f".{target.name}.tmp")
    team = Team.of(model_tensors(model)[0].values())
    found = team.agree(lambda: contents(model, optimizer))
    words = team.agree(lambda: encode(extra, "extra") if team.leads else None)
    try:
        team.agree(lambda: _make_room(target, temporary) if team.leads else None)
        team.agree(lambda: _write_own(temporary, found.tensors, team))
        team.agree(lambda: _commit(temporary, target, manifest(found, team, words)) if team.leads else None)
    except CheckpointError:
        if team.leads:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def manifest(found: Contents, team: Team, extra: Json) -> Manifest:
    """Describe the files of all ranks from the placements alone: no rank is asked."""
    tensors: dict[str, Entry] = {}
    same: dict[Hashable, tuple[Chunk, ...]] = {}  # most tensors are placed and shaped like many others
    for name, tensor in found.tensors.items():
        placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        key = (tuple(tensor.shape), placed)
        if key not in same:
            same[key] = tuple(Chunk(file_name(rank), box) for rank, box in holders(name, tensor, team) if box.numel)
        tensors[name] = Entry(
            dtype=code_of(name, tensor.dtype),
            shape=tuple(tensor.shape),
            placements=placement_words(tensor),
            chunks=same[key],
        )
    meshes = dict.fromkeys(tensor.device_mesh for tensor in found.tensors.values() if isinstance(tensor, DTensor))
    saved_by = {
        "torch": torch.__version__,
        "num_ranks": len(team.ranks),
        "meshes": [{"shape": list(mesh.shape), "axes": mesh.mesh_dim_names} for mesh in meshes],
    }
    return Manifest(tensors=tensors, aliases=found.aliases, optimizer=found.optimizer, extra=extra, saved_by=saved_by)


def _make_room(target: Path, temporary: Path) -> None:
    """An empty temporary folder; refuses to replace what is no checkpoint."""
    if target.exists() and not (target / MANIFEST).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is no checkpoint; pass another path or remove it.")
    if temporary.exists():
        shutil.rmtree(temporary)  # of a save that was killed
    temporary.mkdir(parents=True)


def _write_own(folder: Path, tensors: Mapping[str, Tensor], team: Team) -> None:
    """Write this rank's parts of all tensors; no file where it has none."""
    parts = []
    for name, tensor in tensors.items():
        box = own_box(name, tensor)
        mine = writes(tensor, own_coordinate(tensor)) if isinstance(tensor, DTensor) else team.leads
        if mine and box.numel:
            parts.append((entry_name(name, box.offset), local_data(tensor)))
    if parts:
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}, made by rank 0, is not seen here; checkpoints need storage that all ranks share."
            )
        write_tensors(folder / file_name(team.index), parts)


def write_tensors(path: Path, parts: Iterable[tuple[str, Tensor]]) -> None:
    """Write a safetensors file, one tensor in host memory at a time, and wait until it is on the disk.

    safetensors' own writer wants all tensors in host memory at once and refuses views of one storage, which shards are.
    """
    parts = sorted(parts, key=lambda part: -part[1].element_size())  # so that each begins at a multiple of its own size
    words = [(name, code_of(name, part.dtype), tuple(part.shape)) for name, part in parts]
    with open(path, "xb") as file:
        file.write(header(words))
        for _, part in parts:
            file.write(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _commit(temporary: Path, target: Path, manifest: Manifest) -> None:
    """Write the manifest and give the folder its name: from then on it is a checkpoint."""
    absent = [name for name in manifest.files() if not (temporary / name).is_file()]
    if absent:
        raise CheckpointError(f"{temporary} lacks {', '.join(absent)}; checkpoints need storage that all ranks share.")
    with open(temporary / MANIFEST, "x") as file:
        file.write(dump(manifest))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(temporary)
    replaced = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    try:
        temporary.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    _sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
