"""What `accordion generate` is told, and the limits of each number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from accordion.errors import UsageError
from accordion.options import place

Hold = Literal["auto", "full", "units"]
MANY = 128  # new tokens where nobody says how many
LARGEST = 2**31 - 1  # of every whole number: what torch's seeds and sizes all hold
LIMITS: Mapping[str, tuple[float, float]] = {
    "max_new_tokens": (1, LARGEST),
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (0, LARGEST),
    "seed": (0, LARGEST),
    "batch": (1, LARGEST),
    "nproc": (0, 2**16),
    "timeout_s": (5, LARGEST),
}


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Write on from a prompt, with a model of any size: whole on each rank where it fits, else gathered unit by unit.

    Args:
        source: a checkpoint, the folder of a run of `accordion train`, or a folder of transformers or of PEFT
        prompt: text to write on from
        prompts: file with a prompt on each line, or a .jsonl file of objects with `prompt` (or `messages`, with --chat)
        max_new_tokens: tokens after each prompt at most; without it 128, or what the model has positions for
        temperature: 0 takes the likeliest token each time, 1 draws as the model says; higher ones draw more widely
        top_p: draw only from the likeliest tokens that have this probability together
        top_k: draw only from so many of the likeliest tokens; 0: from all
        seed: of the draws; each prompt has its own, so that other prompts and other numbers of ranks change none
        chat: prompts are messages of a user, put into the chat template of the tokenizer
        hold: `full` keeps the whole model on each rank, `units` gathers one unit after the other in each step, `auto` does
            the first where it fits into free memory
        batch: prompts that a rank computes together; more is faster, rounds differently, and shares the draws
        dtype: to compute in; `auto` takes that of the stored weights
        tokenizer: tokenizer.json or folder of transformers, in place of the one beside the model
        like: folder with the config.json of a checkpoint that has none, or with the base of an adapter
        nproc: ranks on this machine; 0: one for each accelerator found, else 1
        device: `auto` takes the accelerators of this machine where there are some; `cpu`, or a type of device
        timeout_s: seconds after which a rank ends that waits for another one
        json: print a JSON object for each prompt
    """

    source: str = place()
    prompt: str | None = None
    prompts: str | None = None
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    chat: bool = False
    hold: Hold = "auto"
    batch: int = 1
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    tokenizer: str | None = None
    like: str | None = None
    nproc: int = 0
    device: str = "auto"
    timeout_s: int = 600
    json: bool = False

    def check(self) -> None:
        """What can be said without looking at files or devices. Raises `UsageError` naming the flag, the value, the limit."""
        for key, (least, most) in LIMITS.items():
            value = getattr(self, key)
            if value is not None and not (math.isfinite(value) and least <= value <= most):
                raise UsageError(f"{flag_of(key)} is {value}; it must be between {least:g} and {most:.10g}.")
        if self.top_p == 0:
            raise UsageError("--top-p is 0, which leaves no token to draw; take --temperature 0 for the likeliest one.")
        if (self.prompt is None) == (self.prompts is None):
            both = "both are given" if self.prompt is not None else "neither is given"
            raise UsageError(f"text is taken from --prompt or from --prompts FILE, and {both}; give one of them.")
        for key in ("source", "prompts", "tokenizer", "like"):
            value = getattr(self, key)
            if value is not None and (not value.strip() or "\0" in value):
                raise UsageError(f"{flag_of(key)} is empty; give a path.")


def flag_of(key: str) -> str:
    return key.upper() if key == "source" else "--" + key.replace("_", "-")
