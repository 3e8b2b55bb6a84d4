"""TRL's trainers with the mixin `ShardedTrainer` train as TRL's own under DDP, with full models and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accordion.integrations.sharding import ShardArguments
from tests.integrations.jobs import (
    TRAINING,
    VOCABULARY,
    blocks_and_head,
    bytes_held,
    llama,
    needs,
    on_library_job,
    sentences,
)
from tests.integrations.test_trainer import alike, train
from tests.support.sample import sampled

pytestmark = needs("trl", "peft")

USUAL = {**TRAINING, "bf16": False, "max_steps": 4}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t2")


def text(tokens: Any) -> str:
    return " ".join(f"t{token}" for token in tokens)


def preferences() -> Any:
    from datasets import Dataset

    lines = [line["input_ids"].tolist() for line in sentences(32)]
    parts = {"prompt": slice(0, 4), "chosen": slice(4, 9), "rejected": slice(7, 12)}
    return Dataset.from_dict({name: [text(line[part]) for line in lines] for name, part in parts.items()})


def different_words(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each completion, the number of different words in it."""
    return [float(len(set(completion.split()))) for completion in completions]


def built(kind: str, ours: bool, adapters: bool, folder: Path, **changes: Any) -> Any:
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import LlamaForSequenceClassification

    from accordion.integrations.transformers import ShardedTrainer

    sizes = {"num_generations": 2, "max_completion_length": 6, "learning_rate": 1e-3, "beta": 0.1 if adapters else 0.0}
    theirs, config, own = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, {"dataset_kwargs": {"skip_prepare_dataset": True}}),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, {}),
        "reward": (trl.RewardTrainer, trl.RewardConfig, {}),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig, sizes),
    }[kind]
    args = config(output_dir=str(folder), **{**USUAL, **own, **changes})
    model = llama(hidden_size=16)
    if kind == "reward":
        model = LlamaForSequenceClassification(type(model.config)(**{**model.config.to_dict(), "num_labels": 1}))
        with torch.no_grad():
            for name, tensor in llama(hidden_size=16).model.state_dict().items():
                model.model.state_dict()[name].copy_(tensor)
            model.score.weight.fill_(0.1)
    data = preferences()
    if kind == "sft":
        data = Dataset.from_dict({"input_ids": [line["input_ids"].tolist() for line in sentences(32)]})
    if kind == "grpo":
        data = data.select_columns("prompt")
    task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task) if adapters else None
    trainer = type("Sharded", (ShardedTrainer, theirs), {}) if ours else theirs
    given = {"model": model, "args": args, "train_dataset": data, "processing_class": tokenizer(), "peft_config": lora}
    if kind == "dpo" and not adapters:
        given["ref_model"] = llama(hidden_size=16)
    if kind == "grpo":
        given["reward_funcs"] = different_words
    return trainer(**given)


@pytest.mark.parametrize(
    ("kind", "adapters"),
    sampled(
        [("sft", False), ("sft", True), ("dpo", False), ("dpo", True), ("reward", False), ("reward", True)],
        lambda kind, adapters: adapters and kind != "reward",
    ),
)
@on_library_job(2)
def test_trl_trains_as_under_ddp(mesh: Any, kind: str, adapters: bool, tmp_path: Path) -> None:
    theirs, ours = (train(built(kind, one, adapters, tmp_path)) for one in (False, True))
    alike(theirs, ours)
    assert bytes_held(ours.model) < 0.6 * bytes_held(theirs.model)
    if kind == "dpo" and not adapters:
        assert bytes_held(ours.ref_model) < 0.6 * bytes_held(theirs.ref_model)


@pytest.mark.parametrize(("loss", "adapters"), [("head_rows", False), ("chunked", True)])
@on_library_job(2)
def test_our_loss_replaces_that_of_trl(mesh: Any, tmp_path: Path, loss: str, adapters: bool) -> None:
    theirs, ours = (built("sft", one, adapters, tmp_path) for one in (False, True))
    ours.loss, ours._shard_arguments = loss, ShardArguments.of({"units": blocks_and_head})
    alike(train(theirs), train(ours))


@on_library_job(2)
def test_adapters_are_saved_alone_and_resume_exactly(mesh: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    whole = train(built("sft", True, True, tmp_path, save_strategy="steps", save_steps=2))
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "checkpoint-2" / "model.safetensors").exists()
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoint-2").rglob("*.safetensors"))
    assert size < sum(p.numel() for p in whole.model.parameters()) * 4, "the base is in no file"
    again = train(built("sft", True, True, tmp_path, save_strategy="steps", save_steps=2), True)
    assert again.state.global_step == 4
    again = train(built("sft", True, True, tmp_path), str(tmp_path / "checkpoint-2"))
    alike(whole, again, rel=0.0)
    loaded = PeftModel.from_pretrained(llama(hidden_size=16), tmp_path / "checkpoint-4")
    assert any("lora_B" in name and p.any() for name, p in loaded.named_parameters())


@pytest.mark.parametrize("adapters", [pytest.param(False, marks=pytest.mark.slow), True])
@on_library_job(2)
def test_grpo_generates_and_learns_as_under_ddp(mesh: Any, tmp_path: Path, adapters: bool) -> None:
    theirs, ours = (train(built("grpo", one, adapters, tmp_path)) for one in (False, True))
    alike(theirs, ours, "reward", "completions/mean_length", "loss", "grad_norm", rel=1e-4)
    assert bytes_held(ours.model) < 0.6 * bytes_held(theirs.model)
