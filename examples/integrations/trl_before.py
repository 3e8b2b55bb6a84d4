"""TRL's SFTTrainer with LoRA: `torchrun --nproc-per-node 2 examples/integrations/trl_before.py`."""

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


class Tuning(SFTTrainer):
    """Where a program's own methods would be."""


def train(folder: str = "runs/trl", steps: int = 12, device: str = "cpu") -> list[float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    tokens = [[2 + (i + j) % 62 for j in range(16)] for i in range(64)]
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t2"))
    arguments = SFTConfig(
        folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=steps // 2,
        bf16=False,
        use_cpu=device == "cpu",
        report_to=[],
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = Tuning(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": tokens}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1"),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    print(train(device=torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"))
