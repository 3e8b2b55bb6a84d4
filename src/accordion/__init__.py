"""Accordion: fully sharded data parallel training for PyTorch models that do not fit on one accelerator."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from accordion.version import VERSION

if TYPE_CHECKING:
    from accordion.api import *  # noqa: F403

__version__ = VERSION


class _Package(ModuleType):
    """Class of the module object `accordion`, which imports lazily. The first read of any public name imports all public names,
    and with them torch. A read of a submodule's name imports the submodule.

    `SHADOWED`: public functions with the name of a submodule. Its import would set the name to the module; this has no effect.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'accordion' has no attribute {name!r}")
        if name not in SHADOWED and find_spec(f"accordion.{name}") is not None:
            return import_module(f"accordion.{name}")
        from accordion import api

        public = {public: value for public, value in vars(api).items() if not public.startswith("_")}
        vars(self).update(public, __all__=list(public))
        return list(public) if name == "__all__" else getattr(api, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in SHADOWED and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    # cloudpickle, by which Ray ships functions, stores a module by name only if it is of no subclass.
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return import_module, ("accordion",)


# Functions; an import of the submodules of these names would replace them.
SHADOWED = ("describe", "observe", "plan", "shard")
sys.modules[__name__].__class__ = _Package
