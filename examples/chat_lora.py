"""Fine-tune on chats with LoRA, from data to answers: what does each function of numpy do?

python examples/chat_lora.py chat
accordion train --data.path chat/docs.jsonl --model.preset llama-tiny --train.steps 200 --train.lr 3e-3 --run.dir chat/base
accordion export chat/base chat/llama
accordion train --model.path chat/llama --model.init pretrained --data.path chat/talks.jsonl --data.format chat
    --data.chat_template chat/template.jinja --adapter lora --train.steps 100 --train.lr 1e-2 --run.dir chat/run
accordion generate chat/run --chat --prompt "What does numpy.zeros do?"

This program writes the data: numpy's docstrings, and a chat for each of them, whose answer is its first sentence. The base
is a small Llama that is trained on the docstrings first, so that nothing is downloaded; for a model that answers well, put
the folder of a pretrained one in the place of `chat/llama`. Only the answers are learnt, and only the adapters are trained.
"""

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy

TEMPLATE = """{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}
A: {% elif m.role == 'assistant' %}{% generation %}{{ m.content }}
{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"""


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of each public function and class of numpy, and of the methods of classes."""
    for module in (numpy, numpy.linalg, numpy.fft, numpy.random, numpy.ma, numpy.char, numpy.polynomial.polynomial):
        for name in sorted(name for name in module.__all__ if name[0] != "_"):
            value = getattr(module, name)
            named = {f"{module.__name__}.{name}": value}
            if inspect.isclass(value):
                named |= {f"{module.__name__}.{name}.{key}": v for key, v in vars(value).items() if key[0] != "_"}
            for key, part in named.items():
                if callable(part) and (text := inspect.getdoc(part)):
                    yield key, text


def summary_of(docstring: str) -> str:
    """Return the first paragraph that is no signature, in one line; empty if there is none."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in docstring.split("\n\n")]
    return next((text for text in paragraphs if text.endswith(".")), "")


folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
texts = {text: name for name, text in docstrings()}  # several names may have one docstring
chats = [
    [{"role": "user", "content": f"What does {name} do?"}, {"role": "assistant", "content": answer}]
    for text, name in texts.items()
    if (answer := summary_of(text))
]
(folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
(folder / "talks.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
(folder / "template.jinja").write_text(TEMPLATE)
print(f"{len(texts)} docstrings and {len(chats)} chats in {folder}")
