"""transformers' Trainer: `torchrun --nproc-per-node 2 examples/integrations/trainer_before.py`."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers import Trainer


def train(folder: str = "runs/trainer", steps: int = 12, device: str = "cpu") -> list[float]:
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
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=steps // 2,
        use_cpu=device == "cpu",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=[{"input_ids": line, "labels": line} for line in tokens],
    )
    trainer.train()
    trainer.save_model(f"{folder}/final")
    LlamaForCausalLM.from_pretrained(f"{folder}/checkpoint-{steps}")
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    print(train(device=torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"))
