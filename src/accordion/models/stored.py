"""What SOURCE names on a command line: a checkpoint, the folder of a run, or a folder of transformers or of PEFT."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accordion.checkpoint.convert import check_model, sources_of
from accordion.checkpoint.format import DTYPES, MANIFEST, Manifest
from accordion.checkpoint.prune import newest
from accordion.checkpoint.reading import opened, read_manifest
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.checkpoint.untrusted_files import (
    HF_INDEX,
    HF_SINGLE,
    check_quantised,
    plain_names,
    read_folder,
)
from accordion.errors import CheckpointError, UsageError, nearest
from accordion.files import read_text
from accordion.models.language import brief, language_model
from accordion.weights.adapters import added_by_adapters
from accordion.weights.export import is_peft
from accordion.weights.pretrained import check_pretrained, names_of

CONFIG, GENERATION, TOKENIZER, RUN_FILE = "config.json", "generation_config.json", "tokenizer.json", "config.yaml"
TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json", "tokenizer.model", "vocab.json")
TAKES = "a checkpoint, the folder of a run of `accordion train`, or a folder of transformers or of PEFT"
SHOWN = 3  # tensors named in a message of one line
AUTO = "auto"  # all linear layers but the head
NAME = "default"  # of the adapter, as PEFT names it
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model as it lies on disk.

    `kind`: a "checkpoint" of ours, or a "folder" of transformers. `config`: what its config.json says. `tokenizer`: a folder of
    transformers, or a tokenizer.json; None where nobody knows one. `adapter`: the folder of PEFT whose base this is, or, where
    `lora` says of which kind it is, the checkpoint of a run that trained it. `generation`: its generation_config.json.
    """

    kind: Literal["checkpoint", "folder"]
    path: str
    config: Mapping[str, Any]
    tokenizer: str | None
    adapter: str | None = None
    lora: Mapping[str, Any] | None = None
    generation: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return self.adapter or self.path


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder in which `accordion train` keeps the tokenizers that it trained."""
    return Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or gettempdir(), ".cache"), "accordion")


def find_model(source: str, cache: Path | None = None, *, like: str | None = None) -> StoredModel:
    """Return the model that `source` names; nothing of its weights is read. Raises `UsageError` if there is none.

    `cache`: of `cache_folder`. `like`: a folder of transformers, whose
    config.json describes a checkpoint that does not say itself of what it is, or the base of an adapter.
    """
    kind, path = located(source)
    if kind == "checkpoint":
        return _of_checkpoint(path, cache, like)
    if kind == "folder":
        return _of_folder(Path(path))
    described = _described(Path(path), "SOURCE", ADAPTER)
    base = find_model(_base_folder(path, "an adapter", like or described.get("base_model_name_or_path")), cache)
    return replace(base, tokenizer=path if has_tokenizer(Path(path)) else base.tokenizer, adapter=path)


def located(source: str) -> tuple[Literal["checkpoint", "folder", "adapter"], str]:
    """What `source` names, and where it lies: of a run or a folder of checkpoints the newest one. Raises `UsageError`."""
    path = Path(source)
    if "://" in source or (path / MANIFEST).is_file():
        return "checkpoint", source
    if not path.is_dir():
        raise UsageError(f"SOURCE {source!r} {_absent(path)}")
    if (path / ADAPTER).is_file():
        return "adapter", source
    if (path / CONFIG).is_file():
        return "folder", source
    try:
        found = newest(_checkpoints_of_run(path))
    except (CheckpointError, OSError) as error:
        raise UsageError(f"SOURCE {source!r}: {error}") from None
    if found.path is None:
        why = f": {found.words()}" if found.passed_over else f"; give {TAKES}."
        raise UsageError(f"SOURCE {source!r} holds no model: no {CONFIG}, no {ADAPTER} and no good checkpoint{why}")
    return "checkpoint", found.path


def _absent(path: Path) -> str:
    """What is wrong with a path that is no folder, and which one beside it may be meant."""
    if path.exists():
        return f"is a file; give {TAKES}."
    above = path.absolute().parent
    near = [p.name for p in above.iterdir() if p.is_dir() and not p.name.startswith(".")] if above.is_dir() else []
    close = get_close_matches(path.name, near, n=1, cutoff=0.5)
    return f"does not exist; give {TAKES}." + (f" Did you mean {str(path.with_name(close[0]))!r}?" if close else "")


def _checkpoints_of_run(path: Path) -> Path:
    """The folder of a run's checkpoints; that itself is no run."""
    inside = path / "checkpoints"
    if not (path / RUN_FILE).is_file():
        return inside if inside.is_dir() else path
    import yaml  # type: ignore[import-untyped]

    try:
        found = yaml.safe_load(read_text(path / RUN_FILE))
        own = found["checkpoint"]["dir"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        own = None
    return Path(own) if isinstance(own, str) and Path(own).is_dir() else inside


def _of_checkpoint(path: str, cache: Path | None, like: str | None) -> StoredModel:
    extra = extra_of(path)
    if isinstance(lora := extra.get("adapter"), dict):  # what a run trained beside a base, which it names
        named = _base_folder(path, "a checkpoint of an adapter", like or lora.get("base"))
        base = _of_folder(Path(named))
        tokenizer = _tokenizer_of_checkpoint(Path(path), extra, cache, named) or base.tokenizer
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
    tokenizer = _tokenizer_of_checkpoint(Path(path), extra, cache, like)
    generation = extra.get("generation_config") if like is None else generation_config(Path(like))
    return StoredModel(kind="checkpoint", path=path, config=config, tokenizer=tokenizer, generation=generation)


def _tokenizer_of_checkpoint(path: Path, extra: Mapping[str, Any], cache: Path | None, like: str | None) -> str | None:
    """Beside the checkpoint or in its run, in the folder that the model came from, or in the cache of `accordion train`."""
    settings = extra.get("config")
    origin = settings.get("model.path") if isinstance(settings, dict) else None
    folders = [path, path.parent, path.parent.parent, *(Path(p) for p in (like, origin) if isinstance(p, str))]
    found = next(filter(has_tokenizer, folders), None)
    if found is not None or cache is None or not isinstance(extra.get("tokenizer"), str):
        return None if found is None else str(found)
    kept = cache / "tokenizers" / extra["tokenizer"]
    return str(kept) if (kept / TOKENIZER).is_file() else None


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
        found = json.loads(read_text(folder / name))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{option} {str(folder)!r}: its {name} cannot be read: {why}.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{option} {str(folder)!r}: its {name} is no JSON object.")
    return found


def generation_config(folder: Path) -> dict[str, Any] | None:
    """Return what generation_config.json of a folder of transformers says, None if it has none. Raises `UsageError`."""
    return _described(folder, "folder", GENERATION) if (folder / GENERATION).is_file() else None


def has_tokenizer(folder: Path) -> bool:
    """Return if a folder holds a tokenizer of transformers."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


# -- what transformers makes of it


def configuration_of(stored: StoredModel) -> Any:
    """The configuration of transformers. Raises `UsageError` where it knows no such model."""
    from transformers import AutoConfig

    words = {key: value for key, value in stored.config.items() if key != "model_type"}
    try:
        if stored.kind == "folder":
            return AutoConfig.from_pretrained(stored.path, local_files_only=True)
        return AutoConfig.for_model(stored.config["model_type"], **words)
    except Exception as error:  # transformers checks its configurations with errors of many kinds
        raise UsageError(f"SOURCE {stored.path!r} is of no model that transformers knows: {brief(error)}") from None


def tokenizer_of(stored: StoredModel) -> Any:
    """The tokenizer of transformers. Raises `UsageError` where there is none, or it cannot be read."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if stored.tokenizer is None:
        raise UsageError(
            f"SOURCE {str(stored)!r} has no tokenizer beside it, and the cache of `accordion train` has none of it; put a "
            "tokenizer.json beside it."
        )
    path = Path(stored.tokenizer)
    alone = path if path.is_file() else path / TOKENIZER
    try:
        if path.is_file() or (not (path / "tokenizer_config.json").is_file() and alone.is_file()):
            return PreTrainedTokenizerFast(tokenizer_file=str(alone), clean_up_tokenization_spaces=False)
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # of the library, which raises plain Exception
        raise UsageError(f"{str(path)!r} holds no tokenizer that can be read: {brief(error)}") from None


def special_ids(tokenizer: Any) -> set[int]:
    """Return the tokens that are no text: those with a name in transformers, and those marked so in tokenizer.json."""
    marked = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the special token that a chat template puts behind an answer; None if there is none, or no template."""
    talk = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    try:
        closing = tokenizer.apply_chat_template(talk, tokenize=False).rpartition("answer")[2]
    except Exception:  # a template is a program of its own, and may want other messages
        return None
    special = special_ids(tokenizer)
    return next((n for n in tokenizer(closing, add_special_tokens=False)["input_ids"] if n in special), None)


def ends_of(*eos: int | list[int] | None) -> list[int]:
    """Return the tokens of some `eos_token_id`s of transformers, each once."""
    listed = [ends if isinstance(ends, list) else [ends] for ends in eos]
    return list(dict.fromkeys(end for ends in listed for end in ends if end is not None))


def meta_model(stored: StoredModel, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The causal language model on the meta device, in eval mode, with its adapters. Raises `UsageError` where it is none."""
    model = language_model(configuration_of(stored), repr(stored.path), dtype=dtype).eval()
    if stored.adapter is None:
        return model
    check_peft()
    from peft import get_peft_model

    try:
        with torch.device("meta"):
            adapted: nn.Module = get_peft_model(model, adapter_config(stored.adapter, stored.lora, stored.path))
        return adapted.eval()
    except Exception as error:  # what a wrong adapter_config.json breaks is anywhere in PEFT
        raise UsageError(f"SOURCE {stored.adapter!r} is no adapter of {stored.path!r}: {brief(error)}") from None


# -- adapters of PEFT


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


# -- what is stored


def dtype_of(stored: StoredModel) -> torch.dtype:
    """The floating-point dtype of most of the stored weights."""
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
        return read_manifest(checkpoint_at(path))
    except (CheckpointError, OSError) as error:
        raise UsageError(f"SOURCE {path!r}: {error}") from None


def extra_of(path: str) -> Mapping[str, Any]:
    """Return the `extra` of a checkpoint, empty if it is no dict. Raises `UsageError` if it cannot be read."""
    extra = manifest_at(path).extra
    return extra if isinstance(extra, dict) else {}


def computing(model: nn.Module) -> Any:
    """The model of transformers itself, with the layers of its adapters inside, where PEFT has one around it."""
    return model.get_base_model() if is_peft(model) else model  # type: ignore[operator]


def check_weights(model: nn.Module, stored: StoredModel) -> None:
    """Hold names and shapes of what is stored against a model on meta. Raises `UsageError` or `CheckpointError`."""
    if stored.kind == "folder":
        check_pretrained(model, Path(stored.path))
        return
    manifest = manifest_at(stored.path)
    shapes = {n.removeprefix("model/"): e.shape for n, e in manifest.tensors.items() if n.startswith("model/")}
    held = {name: shapes[key] for key, name in plain_names(shapes).items()}
    added = added_by_adapters(model)
    own = {name: tuple(value.shape) for name, value in names_of(model).items() if id(value) not in added}
    wrong = [f"{n} is {held[n]} there and {shape} here" for n, shape in own.items() if held.get(n, shape) != shape]
    wrong += [f"{n} is not in it" for n in own if n not in held and f"model/{n}" not in manifest.aliases]
    wrong += [f"{n} is not in the model" for n in held if n not in own]
    if wrong:
        more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise UsageError(f"SOURCE {stored.path!r} is of another model: {'; '.join(wrong[:SHOWN])}{more}.")
