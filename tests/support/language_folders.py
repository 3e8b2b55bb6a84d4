"""Write small language models as folders: a Llama and a GPT-2 of transformers with tokenizers, an adapter of PEFT, a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from accordion.checkpoint import save

TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "def add(a, b): return a + b",
    "colourless green ideas sleep furiously",
    "a line of text that nobody will read twice",
]
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(size: int = 320) -> Any:
    """Return a byte-level BPE tokenizer of `size` tokens, the first of which ends a text, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")
    fast.chat_template = CHAT
    return fast


def llama(folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32, layers: int = 2) -> Path:
    """Write a small random Llama and its tokenizer into `folder`, and return `folder`. Its weights generate varied text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def run(folder: Path) -> Path:
    """Write the checkpoint and tokenizer of a Llama into `folder`, as a run of `accordion train` does, and return `folder`."""
    from transformers import LlamaForCausalLM

    made = llama(folder / "as-transformers")
    model = LlamaForCausalLM.from_pretrained(made)
    extra = {"step": 100, "model_config": json.loads(model.config.to_json_string(use_diff=False))}
    save(folder / "checkpoints" / "step-000100", model, extra=extra)
    (made / "tokenizer.json").rename(folder / "tokenizer.json")
    shutil.rmtree(made)
    return folder


def gpt2(folder: Path) -> Path:
    """Write a small random GPT-2, with 40 learned positions, and its tokenizer into `folder`, and return `folder`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    words = tokenizer()
    config = GPT2Config(
        vocab_size=len(words), n_positions=40, n_embd=32, n_layer=2, n_head=2, eos_token_id=0, bos_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def lora(base: Path, folder: Path) -> Path:
    """Write a random LoRA adapter on the model in `base` into `folder`, and return `folder`. It changes generated text."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(8)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return folder
