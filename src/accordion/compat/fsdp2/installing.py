"""Our `fully_shard` under torch's names, for programs that nobody edits."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch.distributed.fsdp as home

from accordion import _torch


@dataclass(slots=True)
class Installed:
    """Owns what was under torch's names before `install`, until `remove` puts it back. `ours`: what is there now, by name."""

    ours: Mapping[str, Any]
    replaced: list[tuple[ModuleType, str, Any]] = field(default_factory=list)

    def remove(self) -> None:
        """Put torch's own back wherever ours still are. A second call changes nothing."""
        for module, name, theirs in self.replaced:
            if vars(module).get(name) is self.ours[name]:
                setattr(module, name, theirs)
        self.replaced.clear()

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def put(ours: Mapping[str, Any]) -> Installed:
    """Replace names of `torch.distributed.fsdp` by `ours`, also in modules that have imported them, as `install` says."""
    installed = Installed(ours)
    theirs = {name: getattr(home, name) for name in ours if hasattr(home, name)}
    own = [name for name, thing in theirs.items() if thing is not ours[name]]
    homes = _torch.homes_of_fully_shard()
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or (_is_left_alone(module.__name__) and module not in homes):
            continue
        for name in own:
            if vars(module).get(name) is theirs[name]:
                installed.replaced.append((module, name, theirs[name]))
                setattr(module, name, ours[name])
    return installed


def _is_left_alone(name: str) -> bool:
    """torch's own files, its pipelines say, treat our modules as ordinary ones; ours measure against torch's."""
    return name.partition(".")[0] in ("torch", "accordion")
