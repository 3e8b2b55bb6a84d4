"""`AccordionStrategy` for `Trainer` and `FabricStrategy` for `Fabric` of the older packages of Lightning."""

from accordion.integrations.lightning_common import over_ddp
from accordion.integrations.lightning_fabrics import FabricMixin
from accordion.integrations.lightning_trainer import TrainerMixin

AccordionStrategy = over_ddp("AccordionStrategy", TrainerMixin, "pytorch_lightning", __name__)
FabricStrategy = over_ddp("FabricStrategy", FabricMixin, "lightning_fabric", __name__)
