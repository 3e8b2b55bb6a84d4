"""The options of `accordion generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accordion.errors import UsageError
from accordion.options import at_least, check_limits, place

MANY = 128  # number of new tokens without --max-new-tokens


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Generate text from a prompt, with a model of any size: whole on each rank if it fits, else gathered unit by unit.

    Args:
        source: a checkpoint, the folder of a run of `accordion train`, or a folder of transformers or of PEFT
        prompt: text to continue
        prompts: file with a prompt on each line, or a .jsonl file of objects with `prompt` (or `messages`, with --chat)
        max_new_tokens: most tokens to generate per prompt; by default 128, or as many as the model has positions for
        temperature: 0 takes the likeliest token, 1 samples from the model's probabilities; higher values sample more widely
        top_p: sample only from the likeliest tokens that have this probability together
        seed: random seed; if `batch` is 1 each prompt gets its own, so that results depend neither on other prompts nor on the
            number of ranks
        chat: prompts are messages of a user, put into the chat template of the tokenizer
        hold: `full` keeps the whole model on each rank, `units` gathers one unit after the other in each step, `auto` takes
            `full` if the model fits into free memory
        batch: prompts that a rank computes together; a larger batch is faster, rounds differently, and shares one random seed
        dtype: dtype of the computation; `auto` takes that of the stored weights
        nproc: ranks on this machine; 0: one for each accelerator, or one without accelerators
        device: `auto` takes the accelerators of this machine if there are any; `cpu`, or a type of device
        json: print a JSON object for each prompt
    """

    source: str = place()
    prompt: str | None = None
    prompts: str | None = None
    max_new_tokens: int | None = at_least(1, None)
    temperature: float = at_least(0, 0.0, most=100)
    top_p: float = at_least(0, 1.0, most=1)
    seed: int = at_least(0, 0)
    chat: bool = False
    hold: Literal["auto", "full", "units"] = "auto"
    batch: int = at_least(1, 1)
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    nproc: int = at_least(0, 0, most=2**16)
    device: str = "auto"
    json: bool = False

    def check(self) -> None:
        """Raise `UsageError` for a number out of its limits, an empty path, or options that contradict each other."""
        check_limits(self)
        if self.top_p == 0:
            raise UsageError("--top-p is 0, which leaves no token to draw; take --temperature 0 for the likeliest one.")
        if (self.prompt is None) == (self.prompts is None):
            both = "both are given" if self.prompt is not None else "neither is given"
            raise UsageError(f"text is read from --prompt or from --prompts FILE, and {both}; give one of them.")
        for name, value in (("SOURCE", self.source), ("--prompts", self.prompts)):
            if value is not None and (not value.strip() or "\0" in value):
                raise UsageError(f"{name} is empty; give a path.")
