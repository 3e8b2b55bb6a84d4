"""`accordion export`: other libraries load the result with the logits of the source, and one tensor is in memory."""

from __future__ import annotations

import errno
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accordion import cli
from accordion.checkpoint import save
from accordion.checkpoint.convert import TensorSource
from accordion.errors import UsageError
from accordion.export.onnx_folder import computed_buffers
from tests.checkpoint.failing import failing
from tests.support import language_folders
from tests.support.processes import run_python
from tests.support.refused import refused

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [0, 0, 0, 271, 8, 2, 8, 1]])  # (b, tokens)
MASK = torch.tensor([[1] * 8, [0, 0, 0, 1, 1, 1, 1, 1]])
REAL = MASK.bool()
LAYERS = ["q_proj", "v_proj", "down_proj"]  # of an adapter


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", params=["untied", "tied"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return language_folders.llama(tmp_path_factory.mktemp("llama"), tied=request.param == "tied")


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=IDS, attention_mask=MASK).logits
    return logits[REAL]


def of_folder(folder: Path, **how: Any) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return logits_of(AutoModelForCausalLM.from_pretrained(folder, **how))


def of_onnx(file: Path) -> torch.Tensor:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(file))
    outputs = session.run(None, {"input_ids": IDS.numpy(), "attention_mask": MASK.numpy()})
    return torch.from_numpy(outputs[0])[REAL]


def of_safetensors(file: Path, like: Path) -> torch.Tensor:
    from safetensors.torch import load_model
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(like))
    load_model(model, str(file))
    return logits_of(model)


def exported(*words: object) -> int:
    if any(str(word).endswith("onnx") for word in words):
        pytest.importorskip("onnxscript")
    return cli.main(["export", *map(str, words)])


def checkpoint_of(folder: Path, at: Path) -> Path:
    """Write a checkpoint of the same weights, with its configuration."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    labels = {0: "no", 1: "yes"}  # keys that JSON cannot hold as they are
    save(at, model, extra={"model_config": {**model.config.to_dict(), "id2label": labels}})
    return at


@pytest.fixture(params=["folder", "checkpoint"])
def source(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return folder if request.param == "folder" else checkpoint_of(folder, tmp_path / "checkpoint")


def test_a_folder_for_transformers_has_the_logits_and_the_tokenizer(source, folder, tmp_path):
    from transformers import AutoTokenizer

    if source != folder:  # of a checkpoint the tokenizer is beside it
        language_folders.tokenizer().save_pretrained(source)
    assert exported(source, "out") == 0
    assert torch.equal(of_folder(tmp_path / "out"), of_folder(folder))
    words, own = (AutoTokenizer.from_pretrained(at) for at in ("out", folder))
    assert words("def add(a, b)")["input_ids"] == own("def add(a, b)")["input_ids"]
    assert words.chat_template == own.chat_template
    assert exported(source, "half", "--dtype", "BF16") == 0
    again = of_folder(tmp_path / "half")
    assert again.dtype == torch.bfloat16
    assert torch.equal(again, of_folder(folder, dtype=torch.bfloat16))


def test_one_file_of_safetensors_has_the_logits(source, folder, tmp_path):
    assert exported(source, "out.safetensors", "--format", "safetensors") == 0
    assert torch.equal(of_safetensors(tmp_path / "out.safetensors", folder), of_folder(folder))


@pytest.mark.slow  # torch draws a graph for seconds; below, one of a checkpoint of another model
def test_onnxruntime_has_the_logits(source, folder, tmp_path):
    assert exported(source, "out", "--format", "onnx") == 0
    assert torch.allclose(of_onnx(tmp_path / "out" / "model.onnx"), of_folder(folder), rtol=1e-4, atol=1e-4)


def adapted(base: Path, folder: Path, **how: Any) -> Any:
    """Write an adapter with random weights of the model in `base` into `folder`; return the adapted model of PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(8)
    config = LoraConfig(r=2, lora_alpha=4, task_type="CAUSAL_LM", init_lora_weights=False, **how)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad or "modules_to_save" in name:
                param.add_(torch.randn_like(param) * 0.05)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return model


def test_an_adapter_is_merged(folder, tmp_path):
    wanted = logits_of(adapted(folder, tmp_path / "adapter", target_modules=LAYERS).merge_and_unload())
    assert exported("adapter", "out") == 0
    assert torch.equal(of_folder(tmp_path / "out"), wanted)
    assert not torch.allclose(wanted, of_folder(folder))
    assert exported("adapter", "one.safetensors", "--format", "safetensors") == 0
    assert torch.equal(of_safetensors(tmp_path / "one.safetensors", folder), wanted)


@pytest.mark.slow
def test_an_adapter_is_merged_into_a_graph(tmp_path):
    wanted = logits_of(adapted(language_folders.llama(tmp_path / "base"), tmp_path / "adapter", target_modules=LAYERS))
    assert exported("adapter", "out", "--format", "onnx") == 0
    assert torch.allclose(of_onnx(tmp_path / "out" / "model.onnx"), wanted, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_of_another_model_becomes_a_graph(tmp_path):
    folder = language_folders.gpt2(tmp_path / "gpt2")
    assert exported(checkpoint_of(folder, tmp_path / "checkpoint"), "out", "--format", "onnx") == 0
    assert torch.allclose(of_onnx(tmp_path / "out" / "model.onnx"), of_folder(folder), rtol=1e-4, atol=1e-4)


def test_several_files_have_an_index(tmp_path, monkeypatch):
    folder = language_folders.llama(tmp_path / "llama")
    monkeypatch.setattr("accordion.checkpoint.convert.SHARD_BYTES", 60_000)
    assert exported(folder, "out") == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert torch.equal(of_folder(tmp_path / "out"), of_folder(folder))
    assert exported("out", "again", "--dtype", "F16") == 0
    assert torch.equal(of_folder(tmp_path / "again"), of_folder(folder, dtype=torch.float16))


ADAPTERS = {  # options of LoraConfig
    "head": {"target_modules": ["lm_head"]},
    "copy of the head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "single tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2, 3]},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_heads_and_tokens_are_merged(kind, tmp_path, capsys):
    """An adapter of one of two tied tensors unties them."""
    tied = kind != "single tokens"
    folder = language_folders.llama(tmp_path / "base", tied=tied)
    wanted = logits_of(adapted(folder, tmp_path / "adapter", **ADAPTERS[kind]))
    assert exported("adapter", "out") == 0
    assert torch.allclose(of_folder(tmp_path / "out"), wanted, atol=1e-4)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    if tied:
        refused(capsys, ["export", "adapter", "graph", "--format", "onnx"], "keeps tied")


def add_weight(folder: Path, name: str, tensor: torch.Tensor) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({**load_file(file), name: tensor}, file, metadata={"format": "pt"})


def test_tied_tensors_that_differ_are_not_dropped(tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    folder = language_folders.llama(tmp_path / "llama", tied=True)
    wanted = of_folder(folder)
    embedding = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight.detach()
    add_weight(folder, "lm_head.weight", embedding)  # under both names, as other trainers do
    assert exported(folder, "same.safetensors") == 0
    assert torch.equal(of_safetensors(tmp_path / "same.safetensors", folder), wanted)
    add_weight(folder, "lm_head.weight", embedding + 1.0)
    differ = "ties lm_head.weight and model.embed_tokens.weight, and they differ"
    refused(capsys, ["export", str(folder), "other.safetensors"], differ)
    assert exported(folder, "out") == 0  # all of it, as it is
    assert torch.equal(of_folder(tmp_path / "out"), of_folder(folder))


def test_end_tokens_and_sampling_settings_are_exported(tmp_path):
    folder = language_folders.llama(tmp_path / "llama")
    words = {"eos_token_id": [5, 0], "do_sample": True, "temperature": 0.7}
    (folder / "generation_config.json").write_text(json.dumps(words))
    extra = {"model_config": json.loads((folder / "config.json").read_text()), "generation_config": words}
    save(tmp_path / "checkpoint", torch.nn.Linear(2, 2), extra=extra)
    for source in (folder, "checkpoint"):
        assert exported(source, f"{source}-out") == 0
        assert json.loads(Path(f"{source}-out", "generation_config.json").read_text()) == words


def test_a_checkpoint_must_fit_the_folder_of_like(tmp_path, capsys):
    """Prefixes of compiled and wrapped models are removed from names; other names mean another model."""
    from transformers import AutoModelForCausalLM

    folder = language_folders.llama(tmp_path / "llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    wrapped = torch.nn.Module()
    wrapped.module = model
    save(tmp_path / "wrapped", wrapped)
    assert exported("wrapped", "out", "--like", folder) == 0
    assert torch.equal(of_folder(tmp_path / "out"), of_folder(folder))
    save(tmp_path / "part", model.model)
    refused(capsys, ["export", "part", "other", "--like", str(folder)], "is of another model")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("by", ["config", "names"])
def test_quantised_weights_are_refused(by, tmp_path, capsys):
    folder = language_folders.llama(tmp_path / "llama")
    if by == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    else:
        add_weight(folder, "model.layers.0.mlp.up_proj.weight_scale_inv", torch.ones(1, 1))
    train = "train --model.path llama --model.init pretrained --run.dir run"
    for words in ("export llama out", "checkpoint convert llama ck", train, "generate llama --prompt a"):
        refused(capsys, words.split(), "is quantised")
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


# -- memory

# What each export grows by, one after the other in a process that has their imports: the kernel sets its mark of the largest
# resident set back. Not in processes that are forked for it, into which pages of libraries come anew.
GROWS = """
import gc, json, os, re, sys
from accordion import cli
def held(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
folder, small, jobs = json.loads(sys.argv[1])
os.chdir(folder)
for format in dict.fromkeys(format for format, *_ in jobs):
    assert cli.main(["export", small, f"small-{format}", "--format", format]) == 0
for format, kind, source in jobs:
    gc.collect()
    before = held("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    assert cli.main(["export", source, f"{kind}-{format}", "--format", format]) == 0
    print(json.dumps([format, kind, held("VmHWM") - before]))
"""
MIB = 2**20
SLACK = 24 * MIB
USUAL = [("safetensors", "checkpoint")]  # needs no transformers, which take longer to import than all else
OTHERS = [("hf", "folder"), ("hf", "checkpoint"), ("safetensors", "folder"), ("onnx", "folder"), ("onnx", "checkpoint")]
LARGEST, TOTAL = 24576 * 512 * 4, 150 * MIB  # bytes of the largest tensor, and of all of them at least


def wide(folder: Path, layers: int, width: int, between: int, vocab: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=between, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.cpu("memory of the host, whatever the device")
@pytest.mark.parametrize("kinds", [USUAL, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["usual", "others"])
def test_memory_holds_one_tensor(kinds: list[tuple[str, str]], tmp_path: Path) -> None:
    """The peak of memory grows by the largest tensor and a small constant, for models with two layers of 29 MiB and two tensors
    of 48 MiB."""
    small, large = wide(tmp_path / "small", 1, 16, 32, 64), wide(tmp_path / "large", 2, 512, 4352, 24576)
    assert sum(file.stat().st_size for file in large.glob("*.safetensors")) > TOTAL > 2 * (LARGEST + SLACK)
    sources = {"folder": large, "checkpoint": checkpoint_of(large, tmp_path / "checkpoint")}
    small = small if kinds == OTHERS else checkpoint_of(small, tmp_path / "small-checkpoint")
    jobs = [(format, kind, str(sources[kind])) for format, kind in kinds if format != "onnx" or find_spec("onnxscript")]
    words = json.dumps([str(tmp_path), str(small), jobs])
    done = run_python("-c", GROWS, words, timeout_s=240, MALLOC_MMAP_THRESHOLD_="131072")
    assert done.returncode == 0, done.stderr[-2000:]
    growths = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(growths) == len(jobs)
    for format, kind, num_bytes in growths:
        assert num_bytes > LARGEST / 2, f"nothing was measured for {format} of a {kind}"
        assert num_bytes <= LARGEST + SLACK, f"{format} of a {kind}: {num_bytes / MIB:.0f} MiB"


# -- what goes wrong


def test_nothing_is_half_written(tmp_path, capsys):
    folder = language_folders.llama(tmp_path / "llama")
    before = sorted(os.listdir(tmp_path))

    for target in ("out", "out.safetensors"):
        with failing(TensorSource, "pieces", errno.ENOSPC):
            assert exported(folder, target) == 1
        assert "No space left on device" in capsys.readouterr().err
        assert sorted(os.listdir(tmp_path)) == before
    checkpoint = checkpoint_of(folder, tmp_path / "checkpoint")
    with open(next(checkpoint.glob("*.safetensors")), "r+b") as file:
        file.seek(-4000, os.SEEK_END)
        file.write(b"\xff\x00\xff")
    for words in ([], ["--format", "safetensors"], ["--format", "onnx"]):
        capsys.readouterr()
        assert exported(checkpoint, "out", *words) == 1
        assert "is damaged" in capsys.readouterr().err
        assert sorted(os.listdir(tmp_path)) == sorted([*before, "checkpoint"])


WRONG = {
    "llama llama": "exists; pass another path",
    "llama out --format dcp": "takes a checkpoint, and SOURCE",
    "llama out --dtype I8": "no floating-point dtype",
    "llama out --dtype int4": "invalid choice",
    "llama out --like": "expected one argument",
    "llama s3://bucket/out": "is a URL",
    "llama file/out": "cannot be created",
    "nowhere out": "does not exist",
    "other out --format onnx": "--like a folder",
    "llama out.onnx": "names a file that --format hf does not write",
    "lost out": "which is no folder here; export it with --like",
}


@pytest.mark.parametrize("words", WRONG)
def test_bad_input_is_one_line_and_writes_nothing(words, tmp_path, capsys):
    if "onnx" in words.split():
        pytest.importorskip("onnxscript")
    language_folders.llama(tmp_path / "llama")
    (tmp_path / "file").write_text("x")
    save(tmp_path / "other", torch.nn.Linear(2, 2))
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/model"}')
    before = sorted(os.listdir(tmp_path))
    refused(capsys, ["export", *words.split()], WRONG[words])
    assert sorted(os.listdir(tmp_path)) == before
    assert exported("other", "out", "--format", "safetensors", "--like", "nowhere") == 0  # which needs no configuration


def test_a_missing_package_is_named(capsys, monkeypatch):
    monkeypatch.setattr("accordion.errors.find_spec", lambda name: None if name == "onnxscript" else object())
    missing = "needs onnxscript, not installed here; pip install 'accordion-fsdp[export]'"
    refused(capsys, ["export", "x", "y", "--format", "onnx"], missing)


class Tables(nn.Module):
    """A module with two buffers in no file, one of which `_init_weights` computes; `mask` is False in places."""

    def __init__(self, *, is_computed: bool) -> None:
        super().__init__()
        self.is_computed = is_computed
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril(), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        if self.is_computed:
            module.mask = torch.ones(3, 3, dtype=torch.bool).tril()


def test_buffers_in_no_file_are_computed_by_the_model_or_refused() -> None:
    assert torch.equal(computed_buffers(Tables(is_computed=True))["mask"], Tables(is_computed=False).mask)
    with pytest.raises(UsageError, match="computes the buffers mask of SOURCE"):
        computed_buffers(Tables(is_computed=False))
