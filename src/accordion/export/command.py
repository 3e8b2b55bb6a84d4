"""`accordion export`: reads the options, checks all input, and writes the whole model or nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from accordion import options as flags
from accordion.checkpoint import convert
from accordion.checkpoint.convert import PLAIN, TensorSource, draft_of, write_safetensors, write_shards
from accordion.checkpoint.format import CODES, DTYPES
from accordion.errors import AccordionError, UsageError, check_installed
from accordion.export.tensors import folder_sources, tensors_of
from accordion.models.stored import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    StoredModel,
    adapter_config,
    adapter_weights,
    check_weights,
    extra_of,
    find_model,
    located,
    meta_model,
    tokenizer_of,
)
from accordion.options import one_of, place

PROG = "accordion export"
NEEDS = ("onnx", "onnxscript", "onnx_ir")  # packages for --format onnx
FORMATS = (*convert.FORMATS, "onnx", "peft")
OF_CHECKPOINTS = ("dcp", "torch")  # formats only for SOURCEs that are checkpoints
OF_ONNX = (torch.float32, torch.float16)  # values of --dtype


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a model in the format of another library, with one tensor in memory at a time.

    Args:
        source: a checkpoint, the folder of a run of `accordion train`, or a folder of transformers or of PEFT, whose adapter is
            merged
        target: path to write, which must not exist
        format: `hf`: a folder for from_pretrained; `safetensors`: one file; `onnx`: a folder for onnxruntime; `peft`: a folder
            with the adapter alone, for PeftModel.from_pretrained; for checkpoints only, `dcp`: a folder of
            torch.distributed.checkpoint, and `torch`: one file of torch.save. The default is `safetensors` if the name of TARGET
            ends so, else `hf`
        like: folder of transformers whose config.json and tokenizer are written with the weights of a checkpoint; or the base of
            an adapter
        dtype: cast floating-point tensors to this dtype, such as BF16
        ema: decay, such as 0.999, of an average in a checkpoint (`train.ema`, or an `acc.EMA` saved as `state={"ema": ema}`) to
            write in place of the weights
    """

    source: str = place()
    target: str = place()
    format: str | None = one_of(FORMATS, None)
    like: str | None = None
    dtype: str | None = one_of(sorted(CODES.values()), None)
    ema: str | None = None


def run(words: list[str]) -> int:
    """Run `accordion export` with the arguments `words`, print the written files and what was left out, and return exit code 0.
    Raises `AccordionError` for wrong input, or if a file cannot be read or written."""
    options = flags.read(ExportOptions, words, PROG, (ExportOptions.__doc__ or "").splitlines()[0])
    if options is None:
        return 0
    try:
        files, left = export(options)
    except OSError as error:
        raise AccordionError(f"nothing was written: {error.filename or options.target}: {error.strerror}.") from error
    print("\n".join([*(f"written: {file}" for file in files), *(f"left out: {what}" for what in left)]))
    return 0


def export(options: ExportOptions) -> tuple[list[str], list[str]]:
    """Write the model as `options` say; return (paths of the written files, texts on what was left out). An error leaves no
    files. Raises `UsageError` for wrong options or input, `CheckpointError` for a damaged source, and `OSError` if a file
    cannot be read or written."""
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(f"dtype {options.dtype} is no floating-point dtype; take F32, BF16 or F16.")
    for key in ("source", "target"):
        if not getattr(options, key).strip() or "\0" in getattr(options, key):
            raise UsageError(f"{key.upper()} is empty; give a path.")
    form = _form_of(options)
    kind, path = located(options.source)
    if kind != "checkpoint" and options.ema is not None:
        raise UsageError(f"--ema takes a checkpoint, which may hold averages, and SOURCE {options.source!r} is none.")
    if kind == "checkpoint" and form in convert.FORMATS and not isinstance(extra_of(path).get("adapter"), dict):
        return _of_checkpoint(path, options, form, dtype)
    if form in OF_CHECKPOINTS:
        raise UsageError(
            f"--format {form} takes a checkpoint, and SOURCE {options.source!r} is an adapter or a folder of transformers; "
            "`accordion checkpoint convert` makes a checkpoint of such a folder."
        )
    if "://" in options.target:
        raise UsageError(f"TARGET {options.target!r} is a URL; --format {form} is written to file systems alone.")
    stored = replace(find_model(options.source, like=options.like), ema=options.ema)
    at = Path(os.path.abspath(options.target))
    write = {"hf": _hf, "safetensors": _safetensors, "onnx": _onnx, "peft": _peft}[form]
    with draft_of(at) as draft:
        files = write(stored, draft, dtype)
        if form == "safetensors":
            (draft / files[0]).rename(at)
            return [str(at)], []
        draft.rename(at)
    return [str(at / name) for name in files], []


def _form_of(options: ExportOptions) -> str:
    """Return the format: `options.format`, or if that is None, "safetensors" if TARGET ends so, else "hf". Raises `UsageError`
    if TARGET ends in .onnx, or in .safetensors and the format is another, or if packages for "onnx" are not installed."""
    suffix = Path(options.target).suffix.lower()
    form = options.format or ("safetensors" if suffix == ".safetensors" else "hf")
    if suffix == ".onnx" or (suffix == ".safetensors" and form != "safetensors"):
        raise UsageError(
            f"TARGET {options.target!r} names a file that --format {form} does not write; give another name, or for ONNX a "
            "folder and --format onnx."
        )
    if form == "onnx":
        check_installed("--format onnx", NEEDS, "export")
    return form


def _of_checkpoint(
    path: str, options: ExportOptions, form: str, dtype: torch.dtype | None
) -> tuple[list[str], list[str]]:
    """Write the model in the checkpoint at `path` in the format `form`; return (paths of the written files, descriptions of what
    was left out). Transformers need not know the model. `dtype`: dtype of floating-point tensors; None keeps theirs. Raises
    `UsageError` or `CheckpointError` if the checkpoint is damaged, or does not fit the model in the folder `options.like`."""
    stored = model = None
    if form == "hf":
        with suppress(UsageError):  # a checkpoint without a model type, or of one that transformers does not know
            stored = find_model(options.source, like=options.like)
            model = None if options.like is None else meta_model(stored)
    if stored is not None and model is not None:
        check_weights(model, stored)
    beside = partial(_tokenizer, stored if options.like is None else None)
    files = convert.export(path, options.target, form, like=options.like, dtype=dtype, ema=options.ema, beside=beside)
    left = []
    if form == "hf" and not any(file.endswith("config.json") for file in files):
        left.append("config.json: the checkpoint does not say of which model it is; give --like a folder that has it")
    return files, left


def _tokenizer(stored: StoredModel | None, folder: Path) -> list[str]:
    """Save the tokenizer of `stored`, if it has one, into `folder`; return the names of the new files, [] without a tokenizer."""
    if stored is None or stored.tokenizer is None:
        return []
    before = set(folder.iterdir())
    tokenizer_of(stored).save_pretrained(folder)
    return sorted(path.name for path in set(folder.iterdir()) - before)


def _hf(stored: StoredModel, draft: Path, dtype: torch.dtype | None) -> list[str]:
    config = stored.config
    if stored.adapter is None:
        files = write_shards(draft, folder_sources(Path(stored.path), dtype), convert.SHARD_BYTES)
    else:
        with tensors_of(stored, dtype) as tensors:
            files = write_shards(draft, tensors.sources, convert.SHARD_BYTES)
            config = {**config, "tie_word_embeddings": False} if tensors.untied else config
    if stored.kind == "folder":
        files += [name for name in convert.copy_beside(Path(stored.path), draft) if name not in files]
    files += [name for name in convert.write_config(draft, config, dtype, stored.generation) if name not in files]
    if stored.tokenizer not in (None, stored.path):
        files += [name for name in _tokenizer(stored, draft) if name not in files]
    return files


def _peft(stored: StoredModel, draft: Path, dtype: torch.dtype | None) -> list[str]:
    """Write the adapter of `stored`, its configuration with the path of the base, and a tokenizer to the folder `draft`; return
    the file names. `dtype`: dtype of floating-point tensors; None keeps theirs. Raises `UsageError` without an adapter."""
    if stored.adapter is None:
        raise UsageError(f"--format peft takes an adapter, and SOURCE {str(stored)!r} has none; take --format hf.")
    weights = adapter_weights(stored)
    sources = [TensorSource(name, t.dtype, tuple(t.shape), t.clone).cast(dtype) for name, t in sorted(weights.items())]
    write_safetensors(draft / ADAPTER_WEIGHTS, sources)
    config = adapter_config(stored.adapter, stored.lora, os.path.abspath(stored.path))
    config.inference_mode = True
    config.save_pretrained(draft)
    return [ADAPTER, ADAPTER_WEIGHTS, *_tokenizer(stored, draft)]


def _safetensors(stored: StoredModel, draft: Path, dtype: torch.dtype | None) -> list[str]:
    with tensors_of(stored, dtype) as tensors:
        write_safetensors(draft / "model", tensors.sources, {**PLAIN, **tensors.ties})
    return ["model"]


def _onnx(stored: StoredModel, draft: Path, dtype: torch.dtype | None) -> list[str]:
    from accordion.export.onnx_folder import write_onnx

    dtype = dtype or torch.float32
    if dtype not in OF_ONNX:
        raise UsageError(f"--dtype is {CODES[dtype]}, and --format onnx takes {', '.join(CODES[d] for d in OF_ONNX)}.")
    with tensors_of(stored, dtype) as tensors:
        base = replace(stored, adapter=None)  # the adapter is merged
        if tensors.untied:
            raise UsageError(
                "the adapter changes one of two tied embeddings, which --format onnx keeps tied; take hf, and export that folder."
            )
        files = write_onnx(draft / "model.onnx", tensors, meta_model(base, dtype))
    files += convert.write_config(draft, stored.config, dtype, stored.generation)
    return [*files, *_tokenizer(stored, draft)]
