"""Write the model of a checkpoint in formats of other libraries."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from accordion.checkpoint.format import DTYPES
from accordion.checkpoint.reading import Files, opened
from accordion.checkpoint.storage.folders import checkpoint_at, folder_at
from accordion.checkpoint.storage.local import Local
from accordion.checkpoint.streamed import PLAIN, TensorSource, draft_of, write_safetensors, write_shards
from accordion.checkpoint.untrusted_files import HF_SINGLE, check_quantised, plain_names
from accordion.errors import UsageError

FORMATS = ("hf", "safetensors")
CONFIG, GENERATION = "config.json", "generation_config.json"
MODEL = "model/"  # prefix of the names of a model's tensors
SHARD_BYTES = 4 * 2**30  # largest size of one exported safetensors file
LIKE = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")  # files next to the weights in a folder of transformers


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

    All checksums of the model are compared first. Host memory is needed for one tensor. `source` may be a URL. Raises
    `CheckpointError` if `source` is damaged, `UsageError` if `target` exists or an argument is wrong; `target` is then not
    created.

    `kind`: `hf`, a folder that transformers' `from_pretrained` loads; `safetensors`, one file. `like`: for `hf`, folder whose
    configuration and tokenizer are copied; None takes the configuration that `accordion train` saved in the checkpoint.
    `dtype`: of floating-point tensors; None keeps theirs. `ema`: decay of the average to write in place of the weights.
    `beside`: for `hf`, called with the new folder; writes more files there and returns their names.
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
            (begun / HF_SINGLE).rename(at)
            return [str(at)]
        names = _export_hf(files, begun, like, dtype)
        names += [name for name in beside(begun) if name not in names]
        begun.rename(at)
    return [str(at / name) for name in names]


def _export_hf(files: Files, folder: Path, like: str | os.PathLike[str] | None, dtype: torch.dtype | None) -> list[str]:
    """Write the model's weights and configuration to `folder` as transformers does; return the names of the files. With `like`
    the names of tensors lose the prefixes of wrappers."""
    sources = sources_of(files, dtype)
    if like is not None:
        plain = plain_names(source.name for source in sources)
        sources = [replace(source, name=plain[source.name]) for source in sources]
    return write_shards(folder, sources, SHARD_BYTES) + _configuration(files, folder, like, dtype)


def check_model(files: Files) -> None:
    """Read every byte of the model, and raise `CheckpointError` if a checksum does not match."""
    files.check(lambda name: name.startswith(MODEL))


def sources_of(files: Files, dtype: torch.dtype | None = None) -> list[TensorSource]:
    """Return the model's tensors, not read yet, tied ones once. `dtype`: for floating-point ones; None keeps theirs."""
    return [
        TensorSource(name.removeprefix(MODEL), DTYPES[e.dtype], e.shape, partial(files.whole, name)).cast(dtype)
        for name, e in files.manifest.tensors.items()
        if name.startswith(MODEL)
    ]


def ties_of(files: Files) -> dict[str, str]:
    """Return a dict: other name of a tied tensor -> the name under which it is saved."""
    aliases = files.manifest.aliases.items()
    return {a.removeprefix(MODEL): b.removeprefix(MODEL) for a, b in aliases if a.startswith(MODEL)}


def _configuration(
    files: Files, folder: Path, like: str | os.PathLike[str] | None, dtype: torch.dtype | None
) -> list[str]:
    """Write the configuration of `like`, or else of the checkpoint, to `folder`; return the file names, [] if there is none.
    Raises `UsageError` if `like` has no config.json or is quantised."""
    if like is not None:
        if not (Path(like) / CONFIG).is_file():
            raise UsageError(f"like {str(like)!r} has no {CONFIG}; give a folder of transformers.")
        names = copy_beside(Path(like), folder)
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        check_quantised(config, f"like {str(like)!r}")
        write_config(folder, config, dtype)
        return names
    extra = files.manifest.extra if isinstance(files.manifest.extra, dict) else {}
    configuration, generation = extra.get("model_config"), extra.get("generation_config")
    if not isinstance(configuration, dict):
        return []
    return write_config(folder, configuration, dtype, generation if isinstance(generation, dict) else None)


def copy_beside(source: Path, folder: Path) -> list[str]:
    """Copy configuration and tokenizer from `source`, a folder of transformers, to `folder`; return the names of the files."""
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
    """Write `config` to config.json and `generation`, unless None, to generation_config.json; return the file names. The entry
    "dtype" of `config` is replaced by `dtype`, unless that is None."""
    others = {key: value for key, value in config.items() if dtype is None or key not in ("dtype", "torch_dtype")}
    more = {} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG).write_text(json.dumps({**others, **more}, indent=2), encoding="utf-8")
    if generation is not None:
        (folder / GENERATION).write_text(json.dumps(generation, indent=2), encoding="utf-8")
    return [CONFIG] if generation is None else [CONFIG, GENERATION]
