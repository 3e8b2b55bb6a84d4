"""Checkpoints to and from other formats."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from accordion.checkpoint.checksums import PIECE_BYTES, kind_here
from accordion.checkpoint.foreign import Foreign, open_foreign
from accordion.checkpoint.format import DTYPES, MANIFEST, Manifest, TensorEntry, code_of, dump, file_name
from accordion.checkpoint.load import whole
from accordion.checkpoint.manifest_of_files import described
from accordion.checkpoint.reading import DCP_METADATA, Files, Read, opened, steady
from accordion.checkpoint.storage.folders import Folder, Local, Remote, checkpoint_at, folder_at
from accordion.checkpoint.untrusted_files import HF_INDEX, HF_SINGLE
from accordion.checkpoint.writing import layout, write
from accordion.errors import CheckpointError, UsageError

READ_SUFFIXES, READ_NAMES = (".safetensors", ".distcp"), (HF_INDEX, DCP_METADATA)
FORMATS = ("hf", "dcp", "torch")
SHARD_BYTES = 4 * 2**30  # of one safetensors file that is exported
LIKE = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")  # what stands beside weights in a folder of transformers


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Foreign:
    """Write what another format holds as a checkpoint; returns what was found, and what of it is left out.

    `source`: a folder of safetensors as transformers writes it, a folder of torch's DCP, or a file of `torch.save` since torch
    1.6. Pickles are read without running anything they name. Every tensor that the source promises is there once, or all is
    refused. Host memory: 100 MiB beside the tensors of one source file. A source on remote storage is copied to this
    machine's folder for temporary files first.
    Raises `CheckpointError` for a source that is damaged, holds no tensors of a model, is absurd in its size or names
    anything but tensors, `UsageError` for one of no known format.
    """
    try:
        at = folder_at(source)
        if isinstance(at, Local):
            return _converted(at.path, target)
        assert isinstance(at, Remote)
        with TemporaryDirectory() as here:
            return _converted(at.fetch(Path(here)), target)
    except (CheckpointError, UsageError):
        raise
    except Exception as error:  # whatever a source that somebody else wrote makes of torch and of this
        raise CheckpointError(f"{os.fspath(source)} cannot be converted: {type(error).__name__}: {error}") from error


def _converted(source: Path, target: str | os.PathLike[str]) -> Foreign:
    before = _stamp(source)
    found, folder = open_foreign(source), folder_at(target)
    begun = folder.begin(secrets.token_hex(4))
    try:
        _write(found, begun)
        if _stamp(source) != before:
            raise CheckpointError(
                f"{source} was written while it was read, and may have been mixed; convert it when its writer has ended."
            )
        folder.commit(begun)
    except BaseException:
        begun.discard()
        raise
    return found


def _stamp(source: Path) -> dict[str, tuple[int, ...]]:
    """Another one once a file that may be read has been written or replaced."""
    inside = sorted(source.iterdir()) if source.is_dir() else [source]
    read = [path for path in inside if path == source or path.suffix in READ_SUFFIXES or path.name in READ_NAMES]
    stats = {path.name: path.stat() for path in read if path.exists()}
    return {name: (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats.items()}


def _write(found: Foreign, begun: Folder) -> None:
    for i, read in enumerate(found.files):
        parts = read()
        if parts:
            write(begun, file_name(i), layout(parts, i))
    text = memoryview(dump(described(_form(found), begun)))
    with begun.create(MANIFEST, len(text)) as file:
        file.write(text)


def _form(found: Foreign) -> Manifest:
    return Manifest(
        checksum=kind_here(),
        piece_bytes=PIECE_BYTES,
        files={},
        tensors={
            name: TensorEntry(dtype=code_of(name, dtype), shape=shape, placements=None, chunks=())
            for name, (dtype, shape) in found.shapes.items()
        },
        aliases={},
        optimizer=found.optimizer,
        extra=found.extra,
        saved_by={"torch": torch.__version__, "converted_from": found.kind, "num_ranks": len(found.files)},
    )


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    kind: str = "hf",
    *,
    like: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Write the model of a checkpoint in another format; returns the files.

    `kind`: `hf`, a folder that transformers' `from_pretrained` loads; `dcp`, a folder of torch.distributed.checkpoint; `torch`,
    one file of `torch.save`. `like`: a folder whose configuration and tokenizer are copied beside `hf` weights; without it
    the configuration that `accordion train` kept in the checkpoint. `dtype`: of floating-point tensors, as saved if None.
    Host memory: 4 GiB for `hf`, the model for the others. What goes to remote storage is written to this machine's folder for
    temporary files first. Every byte is checked. Raises `CheckpointError`, `UsageError`.
    """
    if kind not in FORMATS:
        raise UsageError(f"format {kind!r} does not exist; valid: {', '.join(FORMATS)}.")
    to = folder_at(target)
    if isinstance(to, Remote):
        with TemporaryDirectory() as here:
            export(source, Path(here, "made"), kind, like=like, dtype=dtype)
            return to.put(Path(here, "made"))
    assert isinstance(to, Local)
    at = to.path
    if at.exists():
        raise UsageError(f"{at} exists; pass another path or remove it.")
    return steady(lambda: checkpoint_at(source), lambda folder: _export(folder, at, kind, like, dtype))


def _export(
    folder: Folder, at: Path, kind: str, like: str | os.PathLike[str] | None, dtype: torch.dtype | None
) -> list[str]:
    with closing(opened(folder)) as files:
        _check_model(files)
        begun = at.with_name(f".{at.name}.tmp")
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir(parents=True)
        try:
            made = {"hf": _to_hf, "dcp": _to_dcp, "torch": _to_torch}[kind](files, begun, dtype)
            if kind == "hf":
                made += _configuration(files, begun, like)
            if kind == "torch":
                (begun / made[0]).rename(at)
                return [str(at)]
            begun.rename(at)
        finally:
            shutil.rmtree(begun, ignore_errors=True)
    return [str(at / name) for name in made]


def _check_model(files: Files) -> None:
    files.check_sizes()
    names = [name for name in files.manifest.tensors if name.startswith("model/")]
    entries = [(name, files.manifest.tensors[name]) for name in names]
    faults = files.faults(Read(name, e, chunk, chunk.box, None) for name, e in entries for chunk in e.chunks)
    if faults:
        raise CheckpointError(f"{files.folder} is damaged: {'; '.join(faults)}.")


def _model(files: Files, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors, one at a time."""
    for name, entry in files.manifest.tensors.items():
        if name.startswith("model/"):
            tensor = whole(files, name)
            cast = dtype is not None and DTYPES[entry.dtype].is_floating_point
            yield name.removeprefix("model/"), tensor.to(dtype) if cast else tensor


def _to_hf(files: Files, folder: Path, dtype: torch.dtype | None) -> list[str]:
    shards: list[dict[str, Tensor]] = [{}]
    made: list[list[str]] = []
    total = held = 0

    def flush() -> None:
        nonlocal held
        save_file(shards[0], folder / f"part-{len(made):05d}", metadata={"format": "pt"})
        made.append(list(shards[0]))
        shards[0], held = {}, 0

    for name, tensor in _model(files, dtype):
        num_bytes = tensor.numel() * tensor.element_size()
        if shards[0] and held + num_bytes > SHARD_BYTES:
            flush()
        shards[0][name] = tensor
        held, total = held + num_bytes, total + num_bytes
    flush()
    if len(made) == 1:
        (folder / "part-00000").rename(folder / HF_SINGLE)
        return [HF_SINGLE]
    names = [f"model-{i + 1:05d}-of-{len(made):05d}.safetensors" for i in range(len(made))]
    for i, name in enumerate(names):
        (folder / f"part-{i:05d}").rename(folder / name)
    where = {key: name for name, keys in zip(names, made, strict=True) for key in keys}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / HF_INDEX).write_text(json.dumps(index, indent=2))
    return [*names, HF_INDEX]


def _configuration(files: Files, folder: Path, like: str | os.PathLike[str] | None) -> list[str]:
    """Put beside the weights what `from_pretrained` needs; nothing where nobody knows it."""
    if like is not None:
        if not (Path(like) / "config.json").is_file():
            raise UsageError(f"like {str(like)!r} has no config.json; give a folder of transformers.")
        found = {path for pattern in LIKE for path in Path(like).glob(pattern) if "safetensors" not in path.name}
        return [Path(shutil.copy2(path, folder)).name for path in sorted(found)]
    extra = files.manifest.extra
    configuration = extra.get("model_config") if isinstance(extra, dict) else None
    if not isinstance(configuration, dict):
        return []
    (folder / "config.json").write_text(json.dumps(configuration, indent=2))
    return ["config.json"]


def _to_torch(files: Files, folder: Path, dtype: torch.dtype | None) -> list[str]:
    torch.save(_with_aliases(files, dtype), folder / "model.pt")
    return ["model.pt"]


def _to_dcp(files: Files, folder: Path, dtype: torch.dtype | None) -> list[str]:
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what is meant
        save({"model": _with_aliases(files, dtype)}, checkpoint_id=folder, no_dist=True)
    return sorted(Local(folder).sizes())


def _with_aliases(files: Files, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """A state dict: tied tensors are one tensor under each of their names."""
    found = dict(_model(files, dtype))
    ties = {a.removeprefix("model/"): b.removeprefix("model/") for a, b in files.manifest.aliases.items()}
    return found | {a: found[b] for a, b in ties.items() if b in found}
