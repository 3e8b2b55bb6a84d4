"""Convert checkpoints to and from other formats, and write safetensors files with one tensor in memory at a time."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accordion.checkpoint.collective import Team
from accordion.checkpoint.contents import Contents
from accordion.checkpoint.format import DTYPES, code_of, header
from accordion.checkpoint.json_values import as_dict
from accordion.checkpoint.reading import DCP_METADATA, FROM_DCP, Files, opened
from accordion.checkpoint.save import SaveJob, form_of
from accordion.checkpoint.storage.folders import checkpoint_at, folder_at
from accordion.checkpoint.storage.local import Local
from accordion.checkpoint.untrusted_files import (
    HF_INDEX,
    HF_SINGLE,
    ForeignModel,
    check_quantised,
    of_safetensors,
    of_torch_file,
    plain_names,
    read_files,
    read_folder,
)
from accordion.checkpoint.writing import bytes_of, layout_of
from accordion.errors import CheckpointError, UsageError
from accordion.files import read_text

FORMATS = ("hf", "safetensors", "dcp", "torch")
FILES = ("safetensors", "torch")  # formats of one file; the others are folders
CONFIG, GENERATION = "config.json", "generation_config.json"
MODEL = "model/"  # prefix of the names of a model's tensors
SHARD_BYTES = 4 * 2**30  # largest size of one exported safetensors file
LIKE = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")  # files next to the weights in a folder of transformers
CAST_ELEMENTS = 2**20  # cast at once, because a cast of the whole tensor would be a second one in memory
PLAIN = {"format": "pt"}  # metadata that transformers requires


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> ForeignModel:
    """Write a checkpoint to `target` from a source of another format; return the source's kind, tensors and keys left out. An
    older checkpoint at `target` is replaced; on remote storage the call raises `CheckpointError` instead.

    `source`: a folder or file of safetensors as transformers writes it, or a file of `torch.save` since torch 1.6. Files are
    memory-mapped, and code that a pickle names is not run. Raises `CheckpointError` if `source` is damaged, unsafe to read,
    lacks tensors that it lists or has them twice; `UsageError` if it has another format or quantised weights, or is remote.
    """
    folder = folder_at(source)
    if not isinstance(folder, Local):
        raise UsageError(
            f"{folder} is on remote storage, and other formats are read and written on this machine only; copy it."
        )
    foreign = _open_source(folder.path)
    contents = Contents(tensors=foreign.tensors, aliases={}, params={})
    team = Team.alone()
    job = SaveJob(
        target=folder_at(target),
        name=secrets.token_hex(4),
        place="",
        form=form_of(contents, team, None),
        plan=layout_of(contents, {}, team),
        team=team,
        keep=0,
    )
    job.run(team.agree)
    return foreign


def _open_source(path: Path) -> ForeignModel:
    """Return the model in `path`, a file or folder of another format. Raises `UsageError` for an unknown format or quantised
    weights, `CheckpointError` if `path` is damaged, holds no tensors, or is not safe to read."""
    if (path / DCP_METADATA).is_file():
        raise UsageError(f"{path} is a folder of torch.distributed.checkpoint; {FROM_DCP}.")
    if (path / HF_SINGLE).is_file() or (path / HF_INDEX).is_file():
        source = of_safetensors(read_folder(path))
    elif path.is_file() and path.suffix == ".safetensors":
        source = of_safetensors(read_files(path.parent, [path.name], {}))
    elif path.is_file():
        source = of_torch_file(path)
    else:
        raise UsageError(f"{path} is neither a folder of safetensors ({HF_SINGLE} or {HF_INDEX}) nor a file.")
    if not source.tensors:
        raise CheckpointError(f"{path} holds no tensors of a model: nothing to convert.")
    config: Any = {}
    with suppress(OSError, ValueError):
        config = json.loads(read_text(path / CONFIG))
    check_quantised(config if isinstance(config, dict) else {}, os.fspath(path), source.tensors)
    return source


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    kind: str = "hf",
    *,
    like: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    ema: str | None = None,
    beside: Callable[[Path], list[str]] = lambda folder: [],
) -> list[str]:
    """Write the model in the checkpoint `source` to `target` in another format; return the paths of the files.

    All checksums of the model are compared first. Host memory: one tensor for `hf` and `safetensors`, the model for the others.
    `source` may be a URL. Raises `CheckpointError` if `source` is damaged, `UsageError` if `target` exists or an argument is
    wrong, `OSError` if a file cannot be written; then neither `target` nor folders above it are created.

    `kind`: `hf`, a folder that transformers' `from_pretrained` loads; `safetensors`, one file; `dcp`, a folder of
    torch.distributed.checkpoint; `torch`, one file of `torch.save`. `like`: for `hf`, folder whose configuration and tokenizer
    are copied; None takes the configuration that `accordion train` saved in the checkpoint, if any. `dtype`: of floating-point
    tensors; None keeps theirs. `ema`: decay, as text, of the average to write in place of the weights. `beside`: for `hf`,
    called with the new folder; writes more files there and returns their names.
    """
    if kind not in FORMATS:
        raise UsageError(f"format {kind!r} does not exist; valid: {', '.join(FORMATS)}.")
    folder = folder_at(target)
    if not isinstance(folder, Local):
        raise UsageError(
            f"{folder} is on remote storage, and other formats are written on this machine only; copy it there afterwards."
        )
    at = folder.path
    with draft_of(at) as begun, closing(opened(checkpoint_at(source), ema)) as files:
        check_model(files)
        if kind == "safetensors":  # tied names go into the header, as `safetensors.torch.save_model` writes them
            write_safetensors(begun / HF_SINGLE, sources_of(files, dtype), {**PLAIN, **ties_of(files)})
            names = [HF_SINGLE]
        elif kind in ("torch", "dcp"):
            names = _write_by_torch(begun, files, dtype, kind)
        else:
            names = _export_hf(files, begun, like, dtype)
            names += [name for name in beside(begun) if name not in names]
        if kind in FILES:
            (begun / names[0]).rename(at)
            return [str(at)]
        begun.rename(at)
    return [str(at / name) for name in names]


def _export_hf(files: Files, folder: Path, like: str | os.PathLike[str] | None, dtype: torch.dtype | None) -> list[str]:
    """Write the model's weights and configuration to `folder` as transformers does; return the names of the files.

    Without `like` the configuration is the one in the checkpoint, if there is one. With `like` it is copied from that folder,
    and names of tensors lose the prefixes of wrappers. Raises `UsageError` if `like` has no config.json or is quantised.
    """
    sources = sources_of(files, dtype)
    if like is None:
        names = write_shards(folder, sources, SHARD_BYTES)
        extra = as_dict(files.manifest.extra)
        config, generation = extra.get("model_config"), extra.get("generation_config")
        if not isinstance(config, dict):
            return names
        return names + write_config(folder, config, dtype, generation if isinstance(generation, dict) else None)
    plain = plain_names(source.name for source in sources)
    names = write_shards(folder, [replace(source, name=plain[source.name]) for source in sources], SHARD_BYTES)
    if not (Path(like) / CONFIG).is_file():
        raise UsageError(f"like {str(like)!r} has no {CONFIG}; give a folder of transformers.")
    names += copy_beside(Path(like), folder)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    check_quantised(config, f"like {str(like)!r}")
    write_config(folder, config, dtype)
    return names


def check_model(files: Files) -> None:
    """Read every byte of the model. Raises `CheckpointError` if a checksum does not match or a file has a wrong size."""
    files.check_sizes()
    if faults := files.damage(lambda name: name.startswith(MODEL)):
        raise CheckpointError(f"{files.folder} is damaged: {'; '.join(faults)}.")


def sources_of(files: Files, dtype: torch.dtype | None = None) -> list[TensorSource]:
    """Return the model's tensors, not read yet, tied ones once. `dtype`: dtype of floating-point tensors; None keeps theirs."""
    return [
        TensorSource(name.removeprefix(MODEL), DTYPES[e.dtype], e.shape, partial(files.whole, name)).cast(dtype)
        for name, e in files.manifest.tensors.items()
        if name.startswith(MODEL)
    ]


def ties_of(files: Files) -> dict[str, str]:
    """Return {further name of a tied tensor of the model: the name under which it is saved}, without the prefix "model/"."""
    aliases = files.manifest.aliases.items()
    return {a.removeprefix(MODEL): b.removeprefix(MODEL) for a, b in aliases if a.startswith(MODEL)}


def copy_beside(source: Path, folder: Path) -> list[str]:
    """Copy configuration, tokenizer and texts from `source`, a folder of transformers, to `folder`; return the file names."""
    paths = sorted({path for pattern in LIKE for path in source.glob(pattern) if "safetensors" not in path.name})
    for path in paths:
        shutil.copyfile(path, folder / path.name)
    return [path.name for path in paths]


def write_config(
    folder: Path,
    config: Mapping[str, object],
    dtype: torch.dtype | None,
    generation: Mapping[str, object] | None = None,
) -> list[str]:
    """Write `config` to config.json and `generation`, unless None, to generation_config.json; return the file names. If `dtype`
    is not None, it replaces the entries "dtype" and "torch_dtype" of `config`."""
    others = {key: value for key, value in config.items() if dtype is None or key not in ("dtype", "torch_dtype")}
    more = {} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG).write_text(json.dumps({**others, **more}, indent=2), encoding="utf-8")
    if generation is not None:
        (folder / GENERATION).write_text(json.dumps(generation, indent=2), encoding="utf-8")
    return [CONFIG] if generation is None else [CONFIG, GENERATION]


def _write_by_torch(folder: Path, files: Files, dtype: torch.dtype | None, kind: str) -> list[str]:
    """Write the model's state dict to `folder` as `kind`, "torch" or "dcp"; return the names of the files. A tied tensor is one
    tensor under each of its names. `dtype`: as in `export`. Raises `OSError` if torch cannot write a file."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = {source.name: source.read().to(source.dtype) for source in sources_of(files, dtype)}
    tensors |= {a: tensors[b] for a, b in ties_of(files).items() if b in tensors}
    try:
        if kind == "torch":
            torch.save(tensors, folder / "model.pt")
        else:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # that torch.distributed is disabled
                save({"model": tensors}, checkpoint_id=folder, no_dist=True)
    except (RuntimeError, CheckpointException) as error:  # on a full disk; the latter is no `Exception`
        raise OSError(errno.EIO, "torch cannot write the files; the disk may be full", str(folder)) from error
    return sorted(path.name for path in folder.iterdir())


# -- safetensors files, with one tensor in host memory at a time


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to write in `dtype`. `read`: returns its values when they are needed, possibly in another dtype."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def cast(self, dtype: torch.dtype | None) -> TensorSource:
        """Return a source of this tensor in `dtype`; this source if `dtype` is None or the tensor is not floating-point."""
        return replace(self, dtype=dtype) if dtype is not None and self.dtype.is_floating_point else self

    def pieces(self) -> Iterator[memoryview]:
        """Read the tensor and iterate over its bytes, cast to `dtype`, in blocks. The tensor is freed after the last block."""
        tensor = self.read().detach()
        assert tuple(tensor.shape) == self.shape, (
            f"{self.name} has the shape {tuple(tensor.shape)} and was described with {self.shape}"
        )
        flat = tensor.contiguous().view(-1)
        del tensor
        if flat.dtype == self.dtype:
            yield bytes_of(flat)
            return
        for at in range(0, flat.numel(), CAST_ELEMENTS):
            yield bytes_of(flat[at : at + CAST_ELEMENTS].to(self.dtype))


def write_safetensors(path: Path, sources: Sequence[TensorSource], about: Mapping[str, str] = PLAIN) -> None:
    """Write `sources`, largest elements first, to a safetensors file at `path`. `about`: texts for the metadata in its header."""
    ordered = sorted(sources, key=lambda source: -source.dtype.itemsize)  # aligns each tensor to its elements' size
    head = header([(s.name, code_of(s.name, s.dtype), s.shape) for s in ordered], about)
    with path.open("wb") as file:
        file.write(head)
        for source in ordered:
            file.writelines(source.pieces())  # frees one tensor before the next one is read


def write_shards(folder: Path, sources: Sequence[TensorSource], shard_bytes: int) -> list[str]:
    """Write `sources` to `folder` as one safetensors file if they fit into `shard_bytes`, else as several and an index. A tensor
    larger than `shard_bytes` gets a file of its own. Return the file names."""
    shards: list[list[TensorSource]] = [[]]
    for source in sources:
        if shards[-1] and sum(s.num_bytes for s in shards[-1]) + source.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(source)
    if len(shards) == 1:
        write_safetensors(folder / HF_SINGLE, shards[0])
        return [HF_SINGLE]
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard)
    file_of = {source.name: name for name, shard in zip(names, shards, strict=True) for source in shard}
    total = sum(source.num_bytes for source in sources)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
    (folder / HF_INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return [*names, HF_INDEX]


@contextmanager
def draft_of(at: Path) -> Iterator[Path]:
    """Context manager that yields a new hidden folder next to `at`. The body renames the folder, or a file in it, to `at`; what
    is left of the folder at the end is removed, and so are new folders above it that are empty. Raises `UsageError` if `at`
    exists, also as a link to nothing, or the folder cannot be created."""
    if os.path.lexists(at):
        raise UsageError(f"{at} exists; pass another path or remove it.")
    begun = at.with_name(f".{at.name}.{secrets.token_hex(4)}.tmp")
    missing = [above for above in at.parents if not os.path.lexists(above)]
    try:
        try:
            begun.mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"{at} cannot be created: {error.strerror or error}.") from None
        yield begun
    finally:
        shutil.rmtree(begun, ignore_errors=True)
        for above in missing:
            with suppress(OSError):  # it is not empty if the body has written `at`
                above.rmdir()
