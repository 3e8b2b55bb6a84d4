"""Strategies for `Trainer` and `Fabric` of the older packages of Lightning, which shard on this engine."""

from __future__ import annotations

from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy
from pytorch_lightning.strategies import DDPStrategy

from accordion.integrations.lightning_fabrics import FabricMixin
from accordion.integrations.lightning_trainer import TrainerMixin


class AccordionStrategy(TrainerMixin, DDPStrategy):  # type: ignore[misc]
    """`Trainer(strategy=AccordionStrategy(sharding=dict(...)))`: see `TrainerMixin`."""


class FabricStrategy(FabricMixin, FabricDDPStrategy):  # type: ignore[misc]
    """`Fabric(strategy=FabricStrategy(sharding=dict(...)))`: see `FabricMixin`."""
