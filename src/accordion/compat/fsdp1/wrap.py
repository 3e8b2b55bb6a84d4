"""The wrap policies: torch's own. They name modules; which class wraps them is what `enable_wrap` or the wrapper says."""

from torch.distributed.fsdp.wrap import *  # noqa: F403
from torch.distributed.fsdp.wrap import __all__ as __all__
