"""Every private or version-dependent torch name that the package uses, with the reason. Read for torch 2.11 to 2.15.

"No public name" in a docstring: torch offers it under private names only. "(all versions)": checked in torch 2.11 to 2.15.
"""

from accordion._torch.autograd import *  # noqa: F403
from accordion._torch.devices import *  # noqa: F403
from accordion._torch.fakes import *  # noqa: F403
from accordion._torch.fsdp import *  # noqa: F403
from accordion._torch.operators import *  # noqa: F403
from accordion._torch.optimizers import *  # noqa: F403
from accordion._torch.process_groups import *  # noqa: F403
from accordion._torch.tensors import *  # noqa: F403
