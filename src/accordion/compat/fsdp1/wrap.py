"""Re-export torch's wrap policies. They choose modules; `enable_wrap` or the wrapper chooses the class that wraps them."""

from torch.distributed.fsdp.wrap import *  # noqa: F403
from torch.distributed.fsdp.wrap import __all__ as __all__
