"""Load classes and functions by class path, and find which of their parameters flags and run files may set."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from accordion.errors import UsageError, nearest
from accordion.optimizers.wrap import ELEMENTWISE
from accordion.options import SEVERAL
from accordion.tasks.errors import of_the_task

CLASS_PATH = "class_path"  # the key that names a part's class, next to its options
TAKEN = {"task": 0, "optimizer": 1}
"""Kind of class -> number of its first arguments that are no options: an optimizer takes the parameters first."""
PLAIN = (float, int, str, bool)
OPTIMIZERS = {kind.__name__.lower(): kind for kind in ELEMENTWISE}
"""Short name, such as "adamw" -> class of the optimizer. Other optimizers are named by class path."""


@dataclass(frozen=True, kw_only=True)
class PartConfig:
    """A class or function that the user names, and its arguments (`options`, name -> value). `class_path`: "file.py:Name",
    "file.py" (its `Task`), "package.module:Name", "package.module.Name", or for an optimizer a name in `OPTIMIZERS`."""

    class_path: str
    options: Mapping[str, Any] = field(default_factory=dict)


def target_of(key: str, class_path: str) -> Callable[..., Any]:
    """Import and return the class or function at `class_path`, see `PartConfig`. A name in `OPTIMIZERS` is allowed if the
    configuration key `key` begins with "optimizer". Adds the folder of the file, or for a module the current folder, to
    `sys.path`. Raises `UsageError` if there is no such class or function, and `TaskError` if the import fails."""
    module_path, colon, name = class_path.partition(":")
    if key.startswith("optimizer") and class_path.isidentifier():
        if class_path.lower() not in OPTIMIZERS:
            raise UsageError(
                f"{key} {class_path!r} is no optimizer; {nearest(class_path.lower(), OPTIMIZERS)} Or give the path of a "
                "class, for example torch.optim.SGD."
            )
        return OPTIMIZERS[class_path.lower()]
    if module_path.endswith(".py"):
        module, name = _of_file(key, module_path), name or "Task"
    else:
        if not colon:
            module_path, _, name = class_path.rpartition(".")
        if not module_path or not name:
            raise UsageError(
                f"{key} {class_path!r} names no class; write file.py, file.py:Name, package.module:Name or package.module.Name."
            )
        module = _of_package(key, module_path)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            kinds = [n for n, value in vars(target).items() if callable(value) and not n.startswith("_")]
            raise UsageError(
                f"{key} {class_path!r}: there is no {part!r} in {module_path}; {nearest(part, kinds or ['Task'])}"
            )
        target = getattr(target, part)
    if not callable(target):
        raise UsageError(f"{key} {class_path!r} is a {type(target).__name__}; it takes a class or a function.")
    return target  # type: ignore[no-any-return]


def _of_file(key: str, file: str) -> ModuleType:
    """Import `file`, unless it was imported before, and return its module. Adds the file's folder to `sys.path`. Raises
    `UsageError`, which names `key`, if there is no such file, and `TaskError` if the import fails."""
    path = Path(file).absolute()
    if not path.is_file():
        raise UsageError(f"{key} {file!r} does not exist; name a Python file, or package.module:Name.")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    own_name = f"task_{path.stem}"
    for known in (sys.modules.get(path.stem), sys.modules.get(own_name)):
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known
    # Named as the file, so that pickles find it, unless that would hide another module.
    is_free = path.stem not in sys.modules and path.stem.isidentifier()
    plain = importlib.util.find_spec(path.stem) if is_free else None
    name = path.stem if plain is not None and plain.origin == str(path) else own_name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None, "as above"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with of_the_task(file):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _of_package(key: str, name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with of_the_task(name):
            return importlib.import_module(name)
    except Exception as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and (name + ".").startswith(cause.name + "."):
            raise UsageError(f"{key}: there is no module {cause.name!r} in this folder or on Python's path.") from None
        raise


# -- the options


def options_kind(key: str, class_path: str) -> type[Any]:
    """Return a new dataclass of the options of the class or function at `class_path`: a field `class_path`, and one for each
    parameter that a flag can set, with its default (None if required). Its docstring has the help texts, from `Args:` of the
    class. `key`: "task" or "optimizer". Raises `UsageError` if there is no such class, if a parameter is named `class_path`, or
    if a parameter without a default has a type that no flag can set. Raises `TaskError` if the import fails."""
    target = target_of(key, class_path)
    text = (inspect.getdoc(target) or "").partition("Args:")[2]
    texts = dict(re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.*(?:\n {5,}\S.*)*)", text, re.MULTILINE))
    options: list[tuple[str, Any, Any]] = [(CLASS_PATH, str | None, field(default=None))]
    lines = [f"{key}: {class_path}.", "", "Args:", f"        {CLASS_PATH}: the class or function"]
    for name, parameter in _parameters(key, target).items():
        if name == CLASS_PATH:
            raise UsageError(f"{key} {class_path!r} has a parameter {name!r}, which names the class here; rename it.")
        hint = _hint(parameter)
        if hint is None:
            if parameter.default is parameter.empty:
                raise UsageError(
                    f"{key} {class_path!r} needs {name!r}, which is no number, text or truth value; give it a default."
                )
            continue
        options.append((name, hint, field(default=None if parameter.default is parameter.empty else parameter.default)))
        lines.append(f"        {name}: {' '.join(texts.get(name, '').split()) or f'of {class_path}'}")
    kind = make_dataclass(f"{key.title()}Options", options, frozen=True, kw_only=True)
    kind.__doc__ = "\n".join(lines)
    return kind


def part_of(key: str, values: Mapping[str, Any]) -> PartConfig:
    """Return a `PartConfig` of the class or function at `values["class_path"]`. Its options are the parameters that a flag can
    set, each with its value in `values` (name -> value), or else its default. `key`: "task" or "optimizer". Raises `UsageError`
    for a missing class or required option, and `TaskError` if the import fails."""
    class_path = values[CLASS_PATH]
    options: dict[str, Any] = {}
    for name, parameter in _parameters(key, target_of(key, class_path)).items():
        if _hint(parameter) is None:
            continue
        if name not in values and parameter.default is parameter.empty:
            raise UsageError(f"{key} {class_path!r} needs {name!r}, which has no default; give --{key}.{name}.")
        options[name] = values.get(name, parameter.default)
    return PartConfig(class_path=class_path, options=options)


def _parameters(key: str, target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return name -> parameter for the parameters of `target` that can be passed by name, without the first `TAKEN[key]`, which
    the run itself passes. Annotations that are text are evaluated if possible. Returns {} if Python can read no signature."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return {}
    try:
        hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError, AttributeError):  # annotations that only type checkers can evaluate
        hints = {}
    named = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    free = [p for p in signature.parameters.values() if p.kind in named][TAKEN[key] :]
    return {p.name: p.replace(annotation=hints.get(p.name, p.annotation)) for p in free}


def _hint(parameter: inspect.Parameter) -> Any:
    """Return the type of the option that sets `parameter`; None if no flag can set it."""
    hint, default = parameter.annotation, parameter.default
    if get_origin(hint) is tuple:
        kinds = [kind for kind in get_args(hint) if {float, int} & {kind, *get_args(kind)}]
        fits = len(kinds) == len(get_args(hint))
        return next((several for several, count in SEVERAL.items() if fits and count == len(kinds)), None)
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind in PLAIN]
        chosen = type(default) if type(default) in kinds else next((k for k in PLAIN if k in kinds), None)
        if chosen is None:
            return None
        return chosen | None if NoneType in get_args(hint) else chosen
    if get_origin(hint) is Literal and all(isinstance(choice, str) for choice in get_args(hint)):
        return hint
    if hint in PLAIN:
        return hint | None if default is None or default is parameter.empty else hint
    if hint is parameter.empty and type(default) in PLAIN:
        return type(default)
    return None
