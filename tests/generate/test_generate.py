"""`accordion generate` writes the text of transformers, token for token, on any number of ranks, full or by units."""

from __future__ import annotations

import json
import shlex
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, models

import accordion as acc
from accordion import cli
from accordion.checkpoint import save
from accordion.checkpoint.convert import export
from accordion.generate import ranks as ranks_of_generate
from accordion.generate.options import GenerateOptions
from accordion.generate.ranks import TextWriter
from accordion.models.stored import computing, find_model, meta_model, tokenizer_of
from accordion.train import launch
from tests.support import forked, language_folders
from tests.support.meters import Wire
from tests.support.refused import refused
from tests.support.sample import sampled

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
USUAL = {(2, "units", 1), (2, "full", 3)}
PROMPTS = ["the quick brown", "def add", "a line", "colourless green ideas sleep", "b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_folders.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "start", forked.start)
    monkeypatch.chdir(tmp_path)


def of_transformers(folder: Path, text: str, new: int, model: Any = None, **how: Any) -> tuple[str, int]:
    """Return the text that plain transformers generates after `text`, and its number of tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = AutoTokenizer.from_pretrained(folder)
    model = model or AutoModelForCausalLM.from_pretrained(folder)
    shown = words(text, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**shown, max_new_tokens=new, pad_token_id=0, **({"do_sample": False} | how))
    ids = output[0, shown["input_ids"].shape[1] :]
    return words.decode(ids, skip_special_tokens=True), len(ids)


def texts(answers: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return the text of each answer and its number of tokens, as `of_transformers` does."""
    return [(answer["text"], answer["tokens"]) for answer in answers]


def generated(capfd: pytest.CaptureFixture[str], source: Path, words: str) -> list[dict[str, Any]]:
    assert cli.main(["generate", str(source), *shlex.split(words), "--device", "cpu", "--json"]) == 0
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("num_ranks", "hold", "batch"),
    sampled([(2, "full", 3), *((n, hold, 1) for n in (2, 3) for hold in ("full", "units"))], lambda *row: row in USUAL),
)
def test_greedy_text_is_that_of_transformers(hold, num_ranks, batch, folder, tmp_path, capfd):
    """Five prompts over two or three ranks, uneven in number and in length; some end early."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    words = f"--prompts prompts.txt --nproc {num_ranks} --hold {hold} --batch {batch} --max-new-tokens 24"
    answers = generated(capfd, folder, words)
    assert [line["prompt"] for line in answers] == PROMPTS
    wanted = [of_transformers(folder, text, 24) for text in PROMPTS]
    assert texts(answers) == wanted
    assert len({text for text, _ in wanted}) == len(PROMPTS), "they say different things"


def test_ranks_without_prompts_and_with_long_ones_end_together(tmp_path, capfd):
    """Unit by unit over three ranks: one has no prompt, and one generates up to the model's last position."""
    folder = language_folders.gpt2(tmp_path / "gpt2")
    (tmp_path / "two.jsonl").write_text('{"prompt": "b"}\n\n{"prompt": "the quick brown fox jumps over"}\n')
    answers = generated(capfd, folder, "--prompts two.jsonl --nproc 3 --hold units --max-new-tokens 26")
    assert texts(answers) == [of_transformers(folder, text, 26) for text in ("b", "the quick brown fox jumps over")]


def test_sampling_depends_on_the_seed_and_not_on_the_number_of_ranks(folder, tmp_path, capfd):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    words = "--prompts prompts.txt --temperature 0.9 --top-p 0.95 --max-new-tokens 12"
    one = generated(capfd, folder, f"{words} --nproc 1 --seed 3")
    assert generated(capfd, folder, f"{words} --nproc 2 --seed 3 --hold units") == one
    torch.manual_seed(3)
    drawn = of_transformers(folder, PROMPTS[0], 12, do_sample=True, temperature=0.9, top_p=0.95, top_k=0)
    assert texts(one)[0] == drawn


@pytest.mark.parametrize(
    ("hold", "sources"),
    [pytest.param("full", (".", "checkpoints"), marks=pytest.mark.slow), ("units", ("checkpoints/step-000100",))],
    ids=["full", "units"],
)
def test_a_run_and_its_checkpoint_write_what_their_export_writes(hold, sources, tmp_path, capfd):
    run = language_folders.run(tmp_path / "run")
    tokenizer = (run / "tokenizer.json").rename(run / "checkpoints" / "tokenizer.json")
    export(run / "checkpoints" / "step-000100", tmp_path / "hf")
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_file=str(tokenizer)).save_pretrained(tmp_path / "hf")
    text, count = of_transformers(tmp_path / "hf", "a line", 9)
    for source in sources:
        answers = generated(capfd, run / source, f"--prompt 'a line' --nproc 2 --hold {hold} --max-new-tokens 9")
        assert answers == [{"prompt": "a line", "text": text, "tokens": count, "ended": False}]


@pytest.mark.parametrize("hold", [pytest.param("full", marks=pytest.mark.slow), "units"])
def test_an_adapter_writes_what_peft_writes(hold, folder, tmp_path, capfd):
    adapter = language_folders.lora(folder, tmp_path / "adapter")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter).eval()
    answers = generated(capfd, adapter, f"--prompt 'def add' --nproc 2 --hold {hold} --max-new-tokens 12")
    wanted = of_transformers(folder, "def add", 12, adapted)
    assert texts(answers) == [wanted]
    assert wanted != of_transformers(folder, "def add", 12)


def test_an_adapter_that_cannot_be_built_is_an_error_with_the_cause(folder, tmp_path, monkeypatch):
    import peft

    adapter = language_folders.lora(folder, tmp_path / "adapter")
    monkeypatch.setattr(peft, "get_peft_model", mock.Mock(side_effect=FutureWarning("it moved")))
    with pytest.raises(acc.UsageError, match="FutureWarning: it moved"):
        meta_model(find_model(str(adapter)))
    with pytest.raises(acc.UsageError, match="which is an adapter too"):
        find_model(str(adapter), like=str(adapter))


def test_a_chat_goes_through_the_template(folder, tmp_path, capfd):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "add"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n" + '{"prompt": "add"}\n')
    answers = generated(capfd, folder, "--prompts chats.jsonl --chat --max-new-tokens 8")
    shown = ["<system>be brief\n<user>add\n<assistant>", "<user>add\n<assistant>"]
    assert texts(answers) == [of_transformers(folder, text, 8) for text in shown]


def test_one_prompt_is_streamed_and_several_are_printed_with_their_prompts(folder, tmp_path, capfd):
    wanted = of_transformers(folder, "a line", 8)[0]
    assert cli.main(["generate", str(folder), "--prompt", "a line", "--max-new-tokens", "8", "--device", "cpu"]) == 0
    printed = capfd.readouterr()
    assert printed.out == f"{wanted}\n"
    assert "tokens/s; full parameters" in printed.err
    (tmp_path / "prompts.txt").write_text("a line\nb\n")
    words = ["generate", str(folder), "--prompts", "prompts.txt", "--max-new-tokens", "8", "--device", "cpu"]
    assert cli.main(words) == 0
    assert capfd.readouterr().out == f"> a line\n{wanted}\n\n> b\n{of_transformers(folder, 'b', 8)[0]}\n\n"


@pytest.mark.parametrize(("free", "how"), [(2**40, "full parameters"), (2**10, "unit by unit")])
def test_free_memory_decides_if_the_model_is_kept_full(free, how, folder, capfd, monkeypatch):
    """Free memory is read on each rank: here by the one rank in this process, which has the patched value."""
    monkeypatch.setattr(launch, "start", in_process)
    monkeypatch.setattr(ranks_of_generate, "free_bytes", lambda device, num_ranks: free)
    assert cli.main(["generate", str(folder), "--prompt", "b", "--max-new-tokens", "2", "--device", "cpu"]) == 0
    assert how in capfd.readouterr().err


def in_process(entry: launch.Entry, args: tuple[Any, ...], nproc: int) -> int:
    """Run one rank in this process."""
    assert nproc == 1
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = launch.RankPlace(rank=0, world=1, local_rank=0, local_world=1, starter="torchrun")
    entry(place, store, *args)
    return 0


def test_a_dtype_is_computed_in(folder, capfd):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    answers = generated(capfd, folder, "--prompt def --dtype bf16 --nproc 2 --max-new-tokens 12")
    assert texts(answers) == [of_transformers(folder, "def", 12, model)]


def test_full_parameters_write_with_the_operators_of_transformers(world, folder):
    """Under one lease no token needs a gather, and the operators are those of the plain model."""
    ours, theirs = world.run(1, operators_of_both, str(folder))[0]
    assert ours.total() <= 1.01 * theirs.total(), ours - theirs
    assert not [name for name in ours if "c10d" in name]


def operators_of_both(mesh: Any, folder: str) -> tuple[Counter[str], Counter[str]]:
    """Return the operators for a text of 100 tokens: with full parameters under one lease, and of the plain model."""
    from transformers import AutoModelForCausalLM

    stored = find_model(folder)
    model = computing(meta_model(stored, torch.float32))
    acc.shard(model, mesh, precision=ranks_of_generate.AS_STORED)
    acc.load_pretrained(model, folder)
    options = GenerateOptions(source=folder, prompt="a", max_new_tokens=100)
    writer = TextWriter(model, tokenizer_of(stored), stored, options, torch.device("cpu"))
    writer._settings.eos_token_id = None  # so that both write as much
    plain = AutoModelForCausalLM.from_pretrained(folder)
    plain.generation_config = writer._settings  # what it has of its own would be mixed in
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), acc.full_params(model):
        with Wire() as own:
            writer.write({0: tuple(ids[0].tolist())})
        with Wire() as others:
            plain.generate(ids, attention_mask=torch.ones_like(ids), generation_config=writer._settings)
    return own.seen, others.seen


WRONG = {
    "--prompt b --prompts x.txt": "both are given",
    "": "neither is given",
    "--prompts nowhere.txt": "cannot be read",
    "--prompts empty.txt": "holds no prompt",
    "--prompts latin.txt": "no text in UTF-8",
    "--prompts broken.jsonl": "line 1 of --prompts is no JSON",
    "--prompts other.jsonl": "no object with prompt",
    "--prompt b --max-new-tokens 0": "--max-new-tokens is 0; it must be between 1 and 2147483647",
    "--prompt b --max-new-tokens 128": "which with 128 new ones are 129, and the model has 128 positions",
    "--prompt b --temperature -1": "--temperature is -1.0",
    "--prompt b --top-p 0": "--top-p is 0",
    "--prompt b --nproc -1": "--nproc is -1",
    "--prompt b --hold half": "--hold 'half' is an invalid choice",
    "--prompt b --device quantum": "--device is 'quantum'",
    "--prompt=": "--prompt is empty",
}


@pytest.mark.parametrize("words", WRONG)
def test_bad_input_is_one_line_before_ranks_start(words, folder, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(launch, "start", None)
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "broken.jsonl").write_text("{\n")
    (tmp_path / "other.jsonl").write_text('{"text": "b"}\n')
    assert refused(capfd, ["generate", str(folder), *words.split()], WRONG[words]) == ""


def changed(folder: Path, name: str, *without: str, **files: str) -> None:
    """Write a copy of `folder` as the folder `name`, without files that match `without`, and with the JSON files `files`."""
    shutil.copytree(folder, name)
    for file in [file for pattern in without for file in Path(name).glob(pattern)]:
        file.unlink()
    for stem, content in files.items():
        Path(name, f"{stem}.json").write_text(content)


def test_a_source_without_a_model_is_refused(folder, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(launch, "start", None)
    config = json.loads((folder / "config.json").read_text())
    wide = Tokenizer(models.WordLevel({"[UNK]": 0, "b": 70000}, unk_token="[UNK]"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    changed(folder, "no-weights", "model.safetensors")
    changed(folder, "no-type", config="{}")
    changed(folder, "lost", "token*")
    changed(folder, "narrow", config=json.dumps(config | {"intermediate_size": 80}))
    changed(folder, "plain", "*token*", "chat_template.jinja", tokenizer=(folder / "tokenizer.json").read_text())
    changed(folder, "wide", "*token*", "chat_template.jinja", tokenizer=wide.to_str())
    save(tmp_path / "other", torch.nn.Linear(2, 2))
    for source, error in {
        "empty": "holds no model",
        "file": "is a file; give a checkpoint",
        "emty": "does not exist; give a checkpoint",
        "no-weights": "has no weights",
        "no-type": "names no model_type",
        "lost": "put a tokenizer.json next to it",
        "plain": "--chat needs the chat template",
        "wide": "put the tokenizer that belongs to the model next to its weights",
        "narrow": "(96, 64) in the folder and float32 (80, 64) in the model",
        "other": "export it with --like a folder",
    }.items():
        more = ["--chat"] if source == "plain" else []
        refused(capfd, ["generate", source, "--prompt", "b", *more], error)
