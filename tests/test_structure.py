"""The shape of the package: public names, directions of imports, where private names live, and the size of the engine."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import accordion

SOURCE = Path(accordion.__file__).parent
# The folders and files of the package, from what people call to the ground: each may import those below it, and itself.
ORDER = [
    "__main__",
    "cli",
    "bench",
    "doctor",
    "generate",
    "__init__",
    "api",
    "train",
    "export",
    "plan",
    "observe",
    "pages",
    "workers",
    "models",
    "tasks",
    "integrations",
    "compat",
    "weights",
    "ema",
    "checkpoint",
    "describe",
    "even_batches",
    "norms",
    "sequence",
    "shard",
    "park",
    "state",
    "safety",
    "optimizers",
    "row_marks",
    "losses",
    "offload",
    "sharding",
    "units",
    "engine",
    "options",
    "devices",
    "config",
    "files",
    "garbage",
    "output",
    "tensor_checksum",
    "errors",
    "version",
    "_torch",
]
PURE = ["engine/layout.py", "engine/order.py", "safety/pass_history.py"]
CORE = [
    "shard",
    "safety",
    "state.py",
    "optimizers",
    "losses",
    "units.py",
    "weights/initialise.py",
    "config.py",
    "engine",
    "offload",
    "checkpoint",
    "_torch",
]

# What a function of the core uses where it is installed.
OPTIONAL = {"checkpoint/checksums.py": {"xxhash"}, "checkpoint/storage/remote.py": {"fsspec"}}


# Where code says "cuda", and why it may.
SAYS_CUDA = {
    "_torch/devices.py": "torch tells of a device's abilities and versions in ways of its own there",
    "offload/arena.py": "the calls of a driver that pins memory, by whichever device module has them",
    "plan/trace/fsdp2.py": "fake tensors of a trace are of the type whose operators torch knows without a device",
    "plan/trace/own_engine.py": "as above",
    "plan/trace/setup.py": "as above",
    "plan/trace/trace.py": "as above",
    "plan/trace/operators.py": "a note to the user on what runs there in the place of the CPU's own operator",
    "plan/search/search.py": "a name of torch's in a message on GPU memory",
    "workers/ranks.py": "the types of device on which a backend of the benchmark runs",
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def modules() -> dict[str, Path]:
    """Every file of the package by its dotted name below `accordion`; that of a folder is its `__init__`."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCE.rglob("*.py")
    }


@cache
def imports(path: Path) -> set[str]:
    """Modules that a file imports, those under `if TYPE_CHECKING` too: who names a class must know its file. A folder's own
    `__init__` counts only where it is named alone."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(full if full.removeprefix("accordion.") in modules() else node.module for full in names)
    return found


def arrows() -> dict[str, set[str]]:
    """Which modules of the package each of them imports."""
    own = {
        name: {"__init__" if target == "accordion" else target.removeprefix("accordion.") for target in imports(path)}
        for name, path in modules().items()
    }
    return {name: targets & own.keys() - {name} for name, targets in own.items()}


def files(part: str) -> list[Path]:
    path = SOURCE / part
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def test_public_names_exist() -> None:
    assert all(hasattr(accordion, name) for name in accordion.__all__)
    assert len(set(accordion.__all__)) == len(accordion.__all__)


def test_imports_between_folders_go_one_way() -> None:
    rank = {part: i for i, part in enumerate(ORDER)}
    graph = arrows()
    assert sorted({name.split(".")[0] for name in graph}) == sorted(ORDER), (
        "each folder and file has its place in ORDER"
    )
    back = set()
    for name, targets in graph.items():
        for target in targets:
            part, other = name.split(".")[0], target.split(".")[0]
            if rank[other] < rank[part]:
                back.add((part, other))
    assert not back, "imports against the arrows"


def test_no_files_know_each_other_in_a_circle() -> None:
    TopologicalSorter(arrows()).prepare()  # raises a CycleError that names the files


def test_the_engine_names_no_observer() -> None:
    """What is optional is attached through `engine/observer.py`: the engine's files know its moments and nothing more."""
    observers = {
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Observer" for base in node.bases)
    }
    assert len(observers) >= 8, "the nets, the step in a backward, FSDP2's unshard and the plan's trace"
    for path in files("engine"):
        named = {n.id for n in ast.walk(parsed(path)) if isinstance(n, ast.Name)} & observers
        assert not named, f"{path.name} names {named}"


def test_the_page_of_a_folder_names_each_of_its_files() -> None:
    pages = list(SOURCE.glob("*/README.md"))
    assert {page.parent for page in pages} == {path.parent for path in SOURCE.glob("*/__init__.py")}
    for page in pages:
        named = set(re.findall(r"[\w/]+\.py", page.read_text()))
        named |= {f"{name}.py" for name in re.findall(r"`([\w/]+)`", page.read_text())}
        for path in page.parent.rglob("*.py"):
            if path.name not in ("__init__.py", "__main__.py"):
                assert {path.name, path.relative_to(page.parent).as_posix()} & named, f"{page} does not name {path}"


def test_no_two_public_classes_have_one_name() -> None:
    where: dict[str, list[str]] = {}
    for name, path in modules().items():
        named_by_others = name.startswith("integrations.")  # as the classes of the libraries are
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not named_by_others:
                where.setdefault(node.name, []).append(name)
    assert not {name: files for name, files in where.items() if len(files) > 1}


def test_pure_files_know_no_tensors() -> None:
    for name in PURE:
        assert not any(module.split(".")[0] == "torch" for module in imports(SOURCE / name)), name


def test_the_core_needs_torch_numpy_and_safetensors_only() -> None:
    import sys

    allowed = {*sys.stdlib_module_names, "torch", "numpy", "safetensors", "accordion"}
    for part in CORE:
        for path in files(part):
            found = {m.split(".")[0] for m in imports(path)}
            assert found <= allowed | OPTIONAL.get(str(path.relative_to(SOURCE)), set()), path


def test_only_collectives_communicates_and_only_torch_has_private_names() -> None:
    private = re.compile(
        r"torch\._(?!foreach|amp_foreach|_version)\w+|\._(local_tensor|spec)\b|_execution_engine|torch\.(\w+\.)*_C\b"
    )
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if path.parent.name != "_torch":
            assert not private.search(text), f"{path}: {private.search(text)}"
        if "engine" in path.relative_to(SOURCE).parts and path.name != "communicator.py":
            assert not re.search(r"\bdist\.(all_|reduce\w*\(|broadcast|barrier|new_group)", text), path


def test_no_effects_and_no_environment_in_the_core() -> None:
    for part in CORE:
        for path in files(part):
            assert "os.environ" not in path.read_text(), path
            assert "getenv" not in path.read_text(), path


def test_no_pip_command_names_the_project_of_others() -> None:
    """PyPI's `accordion` is another project; the distribution of this one is `accordion-fsdp`."""
    root = Path(__file__).parents[1]
    theirs = re.compile(r"pip install[^\n`.;]*[ '\"]accordion(?!-fsdp)\b|\baccordion\\?\[[a-z{]")
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), root / "Makefile", root / "pyproject.toml"]
    code = [*SOURCE.rglob("*.py"), *root.glob("examples/*.py"), *root.glob("tests/**/*.py")]
    assert [path.name for path in [*pages, *code] if theirs.search(path.read_text())] == []


# Lines that each folder may have, and the files beside them. Raising one takes a line in CHANGELOG.md that names the user who
# needs it; whoever makes a folder smaller lowers its budget.
BUDGETS = {
    "_torch": 950,
    "bench": 1160,
    "checkpoint": 4120,
    "compat": 3310,
    "doctor": 560,
    "engine": 4440,
    "export": 540,
    "generate": 540,
    "integrations": 1420,
    "losses": 450,
    "models": 510,
    "observe": 1190,
    "offload": 2720,
    "optimizers": 1350,
    "pages": 260,
    "plan": 5950,
    "safety": 3210,
    "sequence": 560,
    "shard": 1480,
    "tasks": 510,
    "train": 5820,
    "weights": 2120,
    "workers": 300,
    "files beside them": 2900,
}


def test_folders_keep_their_line_budgets() -> None:
    counted = Counter[str]()
    for path in (*SOURCE.rglob("*.py"), *SOURCE.rglob("*.toml")):
        parts = path.relative_to(SOURCE).parts
        counted[parts[0] if len(parts) > 1 else "files beside them"] += len(path.read_text().splitlines())
    assert counted.keys() == BUDGETS.keys()
    over = {folder: (lines, BUDGETS[folder]) for folder, lines in counted.items() if lines > BUDGETS[folder]}
    assert not over, f"growth needs a line in CHANGELOG.md that names its user: {over}"


FACTORIES = {
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "tensor",
    "linspace",
    "rand",
    "randn",
    "randint",
    "randperm",
    "eye",
}
TAKES_ANY_DEVICE = (
    "bench",
    "plan",
    "compat",
)  # models of their own, and traces: there the caller's device is meant


def test_memory_names_its_device():
    """Under `torch.set_default_device` a factory that names none allocates on the accelerator, also where the host is meant."""
    nameless = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node.func)}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] not in TAKES_ANY_DEVICE
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}
        and not {"device", None} & {word.arg for word in node.keywords}
    ]
    assert not nameless


def code_says_cuda(path: Path) -> bool:
    """Whether a name, an attribute or a text has the word in it, docstrings aside."""
    tree = parsed(path)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    said = (getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(tree))
    texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docstrings)
    return any(isinstance(word, str) and "cuda" in word.lower() for word in [*said, *texts])


def test_any_accelerator_will_do_but_in_these_places():
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if code_says_cuda(path)}
    assert sorted(found) == sorted(SAYS_CUDA)
