"""`Sharding`: one value that describes how a model is sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accordion.config import (
    COMPUTE_DTYPES,
    FULL_SHARD,
    ActivationCheckpointing,
    Offload,
    Place,
    Precision,
    Prefetch,
    Strategy,
    checkpointing_named,
    strategy_named,
)
from accordion.errors import UsageError, nearest
from accordion.units import AUTO, UnitChoice, units_named

MeshChoice = Mapping[type[nn.Module] | str, DeviceMesh]
"""Class of modules, or shell pattern of names of modules or parameters -> the mesh over which their parameters are sharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How `shard` distributes a model over the ranks.

    Args:
        strategy: how parameters, gradients and optimizer state are sharded: "full_shard", "shard_grad_op", "shard_optim",
            "no_shard", "hybrid_shard" or "hybrid_shard_optim"; in Python also `accordion.FULL_SHARD` and so on.
        precision: dtype of the computation, "fp32", "bf16" or "fp16"; in Python also a `Precision`. None or "auto": in
            `accordion train`, bf16 on accelerators that have it, else fp16, and fp32 on CPU; in a library's trainer, its own
            mixed precision; elsewhere `Precision()`.
        prefetch: how much is gathered ahead of use.
        offload: which state is stored off the device, and where the optimizer steps: "optimizer=host,params=disk:/folder",
            for example; in Python also an `Offload`. Its fields: params, grads, optimizer, activations, step,
            device_bytes=16GiB, host_bytes.
        units: modules that are gathered together: "blocks", "min_params:1000000" or names of classes, "Block,Head"; in Python
            also classes, `min_params(n)`, `only_blocks()` or a callable (name, module) -> bool. None or "auto": the repeated
            blocks, and embeddings and heads about as large as a block.
        checkpoint_activations: units with more than one layer whose activations are recomputed in the backward: "none",
            "full" (all), "selective" (all, except attention and every other matrix product) or "every:K" (every K-th).
        secondary: number of ranks, for example those of a node, that keep one copy of each unit between them from its forward
            to its backward, in the gathered dtype; the backward gathers from it. None: no copy.
        meshes: class of modules, or pattern of names -> mesh of these parameters, for example experts: a slice of a mesh of
            all ranks, 1-D, or 2-D with the shard axis second. Their gradients are summed over their own mesh.
        state_block: elements that share a scale in the states of a low-bit optimizer: 256 for most of 8 bits, 128 for 4 bits.
            Parameters of at most 256 KiB whose rows would end inside a block on some rank are kept whole on each rank.
        reduce_op: "mean" over all data-parallel ranks, or "sum" for losses weighted by tokens.

    Raises `UsageError` for a value that its field does not take.
    """

    strategy: Strategy = FULL_SHARD
    precision: Precision | None = None
    prefetch: Prefetch = field(default_factory=Prefetch, metadata={"unread": True})
    offload: Offload = field(default_factory=Offload)
    units: UnitChoice = None
    checkpoint_activations: str = "none"
    secondary: int | None = None
    meshes: MeshChoice | None = field(default=None, metadata={"unread": True})
    state_block: int = field(default=1, metadata={"unread": True})
    reduce_op: Literal["mean", "sum"] = field(default="mean", metadata={"unread": True})

    def __post_init__(self) -> None:
        for name, parse in PARSERS.items():
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, parse(getattr(self, name)))
        for name, make in {"prefetch": Prefetch, "offload": Offload}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, make())
        for name, (kind, example) in KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and not (name == "precision" and value is None):
                raise UsageError(f"{name} is {value!r}, of type {type(value).__name__}; pass {example}.")
        checkpointing_named(self.checkpoint_activations)
        if not isinstance(self.state_block, int) or self.state_block < 1:
            raise UsageError(f"state_block is {self.state_block!r}; pass a number of elements, such as 256.")
        if self.reduce_op not in ("mean", "sum"):
            raise UsageError(f"reduce_op={self.reduce_op!r} is not known; pass 'mean' or 'sum'.")

    @property
    def checkpointing(self) -> ActivationCheckpointing:
        return checkpointing_named(self.checkpoint_activations)

    @property
    def kept_over(self) -> int:
        """`secondary`, the number of ranks that keep one copy from the forward to the backward; 0 if it is None."""
        return self.secondary or 0

    def check_secondary(self, num_ranks: int, group: str = "") -> None:
        """Do nothing if `secondary` is None. Otherwise raise `UsageError` if the strategy cannot have `secondary`, or if
        `secondary` is no divisor above 1 of `num_ranks`, the size of the shard axis. `group`: prefix of the name "secondary" in
        the message, such as "shard."."""
        if self.secondary is None:
            return
        s, asked = self.strategy, f"{group}secondary is {self.secondary!r}"
        if s.params is not Place.SHARD or s.keep_until_backward or s.optim_over_replicas:
            raise UsageError(
                f"{asked} with strategy {s.name!r}, which keeps copies of its own; take full_shard or hybrid_shard."
            )
        is_number = isinstance(self.secondary, int) and not isinstance(self.secondary, bool)
        if not is_number or self.secondary not in range(2, num_ranks + 1) or num_ranks % self.secondary:
            raise UsageError(
                f"{asked}; pass how many of the {num_ranks} ranks that shard keep one copy from the forward to the backward: "
                f"a divisor of {num_ranks} above 1, for example the number of ranks of one node."
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Sharding:
        """Return a `Sharding` from field name -> value, which may be text ("bf16"). Raises `UsageError` for wrong entries."""
        known = [f.name for f in fields(cls)]
        for key in config:
            if key not in known:
                raise UsageError(f"sharding takes no {key!r}; {nearest(str(key), known)}")
        return cls(**config)

    def as_config(self) -> dict[str, Any]:
        """Return name -> value of the fields that differ from their defaults, for `from_config`. Values are text if they have a
        text form; others (functions, overrides, meshes) are returned as they are."""
        default = type(self)()
        changed = [f.name for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)]
        return {name: self._printed(name) for name in changed}

    def words(self) -> dict[str, Any]:
        """Return name -> value, as text if possible, of all fields that the command line can set."""
        return {f.name: self._printed(f.name) for f in fields(self) if "unread" not in f.metadata}

    def _printed(self, name: str) -> Any:
        value = getattr(self, name)
        return PRINTERS[name](value) if name in PRINTERS else value

    @staticmethod
    def parsers() -> Mapping[str, Callable[[str], Any]]:
        """Return name -> function that parses its text, for fields with a text form."""
        return PARSERS


KINDS: Mapping[str, tuple[type, str]] = {
    "strategy": (Strategy, "a name such as 'full_shard', or accordion.FULL_SHARD"),
    "precision": (Precision, "accordion.Precision(params=torch.bfloat16), or 'bf16', for example"),
    "prefetch": (Prefetch, "accordion.Prefetch(budget_bytes=...)"),
    "offload": (Offload, "accordion.Offload(optimizer='host'), or 'optimizer=host', for example"),
}
"""Name of a field -> (its type, examples of values, for messages)."""


def num_bytes_in(text: str) -> int:
    """Return the number of bytes in "1000000" or "16GiB". Raises `ValueError` for other texts, `OverflowError` for "infGiB"."""
    return int(float(text.removesuffix("GiB")) * 2**30) if text.endswith("GiB") else int(text)


OFFLOAD_FIELDS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("params", "grads", "optimizer", "activations", "step"), str),
    **dict.fromkeys(("device_bytes", "host_bytes"), num_bytes_in),
}
"""Name of a field of `Offload` that has a text form -> function that parses its text."""


def precision_named(name: str) -> Precision | None:
    """Return the `Precision` for "bf16", "fp16" or "fp32" (own dtypes); None for "auto". Raises `UsageError` for others."""
    if name == AUTO:
        return None
    if name not in COMPUTE_DTYPES:
        raise UsageError(f"precision {name!r} does not exist; {nearest(name, COMPUTE_DTYPES)}")
    return Precision(params=COMPUTE_DTYPES[name])


def precision_words(precision: Precision | None) -> str | Precision:
    """Return the name that `precision_named` parses to `precision`, "auto" for None; `precision` itself if it has no name."""
    if precision is None:
        return AUTO
    return next((name for name, dtype in COMPUTE_DTYPES.items() if precision == Precision(params=dtype)), precision)


def offload_named(text: str) -> Offload:
    """Return the `Offload` for "none" or, for example, "optimizer=host,params=disk:/folder". Raises `UsageError` for others."""
    values: dict[str, Any] = {}
    for part in [] if text == "none" else text.split(","):
        name, _, word = (piece.strip() for piece in part.partition("="))
        try:
            values[name] = OFFLOAD_FIELDS[name](word)
        except (KeyError, ValueError, OverflowError):  # a number may be inf
            known = nearest(name, OFFLOAD_FIELDS)
            raise UsageError(f"offload {text!r} has {part!r}; write optimizer=host, for example; {known}") from None
    return Offload(**values)


def offload_words(offload: Offload) -> str | Offload:
    """Return the text that `offload_named` parses to `offload`, "none" for no offload; `offload` itself if it has overrides."""
    if offload.overrides:
        return offload
    default = Offload()
    changed = [name for name in OFFLOAD_FIELDS if getattr(offload, name) != getattr(default, name)]
    return ",".join(f"{name}={getattr(offload, name)}" for name in changed) or "none"


def unit_words(units: UnitChoice) -> Any:
    """Return the text that `units_named` parses to `units`, "auto" for None; `units` itself if there is no such text."""
    if units is None:
        return AUTO
    words = ",".join(units) if isinstance(units, list) and all(isinstance(u, str) for u in units) else str(units)
    try:
        return words if units_named(words) == units else units
    except UsageError:
        return units


PARSERS: Mapping[str, Callable[[str], Any]] = {
    "strategy": strategy_named,
    "precision": precision_named,
    "offload": offload_named,
    "units": units_named,
}
PRINTERS: Mapping[str, Callable[[Any], Any]] = {
    "strategy": lambda strategy: strategy.name,
    "precision": precision_words,
    "offload": offload_words,
    "units": unit_words,
}
