"""`integrations.transformers`: a sharded Trainer trains, evaluates, saves and resumes as the library's own under DDP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import accordion as acc
from accordion.engine.hooks import engine_of
from tests.integrations.jobs import (
    TRAINING,
    assert_held_once,
    blocks_and_head,
    bytes_held,
    full,
    library_job,
    llama,
    needs,
    on_first_rank,
    on_library_job,
    sentences,
    sizes_of_steps,
)
from tests.support.ranked import on_job
from tests.support.sample import sampled

pytestmark = needs("transformers", "accelerate")

STEPS = 6


def arguments(folder: Path, **changes: Any) -> Any:
    from transformers import TrainingArguments

    more = {"max_steps": STEPS, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    return TrainingArguments(output_dir=str(folder), **{**TRAINING, **more, **changes})


def trainer(
    ours: bool, folder: Path, model: Any = None, sharding: Any = None, extra: Any = None, **changes: Any
) -> Any:
    import transformers

    from accordion.integrations.transformers import Trainer

    given = {"model": model if model is not None else llama(), "args": arguments(folder, **changes)}
    given |= {"train_dataset": sentences(), "eval_dataset": sentences(20, seed=2), **(extra or {})}
    return Trainer(**given, sharding=sharding) if ours else transformers.Trainer(**given)


def train(one: Any, resume: Any = None) -> Any:
    """Train and return the trainer, with the same random numbers at the start for both kinds."""
    import transformers

    transformers.set_seed(0)
    one.train(resume_from_checkpoint=resume)
    return one


def history(done: Any, *keys: str) -> list[list[float]]:
    return [
        [float(line[key]) for line in done.state.log_history if key in line] for key in keys or ("loss", "grad_norm")
    ]


def alike(theirs: Any, ours: Any, *keys: str, rel: float = 1e-5) -> None:
    for a, b in zip(history(theirs, *keys), history(ours, *keys), strict=True):
        assert a
        assert b == pytest.approx(a, rel=rel, abs=rel), (a, b)


# -- it trains


CASES: dict[str, dict[str, Any]] = {
    "accumulation and clipping": {},
    "max_grad_norm 0, gradient checkpointing": {"max_grad_norm": 0.0, "gradient_checkpointing": True, "max_steps": 4},
    "grouped by length, label smoothing, NEFTune": {
        "train_sampling_strategy": "group_by_length",
        "label_smoothing_factor": 0.1,
        "neftune_noise_alpha": 5.0,
        "max_steps": 4,
    },
    "bf16 with autocast alone": {"bf16": True, "max_steps": 6},
}


@pytest.mark.parametrize("case", sampled(CASES, {"accumulation and clipping", "bf16 with autocast alone"}.__contains__))
@on_library_job(2)
def test_it_trains_as_under_ddp(mesh: Any, tmp_path: Path, case: str) -> None:
    changes, sharding = CASES[case], {"precision": acc.Precision()} if "bf16" in case else None
    with sizes_of_steps() as whole:
        theirs = train(trainer(False, tmp_path, **changes))
    with sizes_of_steps() as mine:
        ours = train(trainer(True, tmp_path, sharding=sharding, **changes))
    assert_held_once(mine, whole)
    alike(theirs, ours)
    assert len(history(ours)[0]) == changes.get("max_steps", STEPS)
    assert bytes_held(ours.model) < 0.6 * bytes_held(theirs.model)
    states = ours.optimizer.optimizer.state
    assert {p.to_local().shape for p in states} >= {s["exp_avg"].to_local().shape for s in states.values() if s}
    torch.testing.assert_close(full(ours.model), full(theirs.model), rtol=1e-4, atol=1e-4)


@on_library_job(2)
def test_low_precision_gathers_in_it_and_fp16_has_its_scaler(mesh: Any, tmp_path: Path) -> None:
    plain = train(trainer(False, tmp_path, max_steps=6))
    for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        ours = train(trainer(True, tmp_path, max_steps=6, **{kind: True}))
        alike(plain, ours, "loss", rel=2e-2)
        assert engine_of(ours.model).precision.params == dtype
        assert {p.dtype for p in ours.model.parameters()} == {torch.float32}
    assert ours.accelerator.scaler.get_scale() > 1.0
    grown = ours.accelerator.scaler
    ours.accelerator.scaler = ours.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # it overflows
    before = full(ours.model)
    ours.args.max_steps = 1
    train(ours)
    assert all(torch.equal(t, before[name]) for name, t in full(ours.model).items()), "the step was left out"
    assert ours.accelerator.scaler.get_scale() < 2.0**40 or grown is ours.accelerator.scaler


@on_library_job(2)
def test_an_optimizer_and_a_scheduler_of_the_callers(mesh: Any, tmp_path: Path) -> None:
    done = []
    for kind in (False, True):
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        done.append(train(trainer(kind, tmp_path, model, extra={"optimizers": (optimizer, scheduler)}, max_steps=4)))
    alike(*done)
    alike(*done, "learning_rate")


@on_library_job(2)
def test_auto_find_batch_size(mesh: Any, tmp_path: Path) -> None:
    from transformers import default_data_collator

    def collate(features: list[Any]) -> Any:
        if len(features) > 3:
            raise RuntimeError("CUDA out of memory.")
        return default_data_collator(features)

    changes = {"auto_find_batch_size": True, "per_device_train_batch_size": 4, "max_steps": 4}
    done = [train(trainer(kind, tmp_path, extra={"data_collator": collate}, **changes)) for kind in (False, True)]
    assert done[1]._train_batch_size == done[0]._train_batch_size == 3
    alike(*done)


# -- it evaluates


@on_library_job(2)
def test_it_evaluates_and_predicts_as_under_ddp(mesh: Any, tmp_path: Path) -> None:
    def metrics(found: Any) -> dict[str, float]:
        return {"right": float((found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]).mean())}

    changes = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    theirs, ours = (trainer(kind, tmp_path, extra={"compute_metrics": metrics}, **changes) for kind in (False, True))
    first = [one.evaluate() for one in (theirs, ours)]  # before any training
    assert first[1]["eval_loss"] == pytest.approx(first[0]["eval_loss"], rel=1e-5)
    assert engine_of(ours.model) is not None, "it was sharded for that"
    # The library's own, evaluated before, trains without DDP (accelerate 1.15: it takes the model for prepared).
    theirs = trainer(False, tmp_path, extra={"compute_metrics": metrics}, **changes)
    for one in (theirs, ours):
        one.state.log_history.clear()
        train(one)
    alike(theirs, ours, "loss", "grad_norm", "eval_loss", "eval_right")
    a, b = (one.predict(sentences(7, seed=3)) for one in (theirs, ours))
    assert b.predictions == pytest.approx(a.predictions, rel=1e-3, abs=1e-4)
    assert b.metrics["test_right"] == a.metrics["test_right"]


@on_library_job(2)
def test_it_predicts_with_generate_token_for_token(mesh: Any, tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from accordion.integrations.transformers import ShardedTrainer

    class Sharded(ShardedTrainer, Seq2SeqTrainer):
        pass

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    data = [{**line, "input_ids": line["input_ids"] % 32, "labels": line["input_ids"] % 31} for line in sentences(16)]
    found = []
    for kind in (Seq2SeqTrainer, Sharded):
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))
        own = {"max_steps": 3, "predict_with_generate": True, "generation_max_length": 9}
        args = Seq2SeqTrainingArguments(str(tmp_path), **TRAINING, **own)
        one = train(kind(model=model, args=args, train_dataset=data, eval_dataset=data))
        found.append(one.predict(data[:6]).predictions)
    assert (found[0] == found[1]).all()
    assert found[0].shape[1] > 2


# -- it saves and resumes

SAVING = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 1}


def resumable(folder: Path, global_batch: int = 12, extra: Any = None, **changes: Any) -> Any:
    """Return a trainer whose steps see the same sentences with any number of ranks."""
    per_rank = global_batch // torch.distributed.get_world_size()
    more = {"train_dataset": sentences(48), **(extra or {})}
    return trainer(True, folder, extra=more, per_device_train_batch_size=per_rank, **{**SAVING, **changes})


def saves(mesh: Any, folder: Path) -> list[list[float]]:
    from transformers import LlamaForCausalLM

    with library_job():
        done = train(resumable(folder))
        done.save_model(str(folder / "final"))
        again = LlamaForCausalLM.from_pretrained(folder / "final").state_dict()
        torch.testing.assert_close(dict(again), full(done.model), rtol=0, atol=0)
        assert (folder / "checkpoint-3" / "sharded" / "manifest.json").exists()
        assert (folder / "checkpoint-3" / "config.json").exists()
        assert not list(folder.glob(".full-*"))
        return history(done)


def resumes(mesh: Any, folder: Path, expected: list[list[float]], rel: float) -> None:
    with library_job():
        done = train(resumable(folder), str(folder / "checkpoint-3"))
        assert done.state.global_step == STEPS
        for found, wanted in zip(history(done), expected, strict=True):
            assert found[:3] == wanted[:3]
            assert found[3:] == (pytest.approx(wanted[3:], rel=rel) if rel else wanted[3:])


@pytest.mark.parametrize("count", sampled([1, 3], lambda count: count == 1))
def test_it_resumes_in_an_epoch_exactly_and_on_other_numbers_of_ranks(ranks, tmp_path, count):
    expected = ranks(2).run(2, saves, tmp_path)[0]
    ranks(2).run(2, resumes, tmp_path, expected, 0.0)
    ranks(count).run(count, resumes, tmp_path, expected, 1e-5)


@pytest.mark.parametrize("only_model", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_library_job(2)
def test_the_best_model_is_loaded_and_older_checkpoints_go(mesh: Any, tmp_path: Path, only_model: bool) -> None:
    from transformers import EarlyStoppingCallback

    changes = {**SAVING, "max_steps": 8, "save_steps": 2, "save_total_limit": 1, "save_only_model": only_model}
    changes |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    changes |= {"learning_rate": 0.3}  # it gets worse
    stops = {"callbacks": [EarlyStoppingCallback(early_stopping_patience=2)]}
    theirs, ours = (train(trainer(kind, tmp_path / str(kind), extra=stops, **changes)) for kind in (False, True))
    alike(theirs, ours, "eval_loss", rel=1e-4)
    assert ours.state.global_step == theirs.state.global_step
    assert ours.state.best_global_step == theirs.state.best_global_step < 8
    torch.testing.assert_close(full(ours.model), full(theirs.model), rtol=1e-4, atol=1e-4)
    torch.distributed.barrier()
    left = sorted(p.name for p in (tmp_path / "True").glob("checkpoint-*"))
    assert left == sorted(p.name for p in (tmp_path / "False").glob("checkpoint-*"))
    assert (tmp_path / "True" / left[0] / "sharded").exists() != only_model


class CutError(Exception):
    """Stands for a kill."""


CUTS = {"first": ("_save", "_save_optimizer_and_scheduler", "_save_scaler"), "last": ("_save_rng_state", "store_flos")}


@pytest.mark.parametrize("cuts", sampled(CUTS, lambda cuts: cuts == "last"))
@on_library_job(2)
def test_an_incomplete_checkpoint_is_never_resumed(mesh: Any, tmp_path: Path, cuts: str) -> None:
    """A save that is interrupted anywhere leaves the previous checkpoint as the one to resume."""
    from accordion.integrations import transformers as integration

    for place in CUTS[cuts]:
        here = tmp_path / place
        done = resumable(here, max_steps=4, save_steps=2)
        own: Callable[..., Any] = getattr(done, place)

        def ends(*args: Any, own: Any = own, done: Any = done, place: str = place, **kwargs: Any) -> Any:
            if done.state.global_step == 4 and place != "store_flos":
                own(*args, **kwargs)  # and then
                raise CutError
            return own(*args, **kwargs)

        setattr(done, place, ends)
        with nullcontext() if place == "store_flos" else pytest.raises((CutError, acc.AccordionError)):
            train(done)
        torch.distributed.barrier()
        if place == "store_flos":  # as if the disk had kept half of it
            on_first_rank((here / "checkpoint-4" / "trainer_state.json").write_text, '{"global')
        assert (here / "checkpoint-4").is_dir()
        with pytest.raises(acc.CheckpointError, match=r"checkpoint-4 cannot be resumed.*interrupted"):
            train(resumable(here, max_steps=4, save_steps=2), str(here / "checkpoint-4"))
        assert integration._newest(str(here)) == str(here / "checkpoint-2")
    again = train(resumable(here, max_steps=4, save_steps=2), True)
    assert again.state.global_step == 4
    assert integration._newest(str(here)) == str(here / "checkpoint-4")


# -- ranks that share each sequence


@on_library_job(4)
def test_ranks_that_share_sequences_take_the_same_steps(mesh: Any, tmp_path: Path) -> None:
    """As four ranks with whole sequences and as large a batch; from the second step on, also after a save on two x two."""
    once: dict[str, Any] = {"optim": "sgd", "max_steps": 4, "per_device_eval_batch_size": 2, "eval_strategy": "steps"}
    once |= {"eval_steps": 4}
    # The last batches of two data ranks have one real half. With labels everywhere, since the Trainer's weights of batches of
    # different numbers of labels depend on the number of data ranks.
    evaluated = {"eval_dataset": [{**row, "labels": row["input_ids"]} for row in sentences(22, seed=2)]}
    keys = ("loss", "grad_norm", "eval_loss")

    def one(size: int, per_rank: int, **more: Any) -> Any:
        extra = {**evaluated, "sequence": size, **({"loss": "chunked"} if size == 4 else {})}
        return trainer(True, tmp_path, extra=extra, per_device_train_batch_size=per_rank, **once, **more)

    whole = train(one(1, 1))
    parts = train(one(2, 2, save_strategy="steps", save_steps=2))
    assert parts.state.max_steps == 4
    assert len(history(whole)[0]) == 4
    alike(whole, parts, *keys)
    alike(whole, train(one(4, 4)), *keys)
    alike(whole, train(one(1, 1), str(tmp_path / "checkpoint-2")), *keys)
    by_rank = train(one(2, 2, average_tokens_across_devices=False))
    assert history(by_rank, "loss")[0] == pytest.approx(history(parts, "loss")[0], rel=0.05)
    with pytest.raises(acc.UsageError, match="sequence=2"):
        parts.predict(sentences(4))
    with pytest.raises(acc.UsageError, match="a sequence parallel model does not generate"):
        parts.model.generate(torch.ones(1, 4, dtype=torch.int64))
    for size, extra, words in (
        (3, {}, "sequence=3 does not divide the 4 ranks"),
        (2, {"compute_metrics": dict}, "compute_metrics needs whole sequences"),
    ):
        with pytest.raises(acc.UsageError, match=words):
            trainer(True, tmp_path, extra={**extra, "sequence": size})


# -- a model that fits no rank


@on_library_job(2)
def test_a_meta_model_is_loaded_when_it_is_sharded(mesh: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from accordion.integrations.transformers import from_pretrained

    base = tmp_path / "base"
    on_first_rank(llama(3).save_pretrained, base)
    theirs = train(trainer(False, tmp_path, AutoModelForCausalLM.from_pretrained(base), max_steps=4))
    model = from_pretrained(AutoModelForCausalLM, base)
    assert all(p.is_meta for p in model.parameters())
    ours = train(trainer(True, tmp_path, model, max_steps=4))
    alike(theirs, ours)
    with pytest.raises(acc.CheckpointError, match="no folder"):
        from_pretrained(AutoModelForCausalLM, tmp_path / "nowhere")


# -- what is refused


@on_library_job(2)
def test_unsupported_arguments_are_refused(mesh: Any, tmp_path: Path) -> None:
    for key, value, words in [
        ("bf16_full_eval", True, "bf16_full_eval=True of TrainingArguments is not supported"),
        ("torch_compile", True, "compile blocks"),
        ("fsdp", "full_shard", "leave --fsdp out"),
        ("deepspeed", "ds.json", "leave --deepspeed out"),
        ("parallelism_config", object(), "leave parallelism_config out"),
    ]:
        args = arguments(tmp_path)
        setattr(args, key, value)
        with pytest.raises(acc.UsageError, match=words):
            trainer(True, tmp_path, extra={"args": args})
    with pytest.raises(acc.UsageError, match="sharding takes no 'unit'; did you mean 'units'"):
        trainer(True, tmp_path, sharding={"unit": None})
    with pytest.raises(acc.UsageError, match="hyperparameter_search is not supported"):
        trainer(True, tmp_path).hyperparameter_search()
    with pytest.raises(acc.CheckpointError, match="has no complete checkpoint"):
        train(trainer(True, tmp_path), True)


class Hub:
    """Replacement of the hub that records what each upload would send."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, set[str], Any]] = []

    def create_repo(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=f"us/{name}")

    def upload_folder(self, folder_path: str, path_in_repo: str = "", run_as_future: bool = False, **_: Any) -> Any:
        from transformers import LlamaForCausalLM

        names = {p.relative_to(folder_path).parts[0] for p in Path(folder_path).rglob("*") if p.is_file()}
        weights = LlamaForCausalLM.from_pretrained(folder_path).state_dict()
        self.sent.append((path_in_repo, names, weights))
        return SimpleNamespace(done=lambda: True, result=lambda: None)


@on_job(2)
def test_a_pushed_model_loads(mesh: Any, tmp_path: Path) -> None:
    import transformers.trainer

    before, hub = transformers.trainer.hf_api, Hub()
    transformers.trainer.hf_api = lambda: hub
    changes = {"push_to_hub": True, "hub_strategy": "checkpoint", **SAVING, "save_steps": 2, "max_steps": 4}
    try:
        with library_job():
            one = train(trainer(True, tmp_path, **changes))
            one.push_to_hub()
            expected = full(one.model)
    finally:
        transformers.trainer.hf_api = before
    if mesh.get_local_rank():
        assert not hub.sent
        return
    assert [where for where, _, _ in hub.sent] == ["", "last-checkpoint", "", "last-checkpoint", ""]
    for where, names, _ in hub.sent:
        assert {"config.json", "model.safetensors", "training_args.bin"} <= names
        assert ("sharded" in names) == bool(where)
    torch.testing.assert_close(hub.sent[-1][2], expected, rtol=0, atol=0)


@pytest.mark.parametrize(("loss", "smoothing"), [("chunked", 0.0), ("head_rows", 0.1)])
@on_library_job(2)
def test_the_loss_without_logits_is_that_of_the_library(mesh: Any, tmp_path: Path, loss: str, smoothing: float) -> None:
    changes = {"max_steps": 4, "label_smoothing_factor": smoothing, "eval_strategy": "steps", "eval_steps": 2}
    theirs = train(trainer(False, tmp_path, **changes))
    ours = train(trainer(True, tmp_path, sharding={"units": blocks_and_head}, extra={"loss": loss}, **changes))
    alike(theirs, ours, "loss", "grad_norm", "eval_loss")
    with pytest.raises(acc.UsageError, match="pass 'library', 'chunked' or 'head_rows'"):
        trainer(True, tmp_path, extra={"loss": "rows"})
    with pytest.raises(acc.UsageError, match="another one was asked for"):
        trainer(True, tmp_path, extra={"loss": loss, "compute_loss_func": print})
