"""`AccordionStrategy` for `Trainer` and `FabricStrategy` for `Fabric` of the package `lightning`."""

from accordion.integrations.lightning_common import over_ddp
from accordion.integrations.lightning_fabrics import FabricMixin
from accordion.integrations.lightning_trainer import TrainerMixin

AccordionStrategy = over_ddp("AccordionStrategy", TrainerMixin, "lightning.pytorch", __name__)
FabricStrategy = over_ddp("FabricStrategy", FabricMixin, "lightning.fabric", __name__)
