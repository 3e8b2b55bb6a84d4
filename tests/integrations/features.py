"""What of each library works and the test that says so; `python -m tests.integrations.features` writes the page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
BEGIN = "<!-- from here by `python -m tests.integrations.features` -->\n"


@dataclass(frozen=True, slots=True)
class Feature:
    """`state`: "works", "refused" or "not applicable". `test`: "file::function" of this folder; "" for what is none."""

    name: str
    state: str
    words: str
    test: str


def works(name: str, test: str, words: str = "") -> Feature:
    return Feature(name, "works", words, test)


def refused(name: str, test: str, words: str) -> Feature:
    return Feature(name, "refused", words, test)


def not_applicable(name: str, words: str) -> Feature:
    return Feature(name, "not applicable", words, "")


LIKE_DDP = "test_trainer::test_it_trains_as_under_ddp"
REFUSED = "test_trainer::test_what_cannot_be_meant_beside_it_is_refused"
PEFT = "test_peft::test_each_method_trains_as_unsharded_and_its_adapter_loads_elsewhere"
LOOP = "test_accelerate::test_a_loop_learns_as_under_ddp"
NOT_HERE = "test_accelerate::test_what_cannot_be_meant_is_refused"
SAVED_STATE = "test_accelerate::test_a_state_is_saved_whole_and_loads_on_any_number_of_ranks"
LIT = "test_lightning::test_it_trains_as_under_ddp"
LIT_CALLBACKS = "test_lightning::test_checkpoints_early_stopping_and_averages"
LIT_RESUME = "test_lightning::test_it_resumes_after_six_steps_on_one_two_and_three_ranks"
LIT_REFUSED = "test_lightning::test_what_cannot_be_meant_is_refused"
LIT_MANUAL = "test_lightning::test_manual_optimisation_with_several_optimizers"
FABRIC = "test_lightning::test_fabric_trains_as_under_ddp"
LOOPS = "test_plain_loops::test_a_loop_of_ones_own_learns_as_unsharded"
LOW = "test_trainer::test_low_precision_gathers_in_it_and_fp16_has_its_scaler"

BY_TRAINER = "test_fsdp2_configs::test_the_trainer"
BY_ACCELERATE = "test_fsdp2_configs::test_accelerate"
AT_LOAD = "test_fsdp2_configs::test_transformers_distributed_config"

FEATURES: dict[str, list[Feature]] = {
    "`accordion.integrations.transformers`: `Trainer`, `ShardedTrainer`": [
        works("accumulation, clipping, schedules", LIKE_DDP, "losses and norms of DDP to 1e-5 over 12 steps"),
        works("`max_grad_norm=0`", LIKE_DDP, "the norm is logged, nothing is clipped"),
        works("`gradient_checkpointing`", LIKE_DDP),
        works("label smoothing, NEFTune, `group_by_length`", LIKE_DDP),
        works("`bf16`", LOW, "parameters are gathered in bf16, autocast as always; `Precision()` gathers float32"),
        works("`fp16`", LOW, "with the scaler; on CPU ranks too, where the library computes in float32"),
        works("`optimizers=(optimizer, scheduler)`", "test_trainer::test_an_optimizer_and_a_scheduler_of_the_callers"),
        works(
            "`auto_find_batch_size`",
            "test_trainer::test_auto_find_batch_size",
            "if all ranks run out of memory together",
        ),
        works("`evaluate`, `predict`, `compute_metrics`", "test_trainer::test_it_evaluates_and_predicts_as_under_ddp"),
        works("`predict_with_generate`", "test_trainer::test_it_predicts_with_generate_token_for_token"),
        works(
            "resume",
            "test_trainer::test_it_resumes_in_an_epoch_exactly_and_on_other_numbers_of_ranks",
            "bit for bit; on another number of ranks the same losses to 1e-5",
        ),
        works(
            "a save that is cut short",
            "test_trainer::test_a_torn_checkpoint_is_never_resumed",
            "is never resumed; SIGKILL is a slow test",
        ),
        works(
            "`load_best_model_at_end`, `save_total_limit`, `save_only_model`, early stopping",
            "test_trainer::test_the_best_model_is_loaded_and_older_checkpoints_go",
        ),
        works(
            "a model that fits no rank",
            "test_trainer::test_a_model_begins_on_meta_and_is_filled_when_it_is_sharded",
            "`from_pretrained(AutoModelForCausalLM, folder)`",
        ),
        works(
            "`push_to_hub`",
            "test_trainer::test_what_is_pushed_to_the_hub_loads",
            "the first rank sends what `from_pretrained` loads",
        ),
        refused("`--fsdp`, `--deepspeed`, `parallelism_config`", REFUSED, "the model is sharded already"),
        refused(
            "`bf16_full_eval`, `fp16_full_eval`", REFUSED, "they cast the model; `bf16=True` evaluates in bf16 too"
        ),
        refused("`torch_compile`", REFUSED, "compile blocks: `for block in ...: block.compile()`"),
        refused("`hyperparameter_search`", REFUSED, "its trials begin on one rank alone"),
        not_applicable("`ddp_*`", "nothing is wrapped for data parallelism"),
    ],
    "TRL: `class SFT(ShardedTrainer, trl.SFTTrainer)`": [
        works(
            "SFT, DPO, reward; whole models and LoRA each",
            "test_trl::test_trl_trains_as_under_ddp",
            "DPO's reference is sharded too",
        ),
        works("GRPO without vLLM, whole models and LoRA", "test_trl::test_grpo_generates_and_learns_as_under_ddp"),
        works(
            "checkpoints of adapters", "test_trl::test_adapters_are_saved_alone_and_resume_exactly", "without the base"
        ),
    ],
    "`accordion.integrations.accelerate`: `Accelerator`": [
        works("`prepare`, in one call or several", LOOP, "optimizers made before follow to the shards"),
        works("`accumulate`, `backward`, `clip_grad_norm_`, `gather_for_metrics`", LOOP),
        works("`unwrap_model`, `get_state_dict`", LOOP, "full on the first rank, empty on the others"),
        works("`mixed_precision` bf16, fp16", "test_accelerate::test_mixed_precision"),
        works(
            "buffers, of batch norms say",
            "test_accelerate::test_ranks_evaluate_with_the_first_ones_buffers_as_under_ddp",
            "the first rank's before each forward, as under DDP (that of torch 2.11 fails if one backward has two "
            "forwards); so with the Trainer and Lightning too",
        ),
        works("several models and optimizers", "test_accelerate::test_several_models_and_optimizers"),
        works(
            "`save_state`, `load_state`, `save_model`", SAVED_STATE, "on any number of ranks; a torn state is refused"
        ),
        works(
            "resume",
            "test_accelerate::test_it_resumes_after_six_steps_on_one_two_and_three_ranks",
            "losses of the run that was not stopped to 1e-5, on any number of ranks",
        ),
        refused("`trigger_sync_in_backward`, `join_uneven_inputs`", NOT_HERE, "ranks make each step together"),
        refused("`dynamo_backend`", NOT_HERE, "compile blocks"),
        refused("Adafactor, also as `optim` of a Trainer", NOT_HERE, "it looks at whole matrices; take AdamW"),
        refused("`save_state` of one optimizer over several models", NOT_HERE, "make one for each"),
    ],
    "`accordion.integrations.lightning`: `AccordionStrategy`": [
        works("`fit`: accumulation, clipping by norm and by value, schedulers", LIT, "losses and norms of DDP to 1e-5"),
        works(
            "`validate`, `test`, `predict`",
            "test_lightning::test_it_validates_tests_and_predicts_as_under_ddp",
            "also before any `fit`",
        ),
        works(
            "`precision`: `bf16-mixed`, `16-mixed` with its scaler, `64-true`",
            "test_lightning::test_mixed_precision_gathers_in_it_and_fp16_has_its_scaler",
            "mixed gathers parameters in that dtype, autocast as always",
        ),
        works(
            "`configure_model` on meta",
            "test_lightning::test_configure_model_on_meta_begins_as_on_one_device",
            "reads the folder of its weights, or draws what one device would",
        ),
        works(
            "manual optimisation, several optimizers, `toggle_model`", LIT_MANUAL, "each module is sharded by itself"
        ),
        works(
            "`ModelCheckpoint`, full and sharded; resume",
            LIT_RESUME,
            "on any number of ranks; a full file is DDP's, both ways",
        ),
        works(
            "a folder whose save was cut short",
            "test_lightning::test_a_torn_folder_is_never_resumed",
            "is never resumed",
        ),
        works("`EarlyStopping`, `EMAWeightAveraging`", LIT_CALLBACKS, "the average is sharded too"),
        works("hybrid strategies", "test_lightning::test_a_hybrids_replicas_are_nodes", "replicas are nodes"),
        works(
            "`acc.shard` in `configure_model`, also with Lightning's `ModelParallelStrategy`",
            "test_lightning::test_what_configure_model_shards_is_left_as_it_is",
        ),
        works(
            "`pytorch_lightning`",
            "test_lightning::test_the_older_package_trains_too",
            "`accordion.integrations.pytorch_lightning`",
        ),
        not_applicable(
            "`load_from_checkpoint` of a sharded folder",
            'Lightning reads one file there; give the folder as `ckpt_path`, or save with `state_dict_type="full"`',
        ),
        refused(
            "`find_unused_parameters`, `ddp_comm_hook` and other options of DDP", LIT_REFUSED, "nothing is wrapped"
        ),
        refused(
            "manual optimisation of parameters of the LightningModule itself", LIT_MANUAL, "put them into a module"
        ),
    ],
    "`accordion.integrations.lightning`: `FabricStrategy`": [
        works("`setup`, `backward`, `no_backward_sync`, `clip_gradients`, `precision`, `init_module`", FABRIC),
        works(
            "`save`, `load`, `load_raw`, full and sharded",
            "test_lightning::test_fabric_saves_and_resumes_on_one_two_and_three_ranks",
            "on any number of ranks",
        ),
    ],
    "Programs that ask for FSDP2 themselves, unedited: `accordion run`, `accordion.compat.fsdp2.install()`": [
        works(
            "accelerate, `FullyShardedDataParallelPlugin(fsdp_version=2)`",
            BY_ACCELERATE,
            "losses and norms of torch's FSDP2 to 1e-5 over 12 steps",
        ),
        works(
            "`save_state`, `load_state`, sharded and full", BY_ACCELERATE, "also of a folder that torch's FSDP2 wrote"
        ),
        works("`cpu_ram_efficient_loading`, `activation_checkpointing`, tied weights", BY_ACCELERATE),
        works("Trainer, `--fsdp full_shard`, `fsdp_config`", BY_TRAINER, "evaluation, checkpoints, resumed"),
        works(
            "TRL's SFTTrainer, whole models and LoRA",
            "test_fsdp2_configs::test_trls_sft_trainer",
            "on torch 2.11 too, where FSDP2 itself fails after an evaluation",
        ),
        works(
            "transformers' `DistributedConfig(fsdp_size=)`",
            AT_LOAD,
            "`save_pretrained` and `distributed_checkpoint=True`; its Trainer resumes no such model",
        ),
        not_applicable("CPU ranks", "accelerate does without FSDP there; its tests let it take them for accelerators"),
    ],
    "Libraries of models, in a loop of one's own": [
        works(
            "GANs, loops of reinforcement learning", LOOPS, "`shard` of each model; losses of the unsharded run to 1e-4"
        ),
        works(
            "Fabric with its own `ModelParallelStrategy`, whose function calls `shard`",
            "test_plain_loops::test_fabrics_own_strategy_takes_a_plain_shard",
        ),
        works(
            "diffusers: UNets, transformers, `EMAModel`, `accordion.save_pretrained`",
            "test_model_libraries::test_diffusers",
            "losses of DDP to 1e-5; averages are sharded; of DiT the first block's `norm1.emb` is a unit of its own",
        ),
        works("timm: ViT, ResNet", "test_model_libraries::test_timm", "where torchvision's build is of the same torch"),
        works(
            "PyTorch Geometric", "test_model_libraries::test_pytorch_geometric", "graphs of other sizes on each rank"
        ),
    ],
    "PEFT": [
        works(
            "LoRA, DoRA, rsLoRA, IA3, VeRA, `modules_to_save`",
            PEFT,
            "parameters, gradients and states are 1/ranks, by whole rows",
        ),
        works("prompt and prefix tuning", PEFT, "`save_pretrained` gathers the whole model for them"),
        works("several adapters, `set_adapter`, `disable_adapter`", "test_peft::test_several_adapters"),
        works(
            "a quantised base",
            "test_peft::test_a_base_of_bytes_is_sharded",
            "uint8 parameters are sharded as bytes; with `checkpoint_activations` too",
        ),
        works(
            "a base that fits no rank",
            "test_peft::test_a_pretrained_base_is_loaded_and_adapters_begin_as_pefts",
            "meta, `get_peft_model`, `shard`, `load_pretrained(model, base_folder)`",
        ),
        works(
            '`save(only="trained")`, `load(only=)`, `full_state_dict(only=)`',
            "test_peft::test_what_is_trained_is_saved_and_gathered_alone",
        ),
        works(
            "`accordion.save_pretrained`",
            "test_peft::test_a_model_is_exported_one_tensor_at_a_time",
            "one tensor at a time",
        ),
        works(
            "`merge_adapter` inside `full_params(write=True)`",
            "test_peft::test_adapters_are_merged_in_place_and_not_taken_out",
        ),
        refused(
            "`merge_and_unload`, `unload`",
            "test_peft::test_adapters_are_merged_in_place_and_not_taken_out",
            "they take parts of a sharded model out of it; merge in place, or what `from_pretrained` gives",
        ),
        refused(
            "`model.save_pretrained`",
            "test_peft::test_a_model_is_exported_one_tensor_at_a_time",
            "`accordion.save_pretrained(model, folder)` on every rank",
        ),
    ],
}


def tables() -> str:
    lines = []
    for title, features in FEATURES.items():
        lines += [f"\n## {title}\n", "| feature | | | test |", "|---|---|---|---|"]
        for one in features:
            file, _, name = one.test.partition("::")
            shown = f"`{file}.py` `{name}`" if one.test else ""
            lines.append(f"| {one.name} | {one.state} | {one.words} | {shown} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(BEGIN)[0] + BEGIN + tables())
