"""Whether the whole model fits on each rank: what it takes, and what is free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

SHARE = 0.9  # of what is free: allocators round up, and activations of a prompt take some
CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes on one rank. `weights`: of the whole model; `cache`: of keys and values of the longest prompt and its answer."""

    weights: int
    cache: int

    def full(self, num_ranks: int) -> int:
        """With full parameters beside the shards that they are gathered from; one rank's shards are the whole model."""
        return self.weights + self.weights // num_ranks * (num_ranks > 1) + self.cache


def need_of(model: nn.Module, config: Any, num_tokens: int, batch: int) -> Need:
    """`model`: on any device, in the dtype to compute in. `num_tokens`: of the longest prompt with its answer."""
    weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    itemsize = next(model.parameters()).element_size()
    words = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(words, "num_attention_heads", None) or 1
    kv_heads = getattr(words, "num_key_value_heads", None) or heads
    hidden, layers = getattr(words, "hidden_size", None) or 0, getattr(words, "num_hidden_layers", None) or 0
    head_dim = getattr(words, "head_dim", None) or hidden // heads
    return Need(weights=weights, cache=2 * layers * kv_heads * head_dim * itemsize * num_tokens * batch)


def free_bytes(device: torch.device, num_ranks: int) -> int:
    """Memory that one of `num_ranks` ranks of this machine may take: its device's, or its part of the host's."""
    if device.type != "cpu":
        module: Any = torch.get_device_module(device.type)
        return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else 0
    return _free_on_host() // num_ranks


def _free_on_host() -> int:
    """What the system has available, or the control group of this process where that is less."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        pass
    for limit, used in CGROUPS:
        try:
            most = Path("/sys/fs/cgroup", limit).read_text().strip()
            found += [] if most == "max" else [int(most) - int(Path("/sys/fs/cgroup", used).read_text())]
        except (OSError, ValueError):
            continue
    if found:
        return max(0, min(found))
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
