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
    "dtensors",
    "replaced",
    "pretrained",
    "initialise",
    "adapters",
    "checkpoint",
    "state",
    "agreement",
    "optim",
    "memory",
    "extensions",
    "units",
    "activations",
    "engine",
    "config",
    "devices",
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
# Imports for types alone that run back up, (file, what it names): a circle of seven files. No new one may come, and one that
# goes is taken from here.
RUN_BACK = {
    ("engine", "hooks"),
    ("engine", "autograd"),
    ("reads", "hooks"),
    ("together", "hooks"),
    ("together", "autograd"),
    ("unit", "engine"),
    ("unit", "autograd"),
    ("window", "unit"),
    ("reduced", "group"),
    ("home", "streams"),
}
PURE = ["engine/layout.py", "engine/schedule.py"]
CORE = [
    "shard.py",
    "state.py",
    "optim.py",
    "units.py",
    "activations.py",
    "dtensors.py",
    "extensions.py",
    "replaced.py",
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


# Where code says "cuda", and why it may.
SAYS_CUDA = {
    "_torch.py": "torch tells of a device's abilities and versions in ways of its own there",
    "memory/arena.py": "the calls of a driver that pins memory, by whichever device module has them",
    "plan/fsdp2.py": "fake tensors of a trace are of the type whose operators torch knows without a device",
    "plan/ours.py": "as above",
    "plan/rig.py": "as above",
    "plan/space.py": "as above",
    "plan/substitute.py": "as above",
    "plan/trace.py": "as above",
    "plan/unsure.py": "what moves a model there, looked for in the source of models",
    "plan/search.py": "a name of torch's in a message on GPU memory",
    "train/planned.py": "what such a trace is asked for, whatever the accelerator",
    "compat/fsdp1/sharded_grad_scaler.py": "the default of an argument, as in the interface that it has",
    "bench/gpu/streams.py": "categories of events in a trace of torch.profiler",
    "bench/still.py": "the types of device on which a backend of the benchmark runs",
}


def imports(path: Path) -> set[str]:
    """Modules that a file imports, those under `if TYPE_CHECKING` too: who names a class must know its file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
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


def test_imports_inside_the_engine_go_one_way_but_for_those_that_are_listed() -> None:
    rank = {part: i for i, part in enumerate(ENGINE)}
    assert sorted(rank) == sorted(p.stem for p in files("engine") if p.stem != "__init__")
    back = set()
    for part in ENGINE:
        for name in imports(SOURCE / "engine" / f"{part}.py"):
            if name.startswith("accordion.engine.") and (target := name.split(".")[2]) in rank:
                assert target != part, f"engine/{part}.py imports itself"
                if rank[target] < rank[part]:
                    back.add((part, target))
    assert not back - RUN_BACK, f"imports against the arrows: {sorted(back - RUN_BACK)}"
    assert not RUN_BACK - back, f"these arrows are gone, take them from RUN_BACK: {sorted(RUN_BACK - back)}"


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
    assert sum(counted.values()) <= 5200, "growth needs a reason in docs/design.md"


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
    "planner",
    "compat",
)  # models of their own, and traces: there the caller's device is meant


def test_memory_names_its_device():
    """Under `torch.set_default_device` a factory that names none allocates on the accelerator, also where the host is meant."""
    nameless = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node.func)}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] not in TAKES_ANY_DEVICE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}
        and not {"device", None} & {word.arg for word in node.keywords}
    ]
    assert not nameless


def code_says_cuda(path: Path) -> bool:
    """Whether a name, an attribute or a text has the word in it, docstrings aside."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    said = (getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(tree))
    texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docstrings)
    return any(isinstance(word, str) and "cuda" in word.lower() for word in [*said, *texts])


def test_any_accelerator_will_do_but_in_these_places():
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if code_says_cuda(path)}
    assert sorted(found) == sorted(SAYS_CUDA)
