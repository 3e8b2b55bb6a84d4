"""Programs of accelerate, transformers and TRL that configure FSDP2 train, save and resume on this engine as on torch's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accordion.compat import fsdp2
from accordion.engine.hooks import engine_of
from tests.integrations.jobs import (
    TRAINING,
    bytes_held,
    fsdp_job,
    full,
    library_job,
    llama,
    needs,
    on_first_rank,
    sentences,
)
from tests.integrations.test_trl import tokenizer
from tests.support.ranked import on_job
from tests.support.sample import sampled

pytestmark = [needs("accelerate", "transformers"), pytest.mark.cpu("two ranks on it are taken for accelerators")]
SIDES = (False, True)  # torch's engine, and this one
SLOW_TRL = [needs("trl", "peft"), pytest.mark.slow]

PLUGINS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "full": {"state_dict_type": "FULL_STATE_DICT", "activation_checkpointing": True},
    "efficient loading": {"cpu_ram_efficient_loading": True},
    "tied": {"state_dict_type": "FULL_STATE_DICT", "cpu_ram_efficient_loading": True},
}


@contextmanager
def engine(ours: bool) -> Iterator[None]:
    """Context manager in which torch's `fully_shard` is torch's own or ours."""
    with fsdp_job(), fsdp2.install() if ours else nullcontext():
        yield


def accelerated(kind: str, ours: bool, folder: Path, resume: bool = False) -> dict[str, Any]:
    """Run six steps with accumulation and clipping, with a state saved after three; or three steps from that state."""
    import accelerate

    with engine(ours):
        wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
        options = {"cpu_ram_efficient_loading": False, "reshard_after_forward": True, **wrapped, **PLUGINS[kind]}
        plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, **options)
        one = accelerate.Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)
        assert one.is_fsdp2
        # The first rank's values are those of all.
        seed = one.process_index if options["cpu_ram_efficient_loading"] else 0
        model = llama(seed, tie_word_embeddings=kind == "tied")
        size = bytes_held(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        data = torch.utils.data.DataLoader(sentences(48), batch_size=2)
        model, optimizer, data, schedule = one.prepare(model, optimizer, data, schedule)
        if resume:
            one.load_state(str(folder))
            data = one.skip_first_batches(data, 6)
        losses, norms = [], []
        for batch in data:
            with one.accumulate(model):
                loss = model(**batch).loss
                one.backward(loss)
                if one.sync_gradients:
                    norms.append(float(one.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(float(one.gather_for_metrics(loss.detach()).mean()))
            if len(losses) == 6 and not resume:
                one.save_state(str(folder))
        assert (engine_of(model) is not None) is ours
        assert bytes_held(model) < 0.6 * size
        state = {name: tensor.clone() for name, tensor in one.get_state_dict(model).items()}
        return {"losses": losses, "norms": norms, "state": state}


def alike(theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    for key in theirs.keys() - {"state"}:
        assert mine[key] == pytest.approx(theirs[key], rel=1e-5), key
    torch.testing.assert_close(mine["state"], theirs["state"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", sampled(PLUGINS, lambda kind: kind == "sharded"))
@on_job(2)
def test_accelerate(mesh: Any, kind: str, tmp_path: Path) -> None:
    theirs, mine = (accelerated(kind, ours, tmp_path / str(ours)) for ours in SIDES)
    assert len(theirs["norms"]) == 6
    alike(theirs, mine)
    rest = accelerated(kind, False, tmp_path / "False", resume=True)
    assert len(rest["norms"]) == 3
    for folder_of in ("True", "False"):  # what this engine saved, and what torch's did
        alike(rest, accelerated(kind, True, tmp_path / folder_of, resume=True))


ARGUMENTS = {**TRAINING, "max_steps": 6, "max_grad_norm": 0.5, "bf16": False}
ARGUMENTS |= {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
FSDP = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_ram_efficient_loading": False}
ASKED: dict[str, dict[str, Any]] = {
    "sharded": {"fsdp": "full_shard", "fsdp_config": {**FSDP, "state_dict_type": "SHARDED_STATE_DICT"}},
    "full": {"fsdp": "full_shard auto_wrap", "fsdp_config": {**FSDP, "state_dict_type": "FULL_STATE_DICT"}},
}
TRL = ("sft", "lora")


def trained(trainer: Any, resume: str | None = None) -> dict[str, Any]:
    trainer.train(resume_from_checkpoint=resume)
    logged = trainer.state.log_history
    names = {"losses": "loss", "norms": "grad_norm", "evaluated": "eval_loss"}
    found: dict[str, Any] = {key: [line[name] for line in logged if name in line] for key, name in names.items()}
    return {**found, "state": trainer.accelerator.get_state_dict(trainer.model)}


def trainer_of(kind: str, folder: Path) -> Any:
    import transformers

    asked = json.loads(json.dumps(ASKED["sharded" if kind in TRL else kind]))  # it is changed
    options = {"output_dir": str(folder), **ARGUMENTS, **asked}
    if kind not in TRL:
        data = {"train_dataset": sentences(48), "eval_dataset": sentences(8, seed=2)}
        return transformers.Trainer(model=llama(), args=transformers.TrainingArguments(**options), **data)
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    lines = Dataset.from_dict({"input_ids": [line["input_ids"].tolist() for line in sentences(48)]})
    data = {"train_dataset": lines, "eval_dataset": lines.select(range(8)), "processing_class": tokenizer()}
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if kind == "lora" else None
    args = trl.SFTConfig(**options, dataset_kwargs={"skip_prepare_dataset": True})
    return trl.SFTTrainer(model=llama(), args=args, peft_config=lora, **data)


def run(kind: str, ours: bool, folder: Path, resume: str | None = None) -> dict[str, Any]:
    with engine(ours):
        trainer = trainer_of(kind, folder)
        found = trained(trainer, resume)
        assert (engine_of(trainer.model) is not None) is ours
        return found


TRAINERS = [*sampled(ASKED, lambda kind: kind == "full"), *(pytest.param(kind, marks=SLOW_TRL) for kind in TRL)]


@pytest.mark.parametrize("kind", TRAINERS)
@on_job(2)
def test_trainers(mesh: Any, tmp_path: Path, kind: str) -> None:
    """The Trainer of transformers, and the SFTTrainer of TRL with full models and LoRA."""
    # torch 2.11's own gathers nothing for the step after an evaluation, since TRL reads the head and does not call it.
    sides = SIDES[1:] if kind == "sft" and torch.__version__ < "2.13" else SIDES
    wholes = [run(kind, ours, tmp_path / str(ours)) for ours in sides]
    assert len(wholes[-1]["losses"]) == 6
    alike(wholes[0], wholes[-1])
    rests = [run(kind, ours, tmp_path / str(ours), str(tmp_path / str(ours) / "checkpoint-3")) for ours in sides]
    assert len(rests[-1]["losses"]) == 6, "those before are read from the checkpoint"
    alike(rests[0], rests[-1])


def sharded_at_load(ours: bool, source: Path, folder: Path) -> dict[str, Any]:
    """transformers shards while it loads, also on CPU ranks. Its Trainer saves such a model but cannot resume it."""
    import transformers
    from transformers.distributed import DistributedConfig

    with library_job(), fsdp2.install() if ours else nullcontext():
        asked = DistributedConfig(fsdp_size=2)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, distributed_config=asked)
        args = transformers.TrainingArguments(output_dir=str(folder), save_only_model=True, **ARGUMENTS)
        data, tests = sentences(48), sentences(8, seed=2)
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data, eval_dataset=tests)
        found = trained(trainer)
        assert (engine_of(model) is not None) is ours
        whole = full(model) if ours else None
        model.save_pretrained(folder / "parts", distributed_checkpoint=True)
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / "parts", distributed_config=asked)
        if ours:
            again(input_ids=torch.arange(4)[None])
            torch.testing.assert_close(full(again), whole, rtol=0, atol=0)
        dist.barrier()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint-6")
        return {**found, "state": dict(loaded.state_dict())}


def loads_sharded(mesh: Any, folder: Path) -> None:
    on_first_rank(llama().save_pretrained, folder / "source")
    theirs, mine = (sharded_at_load(ours, folder / "source", folder / str(ours)) for ours in SIDES)
    assert len(theirs["losses"]) == 6
    alike(theirs, mine)


@pytest.mark.slow
def test_transformers_distributed_config(ranks, tmp_path):
    if not hasattr(pytest.importorskip("transformers.distributed").DistributedConfig, "fsdp_size"):
        pytest.skip("this transformers has no fsdp_size")
    ranks(2).run(2, loads_sharded, tmp_path)
