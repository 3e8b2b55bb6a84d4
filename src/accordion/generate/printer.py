"""The answers of all ranks, printed by the first one in the order of the prompts, each as soon as it can be."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch.distributed.distributed_c10d import Store

from accordion.generate.options import GenerateOptions
from accordion.generate.prompts import Prompt
from accordion.generate.writer import WrittenText

LOOK_S = 0.02


class Printer:
    """Owns what was printed so far; on other ranks `show` and `end` do nothing. Answers travel through the job's store."""

    def __init__(
        self, prompts: Sequence[Prompt], store: Store, tokenizer: Any, options: GenerateOptions, *, speaks: bool
    ) -> None:
        self._prompts, self._store, self._tokenizer, self._speaks = prompts, store, tokenizer, speaks
        self._as_json, self._num_shown, self._num_tokens = options.json, 0, 0
        self._streams = speaks and len(prompts) == 1 and not options.json
        self._began_s = time.perf_counter()

    def streamer(self) -> Any:
        """Prints words as they are written, where there is one prompt; else None."""
        if not self._streams:
            return None
        from transformers import TextStreamer

        return TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)

    def keep(self, answers: Sequence[WrittenText]) -> None:
        for answer in answers:
            self._store.set(_key(answer.index), json.dumps(asdict(answer)))

    def show(self) -> None:
        """Print the next answers, as far as they have come."""
        while self._speaks and self._num_shown < len(self._prompts) and self._store.check([_key(self._num_shown)]):
            answer = WrittenText(**json.loads(self._store.get(_key(self._num_shown))))
            self._print(self._prompts[self._num_shown], answer)
            self._num_shown += 1
            self._num_tokens += answer.num_tokens

    def end(self, how: str) -> None:
        """Print what is still to come, as it comes, and how fast all was."""
        if not self._speaks:
            return
        while self._num_shown < len(self._prompts):
            self.show()
            time.sleep(LOOK_S)
        seconds = time.perf_counter() - self._began_s
        speed = f"{self._num_tokens:,} tokens in {seconds:.1f} s, {self._num_tokens / seconds:,.1f} tokens/s"
        print(f"{speed}; {how}", file=sys.stderr, flush=True)

    def _print(self, prompt: Prompt, answer: WrittenText) -> None:
        if self._as_json:
            words = {"prompt": prompt.text, "text": answer.text, "tokens": answer.num_tokens, "ended": answer.ended}
            print(json.dumps(words), flush=True)
        elif len(self._prompts) > 1:
            print(f"> {prompt.text}\n{answer.text}\n", flush=True)
        elif not self._streams:
            print(answer.text, flush=True)


def _key(index: int) -> str:
    return f"accordion/answer/{index}"
