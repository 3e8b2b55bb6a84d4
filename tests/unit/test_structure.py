"""The shape of the package: public names, directions of imports, where private names live, and the size of the engine."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import accordion

SOURCE = Path(accordion.__file__).parent
PUBLIC = {
    "AccordionError",
    "CheckpointError",
    "DivergenceError",
    "NonFiniteError",
    "FULL_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_OPTIM",
    "NO_SHARD",
    "Offload",
    "OffloadError",
    "Place",
    "Precision",
    "Prefetch",
    "SHARD_GRAD_OP",
    "SHARD_OPTIM",
    "Strategy",
    "UsageError",
    "clip_grad_norm_",
    "describe",
    "entry_point",
    "full_params",
    "full_state_dict",
    "initialise",
    "latest",
    "load",
    "load_pretrained",
    "min_params",
    "no_sync",
    "only_blocks",
    "plan",
    "save",
    "shard",
    "synchronize",
    "wrap_optimizer",
}

# Each part may import those to its right, and itself. `__init__`, `config` and `errors` are named where they matter.
ORDER = [
    "cli",
    "planner",
    "bench",
    "train",
    "plan",
    "compat",
    "report",
    "shard",
    "additions",
    "agreement",
    "pretrained",
    "initialise",
    "checkpoint",
    "state",
    "optim",
    "memory",
    "units",
    "activations",
    "engine",
    "config",
    "heap",
    "errors",
]
ENGINE = [
    "hooks",
    "autograd",
    "engine",
    "reads",
    "together",
    "unit",
    "window",
    "group",
    "reduced",
    "around",
    "reduction",
    "axis",
    "undecided",
    "streams",
    "watch",
    "finite",
    "home",
    "norm",
    "collectives",
    "tree",
    "schedule",
    "layout",
]
PURE = ["engine/layout.py", "engine/schedule.py"]
CORE = [
    "shard.py",
    "state.py",
    "optim.py",
    "units.py",
    "activations.py",
    "initialise.py",
    "config.py",
    "heap.py",
    "engine",
    "memory",
    "checkpoint",
    "_torch.py",
]

# What a function of the core uses where it is installed.
OPTIONAL = {"checkpoint/sums.py": {"xxhash"}, "checkpoint/folders.py": {"fsspec"}}


def imports(path: Path, *, typing_too: bool = False) -> set[str]:
    """Modules that a file imports, outside of `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
            and not typing_too
        ):
            skipped.update(n for child in node.body for n in ast.walk(child))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def files(part: str) -> list[Path]:
    path = SOURCE / part
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def test_the_public_names_are_these() -> None:
    assert sorted(accordion.__all__) == sorted(PUBLIC)
    assert all(hasattr(accordion, name) for name in PUBLIC)


def test_imports_between_parts_go_one_way() -> None:
    rank = {part: i for i, part in enumerate(ORDER)}
    for part in ORDER:
        for path in files(part if (SOURCE / part).is_dir() else f"{part}.py"):
            for name in imports(path):
                if name.startswith("accordion.") and (target := name.split(".")[1]) in rank:
                    assert rank[target] >= rank[part], f"{path.name} imports {name}, against the arrows"


def test_imports_inside_the_engine_go_one_way() -> None:
    rank = {part: i for i, part in enumerate(ENGINE)}
    assert sorted(rank) == sorted(p.stem for p in files("engine") if p.stem != "__init__")
    for part in ENGINE:
        for name in imports(SOURCE / "engine" / f"{part}.py"):
            if name.startswith("accordion.engine.") and (target := name.split(".")[2]) in rank:
                assert rank[target] > rank[part], f"engine/{part}.py imports {name}, against the arrows"


def test_pure_files_know_no_tensors() -> None:
    for name in PURE:
        assert not any(module.split(".")[0] == "torch" for module in imports(SOURCE / name)), name


def test_the_core_needs_torch_numpy_and_safetensors_only() -> None:
    import sys

    allowed = {*sys.stdlib_module_names, "torch", "numpy", "safetensors", "accordion"}
    for part in CORE:
        for path in files(part):
            found = {m.split(".")[0] for m in imports(path)}
            assert found <= allowed | OPTIONAL.get(f"{path.parent.name}/{path.name}", set()), path


def test_only_collectives_communicates_and_only_torch_has_private_names() -> None:
    private = re.compile(
        r"torch\._(?!foreach|amp_foreach|_version)\w+|\._(local_tensor|spec)\b|_execution_engine|torch\.(\w+\.)*_C\b"
    )
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if path.name != "_torch.py":
            assert not private.search(text), f"{path}: {private.search(text)}"
        if "engine" in path.parts and path.name != "collectives.py":
            assert not re.search(r"\bdist\.(all_|reduce\w*\(|broadcast|barrier|new_group)", text), path


def test_no_effects_and_no_environment_in_the_core() -> None:
    for part in CORE:
        for path in files(part):
            assert "os.environ" not in path.read_text(), path
            assert "getenv" not in path.read_text(), path


def test_the_size_of_the_engine_is_printed() -> None:
    counted = {p.name: len(p.read_text().splitlines()) for p in [*files("engine"), SOURCE / "shard.py"]}
    print(f"engine/ and shard.py: {sum(counted.values())} lines", counted)
    assert max(counted.values()) <= 400, counted
    assert sum(counted.values()) <= 4900, "growth needs a reason in docs/design.md"
