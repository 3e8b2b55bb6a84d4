"""`accordion export`: what the tools of others load has the logits of the source, and memory holds one tensor of it."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from accordion import cli
from accordion.checkpoint import save
from tests.support import language_folders
from tests.support.sample import sampled

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [0, 0, 0, 271, 8, 2, 8, 1]])  # (b, tokens)
MASK = torch.tensor([[1] * 8, [0, 0, 0, 1, 1, 1, 1, 1]])
REAL = MASK.bool()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", params=["untied", "tied"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return language_folders.llama(tmp_path_factory.mktemp("llama"), tied=request.param == "tied")


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS, attention_mask=MASK).logits
    return found[REAL]


def of_folder(folder: Path, **how: Any) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return logits_of(AutoModelForCausalLM.from_pretrained(folder, **how))


def of_onnx(folder: Path) -> torch.Tensor:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(folder / "model.onnx"))
    made = session.run(None, {"input_ids": IDS.numpy(), "attention_mask": MASK.numpy()})
    return torch.from_numpy(made[0])[REAL]


def of_gguf(file: Path) -> torch.Tensor:
    pytest.importorskip("gguf")
    return of_folder(file.parent, gguf_file=file.name, dtype=torch.float32)


def of_safetensors(file: Path, like: Path) -> torch.Tensor:
    from safetensors.torch import load_model
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(like))
    load_model(model, str(file))
    return logits_of(model)


def exported(*words: object) -> int:
    if "onnx" in words:
        pytest.importorskip("onnxscript")
    if "gguf" in words:
        pytest.importorskip("gguf")
    return cli.main(["export", *map(str, words)])


def checkpoint_of(folder: Path, at: Path) -> Path:
    """A checkpoint of the same weights, which says of what it is."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    save(at, model, extra={"model_config": json.loads(model.config.to_json_string(use_diff=False))})
    return at


@pytest.fixture(params=["folder", "checkpoint"])
def source(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return folder if request.param == "folder" else checkpoint_of(folder, tmp_path / "checkpoint")


def test_a_folder_for_transformers_has_the_logits_and_the_tokenizer(source, folder, tmp_path):
    from transformers import AutoTokenizer

    assert exported(source, "out", "--tokenizer", folder) == 0
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


@pytest.mark.parametrize(
    ("folder", "source"),
    sampled(  # torch draws a graph for seconds; below, one of a folder of another model
        itertools.product(("untied", "tied"), ("folder", "checkpoint")),
        lambda *row: row == ("tied", "checkpoint"),
    ),
    indirect=True,
)
def test_onnxruntime_has_the_logits(source, folder, tmp_path):
    assert exported(source, "out", "--format", "onnx") == 0
    assert torch.allclose(of_onnx(tmp_path / "out"), of_folder(folder), rtol=1e-4, atol=1e-4)


def test_gguf_has_the_logits_and_the_tokenizer(source, folder, tmp_path):
    assert exported(source, "out.gguf", "--format", "gguf", "--tokenizer", folder) == 0
    assert torch.equal(of_gguf(tmp_path / "out.gguf"), of_folder(folder))
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    held = GGUFReader(tmp_path / "out.gguf").fields
    words = AutoTokenizer.from_pretrained(folder)
    tokens = held["tokenizer.ggml.tokens"].contents()
    assert tokens == [words.convert_ids_to_tokens(i) for i in range(len(words))]
    assert held["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert held["tokenizer.ggml.eos_token_id"].contents() == 0


def test_an_adapter_is_merged(folder, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter = language_folders.lora(folder, tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter).merge_and_unload()
    wanted = logits_of(adapted)
    assert exported(adapter, "out") == 0
    assert torch.equal(of_folder(tmp_path / "out"), wanted)
    assert not torch.allclose(wanted, of_folder(folder))
    assert exported(adapter, "one.safetensors", "--format", "safetensors") == 0
    assert torch.equal(of_safetensors(tmp_path / "one.safetensors", folder), wanted)


@pytest.mark.parametrize("format", [pytest.param("onnx", marks=pytest.mark.slow), "gguf"])
def test_an_adapter_is_merged_into_foreign_formats(format, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = language_folders.llama(tmp_path / "base")
    adapter = language_folders.lora(folder, tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter).merge_and_unload()
    assert exported(adapter, "out", "--format", format) == 0
    found = of_onnx(tmp_path / "out") if format == "onnx" else of_gguf(tmp_path / "out")
    assert torch.allclose(found, logits_of(adapted), rtol=1e-4, atol=1e-4)


def test_a_gpt2_goes_to_onnx_and_not_to_gguf(tmp_path, capsys):
    folder = language_folders.gpt2(tmp_path / "gpt2")
    assert exported(folder, "out", "--format", "onnx") == 0
    assert torch.allclose(of_onnx(tmp_path / "out"), of_folder(folder), rtol=1e-4, atol=1e-4)
    capsys.readouterr()
    assert exported(folder, "out.gguf", "--format", "gguf") == cli.BAD_INPUT
    assert "takes models of type llama" in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()


def test_several_files_have_an_index(tmp_path, monkeypatch):
    folder = language_folders.llama(tmp_path / "llama")
    monkeypatch.setattr("accordion.checkpoint.convert.SHARD_BYTES", 60_000)
    assert exported(folder, "out") == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert torch.equal(of_folder(tmp_path / "out"), of_folder(folder))
    assert exported("out", "again", "--dtype", "F16") == 0
    assert torch.equal(of_folder(tmp_path / "again"), of_folder(folder, dtype=torch.float16))


# -- memory

# What each export grows by, one after the other in a process that has their imports: the kernel sets its mark of the largest
# resident set back. Not in processes that are forked for it, into which pages of libraries come anew.
GROWS = """
import gc, json, re, sys
from accordion import cli
def held(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
small, jobs = json.loads(sys.argv[1])
for format in dict.fromkeys(format for format, *_ in jobs):
    assert cli.main(["export", small, f"small.{format}", "--format", format]) == 0
for format, kind, source in jobs:
    gc.collect()
    before = held("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    assert cli.main(["export", source, f"{kind}.{format}", "--format", format]) == 0
    print(json.dumps([format, kind, held("VmHWM") - before]))
"""
MIB = 2**20
SLACK = 24 * MIB
KINDS = [(format, kind) for format in ("hf", "safetensors", "gguf", "onnx") for kind in ("folder", "checkpoint")]
SHOWN = {("hf", "folder"), ("safetensors", "checkpoint"), ("gguf", "checkpoint")}
LARGEST, TOTAL = 24576 * 512 * 4, 150 * MIB  # bytes of the largest tensor, and of all of them at least


def wide(folder: Path, layers: int, width: int, between: int, vocab: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=between, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[tuple[str, str], int]]:
    """Bytes by which the resident set grows, by format and kind of the source, of those in `SHOWN` or of the others."""
    return functools.cache(lambda shown: growth_of([k for k in KINDS if (k in SHOWN) == shown], tmp_path_factory))


def growth_of(kinds: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], int]:
    """Of models with two layers of 29 MiB and two tensors of 48."""
    at = tmp_path_factory.mktemp("memory")
    small, large = wide(at / "small", 1, 16, 32, 64), wide(at / "large", 2, 512, 4352, 24576)
    assert sum(file.stat().st_size for file in large.glob("*.safetensors")) > TOTAL > 2 * (LARGEST + SLACK)
    sources = {"folder": large, "checkpoint": checkpoint_of(large, at / "checkpoint")}
    there = {"onnx": find_spec("onnxscript"), "gguf": find_spec("gguf")}
    jobs = [(format, kind, str(sources[kind])) for format, kind in kinds if there.get(format, True)]
    done = subprocess.run(
        [sys.executable, "-c", GROWS, json.dumps([str(small), jobs])],
        cwd=at,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": "131072"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {(format, kind): num_bytes for format, kind, num_bytes in lines}


@pytest.mark.cpu("memory of the host, whatever the device")
@pytest.mark.parametrize(("format", "kind"), sampled(KINDS, lambda *kind: kind in SHOWN))
def test_memory_holds_one_tensor(grown: Callable[[bool], dict[tuple[str, str], int]], format: str, kind: str) -> None:
    """The peak grows by the largest tensor alone, and a little."""
    if format in ("onnx", "gguf"):
        pytest.importorskip("onnxscript" if format == "onnx" else "gguf")
    found = grown((format, kind) in SHOWN)[format, kind]
    assert found > LARGEST / 2, "nothing was measured"
    assert found <= LARGEST + SLACK, f"{found / MIB:.0f} MiB for a largest tensor of {LARGEST / MIB:.0f}"


# -- what goes wrong


def test_nothing_is_half_written(tmp_path, monkeypatch, capsys):
    folder = language_folders.llama(tmp_path / "llama")
    before = sorted(os.listdir(tmp_path))

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    for target, words in (("out", []), ("out.safetensors", ["--format", "safetensors"])):
        with monkeypatch.context() as patch:
            patch.setattr("accordion.checkpoint.streamed.write_data", full)
            assert exported(folder, target, *words) == 1
        assert "No space left on device" in capsys.readouterr().err
        assert sorted(os.listdir(tmp_path)) == before
    checkpoint = checkpoint_of(folder, tmp_path / "checkpoint")
    with open(next(checkpoint.glob("*.safetensors")), "r+b") as file:
        file.seek(-4000, os.SEEK_END)
        file.write(b"\xff\x00\xff")
    for words in ([], ["--format", "safetensors"], ["--format", "gguf"], ["--format", "onnx"]):
        capsys.readouterr()
        assert exported(checkpoint, "out", *words) == 1
        assert "is damaged" in capsys.readouterr().err
        assert sorted(os.listdir(tmp_path)) == sorted([*before, "checkpoint"])


WRONG = {
    "llama llama": "exists; pass another path",
    "llama out --format tar": "invalid choice",
    "llama out --format dcp": "takes a checkpoint, and SOURCE",
    "llama out --dtype I8": "no floating-point dtype",
    "llama out --dtype int4": "invalid choice",
    "llama out --tokenizer nowhere": "is neither a tokenizer.json",
    "llama out --like": "is given no value",
    "llama s3://bucket/out": "is a URL",
    "llama file/out": "cannot be made",
    "nowhere out": "does not exist",
    "other out --format safetensors --like nowhere": "",
    "other out --format gguf": "give --like a folder",
    "lost out": "which is no folder here; give --like",
}


@pytest.mark.parametrize("words", WRONG)
def test_bad_input_is_one_line_and_writes_nothing(words, tmp_path, capsys):
    if "gguf" in words:
        pytest.importorskip("gguf")
    language_folders.llama(tmp_path / "llama")
    (tmp_path / "file").write_text("x")
    save(tmp_path / "other", torch.nn.Linear(2, 2))
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/model"}')
    before = sorted(os.listdir(tmp_path))
    capsys.readouterr()
    code = cli.main(["export", *words.split()])
    said = capsys.readouterr().err
    if not WRONG[words]:
        assert code == 0
        return
    assert code == cli.BAD_INPUT
    assert said.startswith("accordion: ")
    assert said.count("\n") == 1
    assert WRONG[words] in said
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(("format", "package"), [("onnx", "onnxscript"), ("gguf", "gguf")])
def test_a_package_that_is_not_there_is_named(format, package, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("accordion.export.command.find_spec", lambda name: None if name == package else object())
    assert cli.main(["export", "x", "y", "--format", format]) == cli.BAD_INPUT
    assert f"needs {package}, not installed here; pip install 'accordion-fsdp[export]'" in capsys.readouterr().err
