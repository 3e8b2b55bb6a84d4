"""Strategies for `Trainer` and `Fabric` of the package `lightning`, which shard on this engine."""

from __future__ import annotations

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy

from accordion.integrations.lightning_fabrics import FabricMixin
from accordion.integrations.lightning_trainer import TrainerMixin


class AccordionStrategy(TrainerMixin, DDPStrategy):  # type: ignore[misc]
    """`Trainer(strategy=AccordionStrategy(sharding=dict(...)))`: see `TrainerMixin`."""


class FabricStrategy(FabricMixin, FabricDDPStrategy):  # type: ignore[misc]
    """`Fabric(strategy=FabricStrategy(sharding=dict(...)))`: see `FabricMixin`."""
