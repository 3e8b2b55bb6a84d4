"""The words of public docstrings: those of PyTorch, plain English, and those that docs/glossary.md explains."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

import accordion
from accordion import compat

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = ROOT / "docs/glossary.md"
PRIVATE = {  # words that the project once had for what the field or the glossary names otherwise
    "adopted": "loaded", "apart": "diverged", "bay": "staging buffer", "berth": "slot", "flight": "transfer",
    "habits": "policy", "home": "shard buffer", "lane": "side stream", "lifeline": "watchdog of the store",
    "parking": "activation offload", "passage": "pipeline", "piece": "chunk",
    "recipe": "copy of the optimizer", "relay": "inner shard", "rig": "setup", "room": "memory, or full buffer",
    "shelf": "file", "sibling": "unit of another rank", "spot": "range of a file", "strip": "span", "wiring": "context",
}  # fmt: skip


def public_modules() -> list[ModuleType]:
    names = [f"{compat.__name__}.{found.name}" for found in pkgutil.iter_modules(compat.__path__)]
    return [accordion, *map(importlib.import_module, names)]


def docstrings(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Of a module, its public names and their public members: (where, text) of each that this project wrote."""
    yield module.__name__, module.__doc__ or ""
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value) and value.__module__.startswith("accordion"):
            yield f"{module.__name__}.{name}", value.__doc__ or ""
            for member, of_it in vars(value).items() if inspect.isclass(value) else ():
                if not member.startswith("_"):
                    yield f"{module.__name__}.{name}.{member}", getattr(of_it, "__doc__", None) or ""


def private_words(text: str) -> Mapping[str, str]:
    """Those in a text, one or many of each, with what is said in their place."""
    said = set(re.findall(r"[a-z]+", text.lower()))
    return {word: better for word, better in PRIVATE.items() if {word, f"{word}s"} & said}


def terms() -> list[str]:
    """The words that the glossary explains."""
    rows = re.findall(r"^\| ([^|]+) \|", GLOSSARY.read_text(), re.MULTILINE)
    return [term for term in rows if term != "word"]


def test_public_docstrings_use_no_private_words() -> None:
    texts = [found for module in public_modules() for found in docstrings(module)]
    assert len(texts) > 150
    wrong = {where: found for where, text in texts if (found := private_words(text))}
    assert not wrong


def test_a_planted_word_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accordion.shard, "__doc__", "Waits for flights on a Lane.")
    with pytest.raises(AssertionError, match=r"accordion\.shard.*'flight': 'transfer', 'lane': 'side stream'"):
        test_public_docstrings_use_no_private_words()


def test_the_glossary_is_short_and_each_of_its_words_is_used() -> None:
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("src/**/*.md"), *ROOT.glob("src/**/*.py"), ROOT / "README.md"]
    texts = " ".join(" ".join(path.read_text().lower().split()) for path in files if path != GLOSSARY)
    assert 10 < len(terms()) <= 25
    assert [term for term in terms() if not re.search(rf"\b{term.replace('-', '.')}s?\b", texts)] == []
    assert not set(terms()) & set(PRIVATE)


PROSE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "RELEASING.md", "SECURITY.md")]
PROSE += [
    path for folder in ("docs", "src", "tests", "examples", "benchmarks") for path in ROOT.glob(f"{folder}/**/*.md")
]
WIDTH = 110


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of a page, without tables and what stands between fences."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.lstrip().startswith("|"):
            yield number, line


def test_prose_is_narrow_enough_to_read() -> None:
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in PROSE
        for number, line in prose_lines(path.read_text())
        if len(line) > WIDTH
    ]
    assert not wide


def test_each_row_of_the_comparison_links_to_its_test() -> None:
    rows = [line for line in (ROOT / "docs/comparison.md").read_text().splitlines() if line.endswith(".py) |")]
    assert len(rows) > 10
    for row in rows:
        name, path = re.findall(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\) \|$", row)[0]
        assert f"def {name}(" in (ROOT / path).read_text(), row


def test_the_tests_that_pages_name_exist() -> None:
    """Pages may cut a name short by "..." and leave out folders of its file."""
    sources = {path.as_posix(): path.read_text() for path in ROOT.glob("tests/**/*.py")}
    named = re.compile(r"`([\w/]+\.py)(?:`? `|::)(test_\w+?)(_\.\.\.)?`")
    links = [link for path in PROSE if "log" not in path.parts for link in named.findall(path.read_text())]
    assert len(links) > 50
    for file, name, cut in links:
        start = f"def {name}{'_' if cut else '('}"
        assert any(start in text for path, text in sources.items() if path.endswith(f"/{file}")), (file, name)
