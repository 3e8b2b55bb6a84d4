"""Functions around private or version-dependent names of torch's FSDP1, FSDP2 and DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DDP_LEAVES_OUT = "_ddp_params_and_buffers_to_ignore"
"""Private attribute of a module with names of parameters and buffers that DistributedDataParallel ignores."""

PRELOADED = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo"]
"""Modules of torch to import early, because each takes seconds; none starts threads or looks for a device (all versions)."""


def is_wrap_policy(policy: object) -> bool:
    """Return True if `policy` is a policy object of torch.distributed.fsdp.wrap; their base class has no public name."""
    return callable(getattr(policy, "_run_policy", None))


def run_wrap_policy(policy: Any, root: Any, arguments: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    """Return module -> `arguments` with the policy's changes, for the modules in `root` that `policy` selects to be wrapped."""
    return dict(policy._run_policy(root, set(), arguments))


def classes_without_mixed_precision(mixed: Any) -> Sequence[type]:
    """Return the module classes that FSDP1's MixedPrecision leaves in float32, by default batch norms. No public name."""
    return tuple(getattr(mixed, "_module_classes_to_ignore", ()))


def fsdp_module_base() -> type:
    """Return a base class for our `FSDPModule`: torch's own on torch 2.15 and later; before that `object`. Before 2.15, pipelines
    of torch read private state of each `FSDPModule`, which ours lacks, but not of other modules."""
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule if hasattr(FSDPModule, "finalize_backward") else object


def gradient_reduction_handle() -> type:
    """Return the class of results of `FSDPModule.finalize_backward` (torch 2.15 on); `object` before 2.15."""
    import torch.distributed.fsdp as fsdp

    return getattr(fsdp, "GradientReductionHandle", object)


def reduces_in_own_dtype() -> bool:
    """Return True if FSDP2 without `reduce_dtype` reduces in the parameter's dtype (2.15 on), False if in the compute dtype."""
    import torch.distributed.fsdp as fsdp

    return "param_dtype_override_fn" in getattr(fsdp.MixedPrecisionPolicy, "__dataclass_fields__", ())


def is_shard_placement_result(value: object) -> bool:
    """Return True if `value` is FSDP2's `ShardPlacementResult`, which names a parameter's placement and mesh (2.13 on)."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    kind = getattr(_fsdp_common, "ShardPlacementResult", None)
    return kind is not None and isinstance(value, kind)


def composed_with(module: Any) -> set[str]:
    """Return the names of torch's composable functions ("replicate", "fully_shard", ...) that were applied to `module`."""
    from torch.distributed._composable.contract import _get_registry

    return set(_get_registry(module) or ())


def mark_fully_sharded(module: Any) -> None:
    """Mark `module` as torch's `fully_shard` does, so that torch's composable `replicate` skips its parameters."""
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def homes_of_fully_shard() -> list[Any]:
    """Return the three Python modules of torch from which programs import `fully_shard`."""
    import torch.distributed._composable.fsdp as older
    import torch.distributed.fsdp as public
    import torch.distributed.fsdp._fully_shard as inner

    return [public, older, inner]
