"""Re-export torch's wrap policies. They choose modules; the wrapper, or `enable_wrap`, chooses the class that wraps them."""

from torch.distributed.fsdp.wrap import *  # noqa: F403
from torch.distributed.fsdp.wrap import __all__ as __all__
