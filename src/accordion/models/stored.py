"""Finds and reads the model that SOURCE names on a command line: a checkpoint, a run, or a folder of transformers or PEFT."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accordion.checkpoint.convert import check_model, sources_of
from accordion.checkpoint.format import DTYPES, MANIFEST, Manifest
from accordion.checkpoint.json_values import as_dict
from accordion.checkpoint.prune import newest
from accordion.checkpoint.reading import opened
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.checkpoint.untrusted_files import HF_INDEX, HF_SINGLE, check_quantised, plain_names, read_folder
from accordion.errors import CheckpointError, UsageError, check_installed, nearest, some_of
from accordion.files import read_text
from accordion.models.language import brief, language_model
from accordion.weights.adapters import added_by_adapters
from accordion.weights.export import is_peft
from accordion.weights.four_bits import quantize
from accordion.weights.pretrained import check_pretrained, names_of

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
RUN = "checkpoints"  # in the folder of a run
TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json", "tokenizer.model", "vocab.json")
TAKES = "a checkpoint, the folder of a run of `accordion train`, or a folder of transformers or of PEFT"
SHOWN = 3  # number of tensors that an error names
AUTO = "auto"  # LoRA targets: all linear layers but the head
NAME = "default"  # PEFT's name of the only adapter
PEFT = ("an adapter", ["peft"], "integrations")  # arguments of `check_installed`
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A description of a model on disk and, optionally, of an adapter for it. `find_model` sets all fields but `ema`."""

    kind: Literal["checkpoint", "folder"]  # a checkpoint of accordion, or a folder of transformers
    path: str
    config: Mapping[str, Any]  # contents of config.json
    tokenizer: str | None  # path of a folder of transformers or of a tokenizer.json, if one is known
    adapter: str | None = None  # folder of PEFT with an adapter of this base or, if `lora` is set, checkpoint of a run
    # r, alpha, dropout, targets of the adapter in that checkpoint, and how its base was quantised
    lora: Mapping[str, Any] | None = None
    generation: Mapping[str, Any] | None = None  # contents of generation_config.json
    ema: str | None = None  # decay of the average, in the checkpoint, that takes the place of the weights

    def __str__(self) -> str:
        return self.adapter or self.path


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the path of accordion's cache: the folder `accordion` in XDG_CACHE_HOME of `environ`, or else in ~/.cache (without
    HOME, in .cache of the folder for temporary files). Does not create it."""
    return Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or gettempdir(), ".cache"), "accordion")


def find_model(source: str, *, like: str | None = None) -> StoredModel:
    """Return a description of the model that `source` names: a checkpoint, a run's folder, or a folder of transformers or PEFT.
    Reads no weights. `like`: a folder of transformers. It is the base model if `source` is an adapter; its config files replace
    those in a checkpoint of a whole model; otherwise it is unused. Raises `UsageError` if no model is usable, or
    `CheckpointError` if a checkpoint's `extra`, the argument of `save`, cannot be read."""
    kind, path = located(source)
    if kind == "checkpoint":
        return _of_checkpoint(path, like)
    if kind == "folder":
        return _of_folder(Path(path))
    described = _described(Path(path), "SOURCE", ADAPTER)
    named = _base_folder(path, "an adapter", like or described.get("base_model_name_or_path"))
    if located(named)[0] == "adapter" or (base := find_model(named)).adapter:
        raise UsageError(f"SOURCE {source!r} adapts {named!r}, which is an adapter too; merge that: accordion export.")
    return replace(base, tokenizer=path if has_tokenizer(Path(path)) else base.tokenizer, adapter=path)


def located(source: str) -> tuple[Literal["checkpoint", "folder", "adapter"], str]:
    """Return (kind, path) of the model at `source`. Kinds: "checkpoint", "folder" (of transformers) and "adapter" (of PEFT). If
    `source` is a run's folder, or another folder of checkpoints, the path is that of the newest good checkpoint in it; else it
    is `source`. Any URL counts as a checkpoint, unread. Raises `UsageError` if there is no model."""
    path = Path(source)
    if "://" in source or (path / MANIFEST).is_file():
        return "checkpoint", source
    if not path.is_dir():
        raise UsageError(f"SOURCE {source!r} {'is a file' if path.exists() else 'does not exist'}; give {TAKES}.")
    if (path / ADAPTER).is_file():
        return "adapter", source
    if (path / CONFIG).is_file():
        return "folder", source
    try:
        result = newest(path / RUN if (path / RUN).is_dir() else path)
    except (CheckpointError, OSError) as error:
        raise UsageError(f"SOURCE {source!r}: {error}") from None
    if result.path is None:
        why = f": {result.words()}" if result.passed_over else f"; give {TAKES}."
        raise UsageError(f"SOURCE {source!r} holds no model: no {CONFIG}, no {ADAPTER} and no good checkpoint{why}")
    return "checkpoint", result.path


def _of_checkpoint(path: str, like: str | None) -> StoredModel:
    extra = extra_of(path)
    if isinstance(lora := extra.get("adapter"), dict):  # an adapter that a run trained, with the name of its base
        named = _base_folder(path, "a checkpoint of an adapter", like or lora.get("base"))
        base = _of_folder(Path(named))
        tokenizer = _tokenizer_of_checkpoint(Path(path), extra, named) or base.tokenizer
        generation = extra.get("generation_config", base.generation)
        ends = ends_of(base.config.get("eos_token_id"), (generation or {}).get("eos_token_id"))
        words = {**base.config, "eos_token_id": ends or None}
        return replace(base, config=words, tokenizer=tokenizer, adapter=path, lora=lora, generation=generation)
    config = extra.get("model_config") if like is None else _described(Path(like), "like")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(
            f"SOURCE {path!r} is a checkpoint that does not say of which model of transformers it is (model_config in its "
            f"extra); export it with --like a folder that has the {CONFIG} of that model."
        )
    tokenizer = _tokenizer_of_checkpoint(Path(path), extra, like)
    generation = extra.get("generation_config") if like is None else generation_config(Path(like))
    return StoredModel(kind="checkpoint", path=path, config=config, tokenizer=tokenizer, generation=generation)


def _tokenizer_of_checkpoint(path: Path, extra: Mapping[str, Any], like: str | None) -> str | None:
    """Return the folder of the tokenizer of the checkpoint `path`; None if there is none. It is the first folder with a tokenizer
    of: `path`, its two parent folders, `like`, and the folder of the model that the run started from, which `extra` names."""
    settings = extra.get("config")
    origin = settings.get("model.path") if isinstance(settings, dict) else None
    folders = [path, path.parent, path.parent.parent, *(Path(p) for p in (like, origin) if isinstance(p, str))]
    folder = next(filter(has_tokenizer, folders), None)
    return None if folder is None else str(folder)


def _base_folder(source: str, kind: str, named: object) -> str:
    if not isinstance(named, str) or not Path(named).is_dir():
        raise UsageError(
            f"SOURCE {source!r} is {kind} of the base {named!r}, which is no folder here; export it with --like the folder of "
            "the base."
        )
    return named


def _of_folder(path: Path) -> StoredModel:
    config = _described(path, "SOURCE")
    if not isinstance(config.get("model_type"), str):
        raise UsageError(f"SOURCE {str(path)!r} is no model: its {CONFIG} names no model_type.")
    if not any((path / name).is_file() for name in (HF_SINGLE, HF_INDEX)):
        raise UsageError(f"SOURCE {str(path)!r} has no weights: neither {HF_SINGLE} nor {HF_INDEX}.")
    check_quantised(config, f"SOURCE {str(path)!r}")
    return StoredModel(
        kind="folder",
        path=str(path),
        config=config,
        tokenizer=str(path) if has_tokenizer(path) else None,
        generation=generation_config(path),
    )


def _described(folder: Path, option: str, name: str = CONFIG) -> dict[str, Any]:
    try:
        content = json.loads(read_text(folder / name))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{option} {str(folder)!r}: its {name} cannot be read: {why}.") from None
    if not isinstance(content, dict):
        raise UsageError(f"{option} {str(folder)!r}: its {name} is no JSON object.")
    return content


def generation_config(folder: Path) -> dict[str, Any] | None:
    """Return the content of generation_config.json in `folder`, None without it. Raises `UsageError` if it is unreadable."""
    return _described(folder, "folder", GENERATION) if (folder / GENERATION).is_file() else None


def has_tokenizer(folder: Path) -> bool:
    """Return True if `folder` has one of the files in which transformers stores a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


# -- objects of transformers


def configuration_of(stored: StoredModel) -> Any:
    """Return transformers' configuration of a stored model. Raises `UsageError` if transformers does not know the model."""
    from transformers import AutoConfig

    try:
        if stored.kind == "folder":
            return AutoConfig.from_pretrained(stored.path, local_files_only=True)
        return AutoConfig.for_model(**stored.config)
    except Exception as error:  # transformers checks its configurations with errors of many kinds
        raise UsageError(f"SOURCE {stored.path!r} is of no model that transformers knows: {brief(error)}") from None


def tokenizer_of(stored: StoredModel) -> Any:
    """Return transformers' tokenizer of a stored model. Raises `UsageError` if there is none, or it cannot be read."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if stored.tokenizer is None:
        raise UsageError(f"SOURCE {str(stored)!r} has no tokenizer; put a tokenizer.json next to it.")
    path = Path(stored.tokenizer)
    alone = path if path.is_file() else path / TOKENIZER
    try:
        if path.is_file() or (not (path / "tokenizer_config.json").is_file() and alone.is_file()):
            return PreTrainedTokenizerFast(tokenizer_file=str(alone), clean_up_tokenization_spaces=False)
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise UsageError(f"{str(path)!r} holds no tokenizer that can be read: {brief(error)}") from None


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of tokens that are no text: `tokenizer.all_special_ids`, and those of added tokens marked as special."""
    marked = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the id of the first special token that the chat template puts after an answer; None if there is no such token, or if
    the template is missing or fails."""
    talk = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    try:
        closing = tokenizer.apply_chat_template(talk, tokenize=False).rpartition("answer")[2]
    except Exception:  # a chat template is code, which may require other messages
        return None
    special = special_ids(tokenizer)
    return next((n for n in tokenizer(closing, add_special_tokens=False)["input_ids"] if n in special), None)


def ends_of(*eos: int | list[int] | None) -> list[int]:
    """Return all token ids in several values of `eos_token_id` (an id, a list or None each) as one list without repeats."""
    listed = [ends if isinstance(ends, list) else [ends] for ends in eos]
    return list(dict.fromkeys(end for ends in listed for end in ends if end is not None))


def meta_model(stored: StoredModel, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model of `stored` on meta, in eval mode, with parameters of `dtype`. With an adapter it is a PEFT model, in
    which layers that were quantised in training have four bits, and the adapter is in float32 if `dtype` has 16 bits. Raises
    `UsageError` if transformers or PEFT cannot build the model, or if PEFT is needed and not installed."""
    model = language_model(configuration_of(stored), repr(stored.path), dtype=dtype).eval()
    if stored.adapter is None:
        return model
    check_installed(*PEFT)
    kind = (stored.lora or {}).get("quantize", "none")
    if kind != "none":
        quantize(model, kind)
    from peft import get_peft_model

    try:
        with torch.device("meta"):
            adapted: nn.Module = get_peft_model(model, adapter_config(stored.adapter, stored.lora, stored.path))
        return adapted.eval()
    except Exception as error:  # a wrong adapter_config.json can raise any error anywhere in PEFT
        what = f"PEFT cannot add adapter {stored.adapter!r} to {stored.path!r}"
        raise UsageError(f"{what}: {type(error).__name__}: {brief(error)}") from error


# -- adapters of PEFT


def lora_config(lora: Mapping[str, Any], base: str | None) -> Any:
    """Return PEFT's `LoraConfig` with the values of `lora`: `r`, `alpha`, `dropout` and `targets` (`AUTO`, or names of layers
    joined by commas). `base`: path of the base model to store in it, or None. Raises `UsageError` if PEFT is not installed."""
    check_installed(*PEFT)
    from peft import LoraConfig

    targets = lora["targets"]
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=int(lora["r"]),
        lora_alpha=lora["alpha"],
        lora_dropout=float(lora["dropout"]),
        target_modules="all-linear" if targets == AUTO else [name.strip() for name in targets.split(",")],
        base_model_name_or_path=base,
    )


def with_lora(model: nn.Module, lora: Mapping[str, Any], base: str | None) -> nn.Module:
    """Freeze `model`, which is on meta, add LoRA layers to it, and return it as a PEFT model in train mode. `lora`, `base`: as
    in `lora_config`. Raises `UsageError` if `model` lacks a layer in `lora["targets"]`, if a target cannot have an adapter, or
    if PEFT is not installed."""
    config = lora_config(lora, base)
    from peft import get_peft_model

    known = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if name and not list(m.children())})
    for name in lora["targets"].split(",") if lora["targets"] != AUTO else ():
        if name.strip() not in known:
            raise UsageError(
                f"adapter.targets names {name.strip()!r}, which is no layer of the model; {nearest(name.strip(), known)}"
            )
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's warnings about its own calls of transformers
            adapted: nn.Module = get_peft_model(model, config)
    except Exception as error:  # PEFT raises errors of many kinds for layers that it has no adapter for
        raise UsageError(f"adapter.targets {lora['targets']!r} cannot have adapters: {brief(error)}") from None
    adapted.peft_config[NAME].base_model_name_or_path = base  # type: ignore[index, union-attr]
    return adapted.train()


def adapter_config(path: str, lora: Mapping[str, Any] | None, base: str) -> Any:
    """Return PEFT's configuration of an adapter: the one in the folder `path` if `lora` is None, else `lora_config(lora, base)`.
    `base`: path of the base model. Raises `UsageError` if PEFT is not installed."""
    check_installed(*PEFT)
    from peft import PeftConfig

    return PeftConfig.from_pretrained(path) if lora is None else lora_config(lora, base)


def adapter_weights(stored: StoredModel) -> dict[str, Tensor]:
    """Read and return {PEFT's name: weight on the CPU} of the adapter of `stored`, which must have one, in a PEFT folder or in
    a checkpoint. Raises errors of many types if the files are damaged."""
    assert stored.adapter is not None
    if stored.lora is None:  # a folder of PEFT
        from peft import load_peft_weights

        weights: dict[str, Tensor] = load_peft_weights(stored.adapter, device="cpu")
        return weights
    with closing(opened(checkpoint_at(Path(stored.adapter)), stored.ema)) as files:
        check_model(files)
        return {source.name.replace(f".{NAME}.", "."): source.read() for source in sources_of(files)}


# -- weights and other contents


def dtype_of(stored: StoredModel) -> torch.dtype:
    """Return the floating-point dtype of most bytes of weights, or float32. Raises `UsageError` if they are unreadable."""
    sizes: Counter[torch.dtype] = Counter()
    if stored.kind == "checkpoint":
        for name, entry in manifest_at(stored.path).tensors.items():
            if name.startswith("model/"):
                sizes[DTYPES[entry.dtype]] += sum(entry.num_bytes(chunk.box) for chunk in entry.chunks)
    else:
        try:
            for _, tensor in read_folder(Path(stored.path)).values():
                sizes[DTYPES[tensor.dtype]] += tensor.end - tensor.at
        except (OSError, CheckpointError) as error:
            raise UsageError(f"SOURCE {stored.path!r}: {error}") from None
    return next((dtype for dtype, _ in sizes.most_common() if dtype.is_floating_point), torch.float32)


def manifest_at(path: str) -> Manifest:
    """Return the manifest of a checkpoint. Raises `UsageError` if it cannot be read."""
    try:
        return opened(checkpoint_at(path)).manifest
    except (CheckpointError, OSError) as error:
        raise UsageError(f"SOURCE {path!r}: {error}") from None


def extra_of(path: str) -> Mapping[str, Any]:
    """Return `extra`, the argument of `save`, from the manifest of the checkpoint `path`; {} if it is no dict. Raises
    `UsageError` if the manifest cannot be read, and `CheckpointError` if `extra` has an object of a kind unknown here."""
    return as_dict(manifest_at(path).extra)


def computing(model: nn.Module) -> Any:
    """Return the model inside of `model` if that is a PEFT model, with the adapter's layers in it; otherwise `model` itself."""
    return model.get_base_model() if is_peft(model) else model  # type: ignore[operator]


def check_weights(model: nn.Module, stored: StoredModel) -> None:
    """Raise `UsageError` or `CheckpointError` if names or shapes of weights in `stored` do not fit `model`. Ignores adapters."""
    if stored.kind == "folder":
        check_pretrained(model, Path(stored.path))
        return
    manifest = manifest_at(stored.path)
    shapes = {n.removeprefix("model/"): e.shape for n, e in manifest.tensors.items() if n.startswith("model/")}
    saved = {name: shapes[key] for key, name in plain_names(shapes).items()}
    added = added_by_adapters(model)
    wanted = {name: tuple(value.shape) for name, value in names_of(model).items() if id(value) not in added}
    wrong = [f"{n} is {saved[n]}, not {shape}" for n, shape in wanted.items() if saved.get(n, shape) != shape]
    wrong += [f"{n} is not in it" for n in wanted if n not in saved and f"model/{n}" not in manifest.aliases]
    wrong += [f"{n} is not in the model" for n in saved if n not in wanted]
    if wrong:
        raise UsageError(f"SOURCE {stored.path!r} is of another model: {some_of(wrong, SHOWN, '; ')}.")
